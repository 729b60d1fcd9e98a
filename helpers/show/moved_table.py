"""Plans of a ladder that moves memory to the host: bytes in both memories, and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from helpers.strategy.show import how_sure, settings
from helpers.tables import Table
from tight_fit.checks import each_of_type
from tight_fit.gpus import GPU, as_gpu
from tight_fit.kernels.step_seconds import lacks
from tight_fit.memory.plan import Plan
from tight_fit.units import size, span


def moved(named: Mapping[str, Plan], gpus: Sequence[str | GPU]) -> Table:
    """A row per plan: what it needs on the GPU and on the host, and the step's time on each GPU.

    named  {label: a plan for "cuda"}, each rung below the one it is compared with
    gpus   names of `gpus.GPUS`; "does not fit" stands where the GPU has too little memory

    What moves is timed with data sheets' rates of PCI Express and of the host's memory, which are
    not fitted (`timing.host_memory`). Raises TypeError for what is no plan.
    """
    each_of_type("named", named, Plan)
    rows, before = [], None
    for label, planned in named.items():
        rows.append(
            {
                "planned": label,
                "on the GPU": size(planned.peak),
                "this rung": "" if before is None else _change(planned.peak - before),
                "on the host": size(planned.host) if planned.host else "nothing",
                **{gpu.name: _cell(planned, gpu) for gpu in map(as_gpu, gpus)},
            }
        )
        before = planned.peak
    return Table(
        rows,
        "Planned, nothing was run: memory at the peak of an optimizer step, and the step's time, "
        f"{settings(planned.recipe for planned in named.values())}. {how_sure()} "
        "Copies to and from the host are timed by data sheets.",
    )


def _change(difference: int) -> str:
    return f"{'-' if difference < 0 else '+'}{size(abs(difference))}"


def _cell(planned: Plan, gpu: GPU) -> str:
    if planned.operations is not None and (lacking := lacks(planned.operations, gpu)):
        return f"no {lacking}"
    return span(planned.seconds(gpu).total) if planned.fits(gpu) else "does not fit"
