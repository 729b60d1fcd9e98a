"""`python -m helpers.plan`: does this training step fit that GPU? The same as `tight-fit`."""

from helpers.plan.command import entry

if __name__ == "__main__":
    raise SystemExit(entry("python -m helpers.plan"))
