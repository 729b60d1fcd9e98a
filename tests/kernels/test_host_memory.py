"""Copies to and from the host beside a GPU's computation, on steps made by hand."""

import numpy as np
import pytest

from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.gpus.specs import find_gpu
from tight_fit.kernels.host_memory import (
    FROM_HOST,
    HOST_RATE,
    LINKS,
    ON_HOST,
    REACHED,
    TO_HOST,
    ends_with_host,
    link_rate,
    waiting,
)
from tight_fit.kernels.op import Op

A100 = find_gpu("A100-40GB")
RATE = link_rate(A100)
COMPUTE, COPY = 0.010, 0.004  # seconds


def op(kind: str, seconds: float) -> Op:
    rate = HOST_RATE if kind == ON_HOST else RATE
    return Op("copy_", kind, "fp32", 0, 0, round(seconds * rate))


def end(*steps: Op | float) -> float:
    """When a step ends; a number is an operation of the GPU that takes so many seconds."""
    ops = [(step,) if isinstance(step, Op) else () for step in steps]
    on_gpu = np.array([0.0 if isinstance(step, Op) else step for step in steps])
    none = np.zeros(len(steps))
    ends = ends_with_host(ops, np.arange(len(steps)), none, on_gpu, none.astype(bool), A100)
    assert (np.diff(ends) >= 0).all()
    return ends[-1]


def test_a_copy_runs_beside_what_is_computed():
    assert end(COMPUTE, op(TO_HOST, COPY), COMPUTE) == pytest.approx(2 * COMPUTE)
    assert end(COMPUTE, op(TO_HOST, COPY)) == pytest.approx(COMPUTE + COPY)


def test_the_gpu_waits_for_the_copies_that_it_is_told_of():
    copies = [op(TO_HOST, COPY)] * 3
    assert end(*copies, waiting(TO_HOST, 0), COMPUTE) == pytest.approx(3 * COPY + COMPUTE)
    assert end(*copies, waiting(TO_HOST, 2), COMPUTE) == pytest.approx(COPY + COMPUTE)
    assert end(*copies, waiting(FROM_HOST, 0), COMPUTE) == pytest.approx(3 * COPY)


def test_both_directions_at_once_and_each_one_after_another():
    there, back = op(TO_HOST, COPY), op(FROM_HOST, COPY)
    assert end(there, back) == pytest.approx(COPY)
    assert end(there, there, back) == pytest.approx(2 * COPY)


def test_the_cpu_computes_when_what_it_reads_has_come():
    work = op(ON_HOST, 0.02)
    assert end(op(TO_HOST, COPY), work) == pytest.approx(COPY + 0.02)
    after = end(op(TO_HOST, COPY), work, op(FROM_HOST, COPY), waiting(FROM_HOST, 0), COMPUTE)
    assert after == pytest.approx(2 * COPY + 0.02 + COMPUTE)


def test_each_generation_of_gpus_has_its_link():
    rates = {name: link_rate(find_gpu(name)) for name in ("T4", "A100-40GB", "H100")}
    assert rates == {
        name: LINKS[generation] * REACHED for name, generation in zip(rates, (3, 4, 5))
    }


def test_prefetching_hides_what_the_link_can_carry():
    """A longer step hides the same copies; none makes a step shorter than the copies take."""
    recipe = Recipe(model="vit", profile="full", batch_size=16)
    moved = replace(recipe, offload="activations")
    kept, away = plan(recipe), plan(moved)
    for gpu in ("T4", "A100-40GB"):
        plain, offloaded = kept.seconds(gpu).total, away.seconds(gpu).total
        floor = away.host / link_rate(find_gpu(gpu))
        assert max(plain, floor) < offloaded < plain + 2.2 * floor


def test_an_optimizer_on_the_host_is_slow_for_all_weights_and_not_for_adapters():
    ratios = []
    for lora_rank in (None, 8):
        recipe = Recipe(model="vit", profile="full", batch_size=16, lora_rank=lora_rank)
        plain, moved = (
            plan(replace(recipe, offload=offload)).seconds("A100-40GB").total
            for offload in (None, "optimizer")
        )
        ratios.append(moved / plain)
    assert ratios[0] > 1.5 > 1.1 > ratios[1] > 1, "with all weights, with adapters"
