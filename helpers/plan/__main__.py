"""`python -m helpers.plan`: make the kept plans anew (`make plans`)."""

from __future__ import annotations

from collections.abc import Sequence

from tight_fit.command.arguments import OneLineParser
from tight_fit.command.wrapper import run

NAME = "python -m helpers.plan"
GROUPS = ("context", "searches", "layouts")  # a file for each


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan the groups that are asked for and write each to its file."""
    parser = OneLineParser(
        prog=NAME,
        description="Plan anew what is kept in helpers/plan/plans/, which takes many minutes.",
    )
    parser.add_argument(
        "groups",
        nargs="*",
        metavar="group",
        help="context (notebook 24), searches (notebook 18), layouts (notebooks 13 to 19); "
        "all by default",
    )
    groups = parser.parse_args(arguments).groups or GROUPS
    unknown = ", ".join(repr(group) for group in groups if group not in GROUPS)
    if unknown:
        parser.error(f"{unknown} is not known: use {', '.join(GROUPS)}.")
    # These take seconds to import.
    from helpers.plan import kept_layouts, long_context, searches

    made = {"context": long_context, "searches": searches, "layouts": kept_layouts}
    for group in groups:
        print(f"Written: {made[group].write()}", flush=True)


if __name__ == "__main__":
    raise SystemExit(run(main, NAME))
