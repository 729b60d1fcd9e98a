"""The model of the machine: tiles, waves, bytes and two clocks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tight_fit.gpus.specs import SPECS
from tight_fit.kernels.kernel_time import (
    SIZE,
    kernel_seconds,
    moving_seconds,
    seconds_at_full_rate,
    tiled_seconds,
)
from tight_fit.kernels.op import Op
from tight_fit.kernels.step_seconds import _two_clocks, seconds
from tight_fit.kernels.traced_ops import TracedOps

ONE_TILE = {"tiles": ((128, 128),), "parts": (1,), "efficiency": 1.0}
ONE_TILE |= {"small_tile": 0.0, "alone": 1.0, "start": 0.0}


def product(m: int, n: int, k: int, batch: int = 1, arithmetic: str = "fp32") -> Op:
    size, flops = SIZE[arithmetic], 2 * batch * m * n * k
    moved = size * batch * (m * k + k * n), size * batch * m * n
    return Op("mm", "matmul", arithmetic, flops, *moved, (batch, m, n, k), "nn")


def test_one_tile_more_than_a_wave_takes_twice_as_long():
    shapes = ((tiles, 128, 128, 1024) for tiles in (100, 101))
    full, one_more = (float(tiled_seconds(s, 4, 100, 1e13, 1e15, **ONE_TILE)) for s in shapes)
    assert one_more == pytest.approx(2 * full)
    assert full == pytest.approx(2 * 128 * 128 * 1024 * 100 / 1e13)


def test_a_narrow_product_waits_for_memory():
    took = float(tiled_seconds((1, 4096, 1, 4096), 4, 100, 1e15, 1e12, **ONE_TILE))
    assert took == pytest.approx(4 * (4096 * 4096 + 2 * 4096) / 1e12)


def test_what_fits_the_cache_moves_faster():
    small, large = (
        float(moving_seconds(size, 1e12, 0.8, 10**7, 2.0)) / size for size in (10**4, 10**9)
    )
    assert large == pytest.approx(1 / 0.8e12) and small == pytest.approx(large / 2, rel=0.01)


SIDES = st.integers(1, 5000)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SPECS)), SIDES, SIDES, SIDES, st.integers(1, 64))
def test_no_product_beats_the_machine(name, m, n, k, batch):
    """Nothing is faster than the peak allows; the one GPU above its advertised clock may be by a
    tenth."""
    gpu = SPECS[name]
    for arithmetic in ("fp32", "fp16"):
        if getattr(gpu, arithmetic):
            op = product(m, n, k, batch, arithmetic)
            assert float(kernel_seconds([op], gpu)[0]) >= op.flops / (1.1 * gpu.peak(arithmetic))


def by_hand(on_cpu, on_gpu, waits):
    """The two clocks, one operation after another."""
    cpu, gpu, ends = 0.0, 0.0, []
    for issue, work, wait in zip(on_cpu, on_gpu, waits):
        cpu += issue
        gpu = max(gpu, cpu) + work
        cpu = max(cpu, gpu) if wait else cpu
        ends.append(gpu)
    return ends


times = st.lists(
    st.tuples(st.floats(0, 10), st.floats(0, 10), st.booleans()), min_size=1, max_size=40
)


@given(times)
def test_two_clocks_are_those_counted_by_hand(steps):
    on_cpu, on_gpu, waits = (np.array(column) for column in zip(*steps))
    assert _two_clocks(on_cpu, on_gpu, waits.astype(bool)) == pytest.approx(
        by_hand(on_cpu, on_gpu, waits)
    )


def traced(op: Op, times: int) -> TracedOps:
    return TracedOps([(op,)], [(0, 0)] * times)


def test_short_kernels_wait_for_their_launches_and_long_ones_do_not():
    short, long = (
        seconds(traced(product(size, size, size), 1000), "A100-40GB") for size in (32, 4096)
    )
    assert short.waiting > 0.5 * short.total and long.waiting < 0.01 * long.total
    assert short.launches == long.launches == 1000


def test_the_parts_are_the_whole():
    op, view = product(512, 512, 512), ()
    step = TracedOps([(op,), view], [(0, 0), (1, 0), (0, 1), (0, 2), (0, 3)])
    found = seconds(step, "V100-32GB")
    parts = sum(share.seconds for share in found.kernels) + found.waiting
    assert found.total == pytest.approx(parts) and found.flops == 4 * op.flops
    assert found.low < found.total < found.high and found.measured
    assert "a step on the V100-32GB" in str(found)


def test_micro_batches_that_are_not_traced_are_repeated():
    step = TracedOps([(product(8, 8, 8),)], [(0, 0), (0, 1), (0, 3)])
    step.repeat(0, 2, 3)
    assert step.issued().tolist() == [[0, 0], [0, 1]] * 4 + [[0, 3]]
    flops = product(8, 8, 8).flops
    assert step.flops == {"forward": 4 * flops, "backward": 4 * flops, "recompute": 0} | {
        "optimizer": flops
    }


def test_tf32_runs_on_tensor_cores_where_there_are_any():
    step = traced(product(4096, 4096, 4096), 10)
    plain = {name: seconds(step, name).total for name in ("A100-40GB", "T4")}
    step.tf32 = True
    assert seconds(step, "A100-40GB").total < plain["A100-40GB"] / 3
    assert seconds(step, "T4").total == plain["T4"]


def test_an_empty_step_takes_no_time():
    assert seconds(TracedOps(), "T4").total == 0


@pytest.mark.parametrize("arithmetic", ["fp32", "fp16"])
def test_long_attention_takes_what_its_flops_take_at_full_rate(arithmetic):
    """A search leaves out layouts whose FLOPs alone take too long: the bound is never above."""
    flops = 4 * 64 * 8192 * 8192 * 128
    op = Op("attention", "attention", arithmetic, flops, 2**20, 2**20, (64, 8192, 8192, 128))
    for name in ("T4", "RTX 3090", "A100-40GB", "H100"):
        bound = seconds_at_full_rate(op, SPECS[name])
        assert float(kernel_seconds([op], SPECS[name])[0]) == pytest.approx(bound, rel=1e-3)
        assert bound > flops / SPECS[name].peak(arithmetic)
