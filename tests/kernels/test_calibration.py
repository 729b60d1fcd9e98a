"""A GPU that was measured: its rates from times, its file, and the plans that take it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.attack import command_refuses
from tight_fit.command import calibrate, kept, main, options, question
from tight_fit.gpus import GPU, calibration, find
from tight_fit.gpus.rates import Moving, Product, Rates
from tight_fit.gpus.specs import SPECS, find_gpu
from tight_fit.kernels import fit_gpu, measure_gpu
from tight_fit.kernels.host_memory import link_rate
from tight_fit.kernels.kernel_time import kernel_seconds
from tight_fit.kernels.op import Op
from tight_fit.kernels.step_seconds import operation_times, seconds
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.units import MIB

TENSOR = Product(0.55, 18.0, 1.2, 30.0)
TRUE = Rates(
    moving=Moving(0.81, 0.7, 0.55, 0.6, 0.4, 0.45, 0.77, 0.5, 0.44),
    linear=Product(0.72, 15.0, 1.1, 4.0),
    batched=Product(0.66, 40.0, 1.6, 6.0),
    tf32=Product(0.6, 12.0, 1.3, 20.0),
    fp16=TENSOR,
    bf16=Product(0.58, 22.0, 1.2, 25.0),
    attention=0.5,
    dispatch=0.6,
    link=2.1e10,
    date="2026-11-26",
    attention_start=300.0,
    by_phase=(1.6, 0.8, 1.6, 0.6),  # their mean over equal phases is 1
)
OTHERS = (  # products that are not among those that are fitted
    (1, 3000, 768, 768),
    (1, 8192, 3072, 768),
    (1, 768, 768, 8192),
    (384, 128, 128, 64),
    (24, 2048, 64, 2048),
    (1, 4096, 50257, 768),
)
STEP = TracedOps(
    ops=[(Op("x", "elementwise", "fp32", 0, 4, 4),)],
    order=[(0, phase) for phase in (0, 1, 3) for _ in range(100)],
)


def known(name):
    """A GPU of the table as if it reached `TRUE`."""
    specs = SPECS[name]
    has = {kind: getattr(TRUE, kind) for kind in ("tf32", "fp16", "bf16") if getattr(specs, kind)}
    lacks = dict.fromkeys({"tf32", "fp16", "bf16"} - set(has))
    return specs._replace(rates=TRUE._replace(**has, **lacks))


def product(arithmetic, shape):
    batch, m, n, k = shape
    size = 4 if arithmetic in ("fp32", "tf32") else 2
    moved = size * batch * (m * k + k * n), size * batch * m * n
    kept_as = "fp32" if arithmetic == "tf32" else arithmetic
    return Op("mm", "matmul", kept_as, 2 * batch * m * n * k, *moved, shape, "nn")


def measured(gpu):
    """What would be measured on a GPU of known rates."""

    def timed(op, tf32=False):
        took = float(kernel_seconds([op], gpu, tf32).sum())
        return measure_gpu.TimedKernel((op,), tf32, took)

    shapes = [(1, *shape) for shape in measure_gpu.SHAPES] + list(measure_gpu.BATCHED)
    arithmetics = [name for name in measure_gpu.DTYPES if getattr(gpu, name)]
    found = [
        timed(product(name, shape), name == "tf32") for name in arithmetics for shape in shapes
    ]
    for kind in ("elementwise", "softmax", "norm", "reduction", "transpose", "multi_tensor"):
        found += [
            timed(Op("x", kind, "fp32", 0, 2 * size, size, (size // 2048, 512)))
            for size in measure_gpu.MOVED
        ]
    for walk in ("strided", "cast"):
        found += [
            timed(Op("x", "elementwise", "fp32", 0, 2 * size, size, (), walk))
            for size in measure_gpu.MOVED
        ]
    found.append(timed(Op("x", "softmax", "fp32", 0, 64 * MIB, 64 * MIB, (4096, 4096))))
    for keys in (512, 2048):
        heads = Op("a", "attention", "fp16", 10**12, 10**8, 10**8, (64, keys, keys, 64))
        found.append(timed(heads))
    issued = float(operation_times(STEP, gpu).on_cpu[0] * 100)
    forward, backward, _, optimizer = TRUE.by_phase
    phases = issued * forward, issued * backward, issued * optimizer
    return measure_gpu.GpuTimes(tuple(found), (STEP, phases), TRUE.link)


@pytest.fixture(scope="module")
def t4():
    """The T4 with the rates that its own synthetic times give back."""
    return SPECS["T4"]._replace(
        rates=fit_gpu.rates_of(measured(known("T4")), SPECS["T4"], TRUE.date)
    )


@pytest.fixture
def file(t4, tmp_path):
    made = {"rehearsal": False}
    facts = calibration.as_json(find("T4"), t4, "Tesla T4", made, checked=[], measured={})
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(facts))
    return path


@pytest.mark.parametrize("name", ["T4", "A100-40GB"])
def test_times_of_a_known_gpu_give_that_gpu_back(name):
    true = known(name)
    found = fit_gpu.rates_of(measured(true), SPECS[name], TRUE.date)
    assert found.moving[:-1] == pytest.approx(TRUE.moving[:-1], rel=1e-6)
    assert found.moving.batch_norm is None, "it is not measured"
    assert found.attention_start == TRUE.attention_start
    assert found.by_phase == pytest.approx(TRUE.by_phase)
    assert found.dispatch == pytest.approx(TRUE.dispatch) and found.link == TRUE.link
    assert found.attention == pytest.approx(TRUE.attention, rel=0.03)
    for arithmetic in measure_gpu.DTYPES:
        if not getattr(true, arithmetic):
            assert arithmetic == "fp32" or getattr(found, arithmetic) is None
            continue
        ops = [product(arithmetic, shape) for shape in OTHERS]
        planned, took = (
            kernel_seconds(ops, gpu, arithmetic == "tf32")
            for gpu in (true._replace(rates=found), true)
        )
        assert np.abs(planned / took - 1).max() < 0.03, arithmetic
        before = kernel_seconds(ops, SPECS[name], arithmetic == "tf32")
        assert np.abs(before / took - 1).max() > 0.1, "the table's own would have done"


def test_what_was_not_measured_stays_as_the_like_gpu_has_it():
    step = STEP, (float(operation_times(STEP, SPECS["T4"]).on_cpu[0] * 100),) * 3
    found = fit_gpu.rates_of(measure_gpu.GpuTimes((), step, 1e10), SPECS["T4"], TRUE.date)
    mine = SPECS["T4"]._replace(rates=found)
    ops = [product("fp32", shape) for shape in OTHERS]
    assert kernel_seconds(ops, mine) == pytest.approx(kernel_seconds(ops, SPECS["T4"]))
    assert found.moving.elementwise == 0.74 and found.dispatch == pytest.approx(1)


def test_a_gpu_without_a_row_takes_its_figures_from_what_was_measured():
    true = known("A100-40GB")
    gpu = GPU("NVIDIA A900", find("A100-40GB").memory, (8, 0))
    figures = fit_gpu.figures_of(gpu, measured(true), true.sms, true.l2)
    assert (figures.lanes, figures.like) == (64, "A100-40GB")
    moving = TRUE.moving._replace(elementwise=0.6)  # which other kernels exceed
    found = measured(true._replace(rates=true.rates._replace(moving=moving)))
    bandwidth = fit_gpu.figures_of(gpu, found, true.sms, true.l2).bandwidth
    assert bandwidth == pytest.approx(0.6 / 0.9 * true.bandwidth, rel=0.03)
    rates = fit_gpu.rates_of(measured(true), figures, TRUE.date)
    ops = [product("bf16", shape) for shape in OTHERS]
    planned = kernel_seconds(ops, figures._replace(rates=rates))
    assert np.abs(planned / kernel_seconds(ops, true) - 1).max() < 0.05


def test_the_file_gives_back_what_was_measured(file, t4):
    found = calibration.read(file)
    assert found.gpu == find("T4") and found.specs.rates == t4.rates
    assert found.specs._replace(source=t4.source) == t4


def test_plans_take_the_file_for_its_gpu_alone(file, t4):
    before = seconds(STEP, "T4")
    with calibration.chosen(str(file)):
        assert find_gpu("Tesla T4").rates == t4.rates
        assert find_gpu("A100") is SPECS["A100-40GB"]
        assert link_rate(find_gpu("T4")) == TRUE.link
        after = seconds(STEP, "T4")
        with calibration.chosen("none"):
            assert find_gpu("T4") is SPECS["T4"]
    assert find_gpu("T4") is SPECS["T4"], "only inside"
    assert after.total == pytest.approx(0.6 * before.total, rel=0.01)
    assert "it was measured on" in str(after) and "measured on" not in str(before)


def test_the_environment_and_the_usual_place_name_a_file(file, tmp_path, monkeypatch):
    monkeypatch.setenv(calibration.VARIABLE, str(file))
    assert find_gpu("T4").rates is not None
    monkeypatch.setenv(calibration.VARIABLE, "")
    for name in ("XDG_CONFIG_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert find_gpu("T4").rates is None
    place = calibration.usual_place()
    place.parent.mkdir(parents=True)
    place.write_text(file.read_text())
    assert find_gpu("T4").rates is not None


def test_a_gpu_without_a_row_is_planned_by_its_name(file):
    values = json.loads(file.read_text())
    values["gpu"] |= {"name": "NVIDIA Xq 9", "memory": 9 * 2**30}
    file.write_text(json.dumps(values))
    with calibration.chosen(str(file)):
        assert find("nvidia xq9").memory == 9 * 2**30
        assert seconds(STEP, find("Xq 9")).total > 0
    with pytest.raises(ValueError, match="not known"):
        find("Xq 9")


def asked(*typed):
    return question.of(options.parser().parse_args(typed))


def test_an_answer_that_came_with_the_package_is_not_that_of_a_measured_gpu(file):
    usual, other, size = asked("gpt2", "--gpu", "T4"), asked("gpt2", "--gpu", "L4"), "16GB"
    assert kept.shipped(usual) and kept.shipped(other)
    with calibration.chosen(str(file)):
        assert kept.shipped(usual) is None and kept.shipped(other)
        assert kept.shipped(asked("gpt2", "--gpu", size)) is None, "a T4 is one of them"
        assert kept.shipped(asked("gpt2"))


def test_an_answer_says_that_the_gpu_was_measured(file, capsys):
    model = ["distilgpt2", "--gpu", "T4", "--batch", "1", "--length", "8", "--quick", "--fresh"]
    assert main.main([*model, "--calibration", str(file)]) == 0
    own = capsys.readouterr().out
    assert f"As tight-fit calibrate measured the T4 on {TRUE.date}." in own
    assert main.main(model) == 0
    assert "calibrate" not in capsys.readouterr().out


def broken(change):
    def write(file):
        values = json.loads(file.read_text())
        change(values)
        file.write_text(json.dumps(values))

    return write


BAD = {
    "cut off": (lambda file: file.write_text(file.read_text()[:900]), "cut off"),
    "empty": (lambda file: file.write_text(""), "cut off"),
    "no text": (lambda file: file.write_bytes(b"\xff\xfe\x00"), "no text"),
    "foreign": (lambda file: file.write_text('{"model": "gpt2"}'), "no file of this"),
    "a list": (lambda file: file.write_text("[1, 2]"), "no file of this"),
    "deep": (lambda file: file.write_text("[" * 100_000), "JSON|deeply"),
    "another version": (broken(lambda v: v.update(format="tight-fit calibration 9")), "no file"),
    "without rates": (broken(lambda v: v.pop("rates")), "not whole"),
    "without a GPU": (broken(lambda v: v.update(gpu=None)), "not whole"),
    "without a product": (broken(lambda v: v["rates"].update(linear=None)), "not whole"),
    "without tensor cores": (broken(lambda v: v["rates"].update(fp16=None)), "in fp16 were not"),
    "not a number": (broken(lambda v: v["rates"].update(link="fast")), "must be a number"),
    "infinite": (broken(lambda v: v["rates"].update(link=float("inf"))), "must be a number"),
    "negative": (broken(lambda v: v["rates"]["moving"].update(norm=-1)), "not between"),
    "no clock": (broken(lambda v: v["specs"].update(clock=1.59)), "mind the unit"),
    "a name of two lines": (broken(lambda v: v["gpu"].update(name="a\nb")), "one line"),
    "no memory": (broken(lambda v: v["gpu"].update(memory="15 GB")), "number of bytes"),
    "of a rehearsal": (broken(lambda v: v["made"].update(rehearsal=True)), "pretended GPU"),
    "too large": (lambda file: file.write_text(" " * (calibration.MOST + 1)), "at most"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "ordinary file"),
    "missing": (lambda file: file.unlink(), "cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_another_file_is_refused_in_one_sentence(case, file, capsys):
    spoil, says = BAD[case]
    spoil(file)
    asked = ["gpt2", "--gpu", "T4", "--calibration", str(file)]
    text = command_refuses(main.main, asked, capsys)
    assert any(part in text for part in says.split("|")), text


def test_without_a_gpu_nothing_is_measured(tmp_path, capsys):
    command_refuses(calibrate.main, ["--out", str(tmp_path / "mine.json")], capsys, "no CUDA")
    assert not list(tmp_path.iterdir())


def test_the_driver_s_name_and_the_memory_tell_which_row_it_is():
    large = find("A100-80GB").memory
    assert calibrate.named("NVIDIA A100-SXM4-80GB", large - 10**7, (8, 0)).name == "A100-80GB"
    assert calibrate.named("Tesla T4", find("T4").memory, (7, 5)) == find("T4")
    assert calibrate.named("NVIDIA Xq 9", 2**33, (9, 9)) == GPU("NVIDIA Xq 9", 2**33, (9, 9))


def test_what_is_printed_has_the_steps_before_and_after(file):
    step = {"model": "gpt2", "batch_size": 4, "length": 8, "precision": "fp16", "measured": 0.1}
    step |= {"table": 0.15, "calibrated": 0.102}
    rows = [{"seconds": 1e-3, "tf32": False, "ops": [list(product("fp16", (1, 4096, 4096, 1024)))]}]
    facts = json.loads(file.read_text()) | {"checked": [step], "measured": {"kernels": rows}}
    facts["made"]["seconds"] = 41.0
    text = "\n".join(calibrate.lines(facts, file))
    assert "+50%" in text and "+2%" in text and "34.4 TFLOP/s" in text and "100 ms" in text
    assert f"--calibration {file}" in text
    assert "no time" in "\n".join(calibrate.lines(facts | {"checked": []}, file))


def test_a_plan_that_was_kept_before_is_not_taken_for_a_measured_gpu(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))
    this = replace(asked("gpt2", "--gpu", "T4"), fields={"batch_size": 3})
    kept.keep(this, {"peak": 1})
    assert kept.find(this) == {"peak": 1}
    with calibration.chosen(str(file)):
        assert kept.find(this) is None
