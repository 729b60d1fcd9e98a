"""`python -m helpers.strategy`: make the kept plans anew (`make plans`)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from helpers.strategy import choose, ladder, techniques
from helpers.strategy.plan_cache import CACHE

# The plans that are kept, each group in a file of its name.
GROUPS = {
    "layouts": choose.plan_everything,
    "ladder": ladder.plan_everything,
    "techniques": techniques.plan_everything,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan the groups that are asked for and write each to its file."""
    parser = argparse.ArgumentParser(
        prog="python -m helpers.strategy",
        description="Plan anew what is kept in helpers/strategy/plans/, which takes some minutes.",
    )
    parser.add_argument(
        "groups",
        nargs="*",
        metavar="group",
        help="layouts (notebooks 18, 19), ladder (notebook 19), techniques (README and notebooks); "
        "all by default",
    )
    groups = parser.parse_args(arguments).groups or list(GROUPS)
    unknown = ", ".join(group for group in groups if group not in GROUPS)
    if unknown:
        parser.error(f"{unknown}: use {', '.join(GROUPS)}")
    for group in groups:
        CACHE.forget()
        GROUPS[group]()
        print(f"Written: {CACHE.write(group)}", flush=True)


if __name__ == "__main__":
    main()
