"""`%%plan --gpu "RTX 3060"` above a notebook's cell: its training planned, the kernel unchanged.

    %load_ext tight_fit

The cell runs in a copy of the kernel's process, which sees every name that earlier cells defined
and changes none of them here. Models that earlier cells made are planned as they are: their
parameters count where they lie, and their values are not read. A kernel in which CUDA has
started cannot be copied (`process.copy_computes`); its user is told of `tight-fit script`.
"""

from __future__ import annotations

import argparse
import linecache
import shlex
from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.display import display

from tight_fit.command.arguments import OneLineParser, whole_number
from tight_fit.gpus import find
from tight_fit.script import existing, process, program
from tight_fit.script.given import SECONDS
from tight_fit.script.plan import ProgramPlan, with_remedies
from tight_fit.script.sandbox import NotPlanned

CELL = "<the cell>"
# Magics that start no other program and run no other file: a planned cell may use these.
HARMLESS = frozenset(
    "autoawait autoreload capture cd colors config env gui load_ext matplotlib precision pwd pylab "
    "reload_ext set_env time timeit who whos writefile xmode".split()
)


class _Options(OneLineParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f'{message.rstrip(".")}: write %%plan --gpu "RTX 3060", for example.')


def options() -> argparse.ArgumentParser:
    """The options of the magic."""
    parser = _Options(prog="%%plan", add_help=False)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("--seconds", type=whole_number(1, 86400), default=SECONDS)
    return parser


@magics_class
class PlanMagics(Magics):
    """The magic `%%plan`."""

    @cell_magic
    def plan(self, line: str, cell: str) -> None:
        """Plan the training that the cell does, print the report, and draw the timeline."""
        try:
            asked = options().parse_args(shlex.split(line))
            found = planned(self.shell, cell, asked)
        except (ValueError, SyntaxError) as error:
            print(f"%%plan: {error}")
            return
        except program.ProgramFailed as error:
            print("\n".join([f"%%plan: {error}.", *(f"  {own}" for own in error.lines)]))
            return
        print(found)
        display(_figure(found.facts))


def planned(shell: Any, cell: str, asked: argparse.Namespace) -> ProgramPlan:
    """The plan of the cell. Raises as `process.plan`."""
    gpu = find(asked.gpu)
    work = work_of(shell, cell)

    def plan(change: dict[str, Any]) -> dict[str, Any]:
        wanted = program.ToPlan(CELL, (), gpu, change=change, cell=True)
        return process.plan(wanted, work, asked.seconds, trust=asked.trust)

    return with_remedies(plan, gpu, asked.quick)


def work_of(shell: Any, cell: str) -> Callable[[], object]:
    """The cell as a function that runs in the kernel's names; call it in a copy of the kernel."""
    text = shell.transform_cell(cell)
    code = compile(text, CELL, "exec")
    linecache.cache[CELL] = len(text), None, text.splitlines(keepends=True), CELL
    names = shell.user_ns

    def work() -> None:
        _without_programs(shell)
        existing.lay_out(names)
        exec(code, names)

    return work


def _without_programs(shell: Any) -> None:
    """Let this copy of the kernel refuse `!command`, and magics that are not known as harmless."""

    def no_command(command: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotPlanned(
            f"starts another program (!{command.strip()[:60]}): take it out of the cell, and run "
            "it in a cell of its own"
        )

    def only_harmless(run: Callable, mark: str) -> Callable:
        def magic(name: str, *args: Any, **kwargs: Any) -> Any:
            if name not in HARMLESS:
                raise NotPlanned(
                    f"starts the magic {mark}{name[:30]}, which may run other programs: take it "
                    "out of the cell, and run it in a cell of its own"
                )
            return run(name, *args, **kwargs)

        return magic

    for name in ("system", "system_piped", "system_raw", "getoutput"):
        setattr(shell, name, no_command)
    shell.run_line_magic = only_harmless(shell.run_line_magic, "%")
    shell.run_cell_magic = only_harmless(shell.run_cell_magic, "%%")


def _figure(facts: dict[str, Any]) -> Any:
    """Bytes over the step that holds the peak, by category."""
    import matplotlib.pyplot as plt
    import numpy as np

    from tight_fit.command.alt_text import described
    from tight_fit.command.told_apart import COLOURS
    from tight_fit.trace.storage_trace import CATEGORIES
    from tight_fit.units import GIB, MIB

    rows = np.array(facts["timeline"]["bytes"], dtype=float)
    top = rows.sum(axis=1).max()
    unit, name = (GIB, "GiB") if top >= GIB else (MIB, "MiB")
    figure, axis = plt.subplots(figsize=(8, 3.4))
    colours = [COLOURS[category] for category in CATEGORIES]
    axis.stackplot(range(len(rows)), (rows / unit).T, labels=CATEGORIES, colors=colours)
    axis.set(
        xlabel=f"step {facts['timeline']['step'] + 1}, event by event",
        ylabel=name,
        xticks=[],
        xlim=(0, max(1, len(rows) - 1)),
    )
    if facts["card_memory"] < 3 * top:
        style: dict[str, Any] = {
            "color": "black",
            "linestyle": "--",
            "linewidth": 1,
            "label": "memory of the GPU",
        }
        axis.axhline(facts["card_memory"] / unit, **style)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
    return described(figure, "Bytes alive over the step that holds the peak, by category.")
