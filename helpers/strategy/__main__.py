"""`python -m helpers.strategy`: make the kept plans anew (`make plans`)."""

from __future__ import annotations

from collections.abc import Sequence

from tight_fit.command.arguments import OneLineParser
from tight_fit.command.wrapper import run

NAME = "python -m helpers.strategy"
GROUPS = ("layouts", "ladder", "techniques")  # kept plans, a file for each group
# Plans of layouts of any model, which are kept as facts: `long_context`, `searches`.
CONTEXT, SEARCHES = "context", "searches"
ALL = (*GROUPS, CONTEXT, SEARCHES)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan the groups that are asked for and write each to its file."""
    parser = OneLineParser(
        prog=NAME,
        description="Plan anew what is kept in helpers/strategy/plans/, which takes some minutes.",
    )
    parser.add_argument(
        "groups",
        nargs="*",
        metavar="group",
        help="layouts (notebooks 18, 19), ladder (notebook 19), techniques (README and notebooks), "
        "context (notebook 24), searches (notebook 18); all by default",
    )
    groups = parser.parse_args(arguments).groups or ALL
    unknown = ", ".join(repr(group) for group in groups if group not in ALL)
    if unknown:
        parser.error(f"{unknown} is not known: use {', '.join(ALL)}.")
    # These take seconds to import.
    from helpers.plan import searches
    from helpers.strategy import choose, ladder, long_context, techniques
    from helpers.strategy.plan_cache import CACHE

    plans = {"layouts": choose, "ladder": ladder, "techniques": techniques}
    facts = {CONTEXT: long_context, SEARCHES: searches}
    for group in groups:
        if group in facts:
            print(f"Written: {facts[group].write()}", flush=True)
            continue
        CACHE.forget()
        plans[group].plan_everything()
        print(f"Written: {CACHE.write(group)}", flush=True)


if __name__ == "__main__":
    raise SystemExit(run(main, NAME))
