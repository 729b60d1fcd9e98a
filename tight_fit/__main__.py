"""`python -m tight_fit`: the command `tight-fit`."""

from tight_fit.command.main import entry

if __name__ == "__main__":
    raise SystemExit(entry("python -m tight_fit"))
