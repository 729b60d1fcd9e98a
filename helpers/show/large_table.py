"""The table of searched layouts for large models, the published choice among them."""

from __future__ import annotations

from helpers.strategy import large_models
from helpers.tables import Table
from tight_fit.units import duration, size


def large(name: str, most: int = 4) -> Table:
    """The best layouts of a job of `large_models.JOBS`, the best first, and the published one.

    The last column marks what torchtitan published, with its tokens per second and GPU.

    Nothing is planned here: the plans are kept with the package. Raises KeyError for another name.
    """
    job, found = large_models.JOBS[name], large_models.kept()[name]
    published, rows = found["published"], found["rows"][:most]
    rows += [published] if published not in rows else []
    return Table(
        [_line(row, _measured(job) if row == published else "") for row in rows],
        f"Planned, nothing was run: Llama 3.1 {job.model} on {job.cluster}, "
        f"{job.step.batch_size} examples of {large_models.LENGTH:,} tokens per step.",
    )


def _measured(job: large_models.LargeJob) -> str:
    eager, compiled = job.measured
    return f"torchtitan's: {f'{eager:,}, ' if eager else ''}compiled {compiled:,}"


def _line(row: large_models.Facts, mark: str) -> dict[str, str]:
    return {
        "layout": row["layout"],
        "recomputation": row["recompute"],
        "micro-batches": str(row["micro_batches"]),
        "need per GPU": size(row["need"]),
        "time per step": duration(row["seconds"]),
        "tokens per second and GPU": f"{row['tokens_per_second_per_gpu']:,.0f}",
        "published": mark,
    }
