"""`python -m helpers.strategy`: make the kept plans anew (`make plans`)."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.commands.arguments import OneLineParser
from helpers.commands.wrapper import run

NAME = "python -m helpers.strategy"
GROUPS = ("layouts", "ladder", "techniques")  # kept plans, each group in a file of its name
CONTEXT = "context"  # plans of layouts of any model, which are kept as facts (`long_context`)


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
        "context (notebook 24); all by default",
    )
    groups = parser.parse_args(arguments).groups or [*GROUPS, CONTEXT]
    unknown = ", ".join(repr(group) for group in groups if group not in (*GROUPS, CONTEXT))
    if unknown:
        parser.error(f"{unknown} is not known: use {', '.join((*GROUPS, CONTEXT))}.")
    from helpers.strategy import choose, ladder, long_context, techniques  # takes seconds
    from helpers.strategy.plan_cache import CACHE

    rooms = {"layouts": choose, "ladder": ladder, "techniques": techniques}
    for group in groups:
        if group == CONTEXT:
            print(f"Written: {long_context.write()}", flush=True)
            continue
        CACHE.forget()
        rooms[group].plan_everything()
        print(f"Written: {CACHE.write(group)}", flush=True)


if __name__ == "__main__":
    raise SystemExit(run(main, NAME))
