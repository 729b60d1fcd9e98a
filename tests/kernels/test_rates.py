"""What only a measured GPU's plan has: each mechanism against arithmetic by hand."""

import numpy as np
import pytest
import torch

from benchmarks import gpu_seconds
from helpers import record
from tight_fit.gpus import calibration
from tight_fit.gpus.specs import SPECS
from tight_fit.kernels import measure_gpu, step_seconds
from tight_fit.kernels.kernel_time import aligned, constants, kernel_seconds
from tight_fit.kernels.op import Op
from tight_fit.kernels.trace_ops import TraceOps
from tight_fit.kernels.traced_ops import TracedOps

H200 = SPECS["H200"]
TABLE = H200._replace(rates=None)
GAP = constants()["shared"]["gap"]
GIB = 2**30


def walk(run):
    """How the last elementwise kernel of `run` walks through memory."""
    with TraceOps() as trace:
        run()
    ops = [op for index, _ in trace.traced.order for op in trace.traced.ops[index]]
    return [op.layout for op in ops if op.kind == "elementwise"][-1]


ROWS, HALVES = torch.ones(6, 4), torch.ones(6, 4, dtype=torch.bfloat16)
TURNED = torch.ones(2, 3, 4).transpose(0, 1)
WALKS = {
    "as they lie": (lambda: ROWS + ROWS, ""),
    "both turned alike": (lambda: TURNED + TURNED, ""),
    "one turned": (lambda: TURNED + torch.ones(3, 2, 4), "strided"),
    "a column for every row": (lambda: ROWS * torch.ones(6, 1), "strided"),
    "a part of each row": (lambda: -ROWS[:, :2], "strided"),
    "put together": (lambda: torch.cat([ROWS, ROWS]), "strided"),
    "filled, for which nothing is read": (lambda: TURNED.new_zeros(5, 4), ""),
    "by a number": (lambda: ROWS * 2.0, ""),
    "two dtypes": (lambda: ROWS + HALVES, "cast"),
    "from 16 bits": (lambda: HALVES.float(), "cast"),
    "to 16 bits, for which PyTorch has a kernel": (lambda: ROWS.bfloat16(), ""),
}


@pytest.mark.parametrize("case", WALKS)
def test_an_elementwise_kernel_walks_as_its_operands_lie(case):
    run, expected = WALKS[case]
    assert walk(run) == expected


def test_where_kernels_were_not_measured_the_walk_changes_nothing():
    plain = Op("mul", "elementwise", "fp32", 0, GIB, GIB)
    strided = plain._replace(layout="strided")
    assert kernel_seconds([plain], TABLE) == kernel_seconds([strided], TABLE)
    mine = kernel_seconds([plain, strided], H200) - GAP
    shares = H200.rates.moving
    assert mine[1] / mine[0] == pytest.approx(shares.elementwise / shares.strided)


def matmul(m, n, k, layout="nn", arithmetic="bf16"):
    size = 4 if arithmetic == "fp32" else 2
    moved = size * (m * k + k * n), size * m * n
    return Op("mm", "matmul", arithmetic, 2 * m * n * k, *moved, (1, m, n, k), layout)


@pytest.mark.parametrize(
    "shape, layout, expected",
    [
        ((8192, 50_304, 1024), "nn", True),
        ((8192, 50_257, 1024), "nn", False),  # the result's rows
        ((8192, 1024, 50_257), "tt", False),  # the right's rows
        ((50_257, 1024, 8192), "nt", False),  # the left, turned, has rows of m
        ((50_257, 1024, 8192), "nn", True),
        ((512, 1, 1024), "nn", True),  # a vector is read as it comes
    ],
)
def test_rows_that_begin_at_no_multiple_of_16_bytes_are_seen(shape, layout, expected):
    assert aligned(matmul(*shape, layout)) is expected


def test_an_odd_vocabulary_is_slow_in_16_bits_on_a_measured_gpu():
    even, odd = matmul(8192, 50_256, 1024), matmul(8192, 50_257, 1024)
    mine = kernel_seconds([even, odd], H200) - GAP
    assert mine[1] / mine[0] == pytest.approx(1 / H200.rates.unaligned, rel=0.01)
    ratio = np.divide(*kernel_seconds([odd, even], TABLE))
    assert ratio == pytest.approx(1, rel=0.01), "as before elsewhere"
    wide = [matmul(8192, n, 1024, arithmetic="fp32") for n in (50_257, 50_256)]
    assert np.divide(*kernel_seconds(wide, H200)) == pytest.approx(1, rel=0.01)


def attention(keys, causal=""):
    flops = 4 * 64 * keys * keys * 128 // (2 if causal else 1)
    return Op("a", "attention", "bf16", flops, 1, 1, (64, keys, keys, 128), causal)


