"""`python -m helpers.plan`: does this training step fit that GPU?"""

from helpers.plan.command import main

if __name__ == "__main__":
    raise SystemExit(main())
