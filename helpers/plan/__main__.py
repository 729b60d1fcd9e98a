"""`python -m helpers.plan`: will this step fit that GPU?"""

from helpers.plan.command import main

if __name__ == "__main__":
    raise SystemExit(main())
