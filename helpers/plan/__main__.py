"""`python -m helpers.plan`: does this training step fit that GPU?

`tight-fit` does the same, and also plans several GPUs and training programs.
"""

from helpers.plan.command import entry

if __name__ == "__main__":
    raise SystemExit(entry("python -m helpers.plan"))