def test_attention_begins_in_the_time_of_some_keys_of_which_a_causal_query_has_half():
    start = H200.rates.attention_start
    for causal, mean in (("", 1), ("causal", 2)):
        mine, before = (
            kernel_seconds([attention(2048, causal)], gpu)[0] - GAP for gpu in (H200, TABLE)
        )
        assert mine / before == pytest.approx(1 + start * mean / 2048)


def test_fused_adamw_takes_as_long_an_element_in_bf16_as_in_fp32():
    count = 10**9
    wide, narrow = (
        Op("_fused_adamw_", "multi_tensor", "fp32", 0, size, size, (count,))
        for size in (16 * count, 8 * count)
    )
    assert np.divide(*kernel_seconds([wide, narrow], H200)) == pytest.approx(1)
    assert np.divide(*kernel_seconds([wide, narrow], TABLE)) == pytest.approx(2, rel=0.01)


UPDATE = Op("optimizer_update_8bit_blockwise", "multi_tensor", "fp32", 0, 8, 8, (34 * 10**6,))


def test_8_bit_updates_are_bound_by_arithmetic_and_wait_one_by_one():
    step = TracedOps(ops=[(UPDATE,)], order=[(0, 3)] * 10)
    assert not step_seconds.operation_times(step, TABLE).waits.any()
    issued = H200.rates.eight_bit_launch * H200.rates.by_phase[3]
    kernel = 34e6 / H200.rates.eight_bit + GAP
    assert step_seconds.seconds(step, H200).total == pytest.approx(10 * (issued + kernel))


def test_each_phase_has_launches_of_its_own():
    tiny = Op("add", "elementwise", "fp32", 0, 4, 4)
    step = TracedOps(ops=[(tiny,)], order=[(0, phase) for phase in range(4) for _ in range(1000)])
    phases = step_seconds.seconds(step, H200).phases
    kernel = constants()["shared"]["dispatch"]["kernel"]
    for seconds, slower in zip(phases.values(), H200.rates.by_phase):
        assert seconds == pytest.approx(1000 * kernel * slower, rel=0.01)


@pytest.mark.parametrize("layout, slow", [("nchw", True), ("nhwc", False)])
def test_batch_norms_in_bf16_are_pytorchs_own_where_channels_come_first(layout, slow):
    norms = [
        Op("b", "batch_norm", arithmetic, 0, GIB, GIB, (64, 10**6), layout)
        for arithmetic in ("bf16", "fp16")
    ]
    own, cudnn = kernel_seconds(norms, H200)
    assert own > 2 * cudnn if slow else own == cudnn
    assert len(set(kernel_seconds(norms, TABLE))) == 1


class FakeGpu:
    """Events of a GPU on which a run takes 1 and a square 4, and the CPU 2 to launch either."""

    def __init__(self, monkeypatch):
        self.cpu = self.gpu = 0.0
        outer = self

        class Event:
            def __init__(self, enable_timing):
                self.at = 0.0

            def record(self):
                self.at = outer.gpu

            def query(self):
                return self.at <= outer.cpu

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def wait(self):
        self.cpu = self.gpu = max(self.cpu, self.gpu)

    def work(self, seconds):
        self.cpu += 2e-6
        self.gpu = max(self.gpu, self.cpu) + seconds


class Square:
    def __init__(self, gpu):
        self.gpu = gpu

    def __matmul__(self, other):
        self.gpu.work(4e-6)


def test_what_is_timed_is_the_gpu_and_not_its_launches(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    clock = object.__new__(measure_gpu.Stopwatch)
    clock._square, clock._busy, clock._ahead = Square(gpu), 4e-6, 1

    def run():
        gpu.work(1e-6)

    assert clock._between(run, 100) == pytest.approx(2e-6, rel=0.02), "the launches"
    assert clock._between(run, 100, behind=True) == pytest.approx(1e-6, rel=0.02)
    assert clock._ahead == 128, "the least power of 2 whose work outlasts its and 100 launches"


def test_a_file_of_before_has_the_rates_that_it_was_written_with():
    found = calibration.read(record.RESULTS / "calibrations" / "nvidia-h200.json").specs.rates
    assert found.moving.strided is None and found.unaligned == 1 and found.attention_start == 0
    assert found.by_phase == (1, 1, 1, 1)


def test_the_page_says_how_good_plans_of_measured_steps_are():
    page = (record.RESULTS.parent / "docs" / "gpu-time.md").read_text(encoding="utf8")
    for line in gpu_seconds.summary(gpu_seconds.read()):
        assert line in page, "python -m benchmarks.gpu_seconds --write"


def test_the_kept_rows_are_what_is_planned():
    kept = gpu_seconds.read()
    (planned,) = gpu_seconds.rows(["BERT-base"]).to_dict("records")
    assert kept[kept["step"] == "BERT-base"].to_dict("records") == [planned]
    steps = sum(len(found["steps"]) for found in gpu_seconds.gpu_models_table.files())
    assert len(kept) > steps // 2
