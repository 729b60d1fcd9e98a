"""All points, and those that were left out after their plan was seen, with the reason."""

from __future__ import annotations

from benchmarks import published_peaks
from benchmarks.peaks import (
    attention_tables,
    litgpt,
    litgpt_hub,
    mistral,
    others,
    small_gpt,
    vit_ladder,
)
from benchmarks.peaks.point import Point

PREFLIGHT = "torch-preflight 0.5.0 on PyPI, tests/calibration/measured_peaks.json"
OPTIMUM = "https://huggingface.co/datasets/optimum-benchmark/cuda"


def _of(step: published_peaks.Published) -> Point:
    """A step of `published_peaks`, which says how it was measured."""
    on_t4 = step.gpu.name == "T4"
    return Point(
        step.name,
        PREFLIGHT if on_t4 else OPTIMUM,
        "2.11" if on_t4 else "2.2 to 2.4",
        step.gpu,
        step.setup,
        step.allocated,
        step.reserved,
        steps=2 if on_t4 else 5,
    )


POINTS: tuple[Point, ...] = (
    *map(_of, published_peaks.STEPS),
    *small_gpt.POINTS,
    *litgpt.POINTS,
    *litgpt_hub.POINTS,
    *mistral.POINTS,
    *attention_tables.POINTS,
    *others.POINTS,
    *vit_ladder.POINTS,
)
# Start of the names of points -> why their set-up is not what was measured.
_REASONS = {
    "Pythia": "Pythia-410M (6 figures, seen from -7 % to -21 %): transformers of 2024 kept a "
    "causal mask of 4 MiB in each layer, and computed attention otherwise.",
    "OPT": "OPT-350M (6 figures, seen from -0.02 % to -22 %): transformers of 2024 computed its "
    "softmax in fp32 beside fp16 weights, and attention otherwise.",
    "ALBERT": "ALBERT-base (6 figures, seen from +16 % to +20 %): the page does not say which "
    "checkpoint was measured. The second version, the default of its script, keeps much more than "
    "the first, which its example names.",
}
LEFT_OUT: dict[str, str] = {
    point.name: reason
    for start, reason in _REASONS.items()
    for point in POINTS
    if point.name.startswith(start)
}
