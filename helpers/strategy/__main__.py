"""`python -m helpers.strategy`: plan what notebook 18 shows anew and keep it (minutes)."""

from helpers.strategy.choose import main

if __name__ == "__main__":
    main()
