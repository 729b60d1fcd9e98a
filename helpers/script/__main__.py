"""`python -m helpers.script train.py --gpu T4`: the command `tight-fit script`."""

import sys

from helpers.script.command import entry

if __name__ == "__main__":
    sys.exit(entry("python -m helpers.script", sys.argv[1:]))
