"""GPUs as data, and what is said to bad input."""

import pytest

from helpers.plan import plan
from helpers.recipe import Recipe
from tight_fit.gpus import GPUS, find
from tight_fit.gpus.specs import MEASURED, SPECS, described, find_gpu, has_arithmetic, of_device
from tight_fit.kernels.step_seconds import seconds

SHEETS = {
    "T4": 8.1,
    "P4": 5.5,
    "P100": 9.3,
    "V100-32GB": 14.1,
    "A100-40GB": 19.5,
    "A100-80GB": 19.5,
    "RTX 3090": 35.6,
    "RTX 3060": 12.7,
    "RTX 4090": 82.6,
    "L4": 30.3,
    "H100": 67.0,
    "H200": 67.0,
    "H100-PCIe": 51.2,
}  # TFLOP/s of fp32


@pytest.mark.parametrize("name, sheet", SHEETS.items())
def test_lanes_and_clock_give_the_data_sheets_peak(name, sheet):
    assert SPECS[name].fp32 / 1e12 == pytest.approx(sheet, rel=0.015)


def test_every_gpu_has_a_source_and_measurements_to_stand_on():
    for gpu in SPECS.values():
        assert gpu.source and gpu.like in MEASURED and SPECS[gpu.like].measured


@pytest.mark.parametrize(
    "name, nearest",
    (("a100", "A100"), ("RTX3090", "RTX 3090"), ("v100 32gb", "V100-32GB"), ("H-100", "H100")),
)
def test_an_unknown_gpu_is_told_the_nearest_and_how_to_describe_its_own(name, nearest):
    with pytest.raises(ValueError, match=rf"nearest is '{nearest}.*described\(") as error:
        find_gpu(name)
    assert str(error.value).count(". ") == 0


@pytest.mark.parametrize("gpu", (None, 3, 1.5, ["T4"]))
def test_what_is_no_gpu_is_refused(gpu):
    with pytest.raises(TypeError, match="must be a name, a GPU or a GpuSpecs"):
        find_gpu(gpu)


def test_a_gpu_that_memory_is_planned_for():
    assert find_gpu(find("T4")) is SPECS["T4"]


def test_the_two_tables_of_gpus_agree():
    """Memory (tight_fit.gpus) and speed (timing.specs): the same GPUs with the same arithmetic."""
    assert set(GPUS) <= set(SPECS)
    # Only measured on, or variants with the memory of another: nobody is told of them by name.
    assert set(SPECS) - set(GPUS) == {"P4", "A100-80GB-PCIe", "H100-PCIe"}
    for name, gpu in GPUS.items():
        assert gpu.bf16 == (SPECS[name].bf16 > 0) == (SPECS[name].tf32 > 0), name


def test_a_gpu_of_ones_own():
    own = described(
        "mine", sms=40, lanes=64, clock=1.59e9, bandwidth=320e9, l2=4 << 20, fp16=65e12, like="T4"
    )
    step = plan(Recipe(model="vit", batch_size=8)).operations
    assert (
        seconds(step, own).total == pytest.approx(seconds(step, "T4").total)
        and not seconds(step, own).measured
    )


FIGURES = {
    "name": "mine",
    "sms": 40,
    "lanes": 64,
    "clock": 1.59e9,
    "bandwidth": 320e9,
    "l2": 4 << 20,
}


@pytest.mark.parametrize(
    "change, error, said",
    (
        ({"sms": 0}, ValueError, "must be above 0"),
        ({"clock": -1.0}, ValueError, "must be above 0"),
        ({"bandwidth": float("nan")}, ValueError, "must be finite"),
        ({"l2": "4 MB"}, TypeError, "must be a number"),
        ({"sms": True}, TypeError, "must be a number"),
        ({"like": "A10"}, ValueError, "was not measured"),
    ),
)
def test_figures_that_make_no_gpu(change, error, said):
    with pytest.raises(error, match=said):
        described(**(FIGURES | change))


@pytest.mark.parametrize("gpu", ("T4", "V100-16GB", "P100", "GTX 1650"))
def test_bf16_where_there_is_none(gpu):
    with pytest.raises(ValueError, match=f"The {gpu} has no bf16 arithmetic: use fp32 or fp16."):
        plan(Recipe(model="vit", batch_size=8, precision="bf16")).seconds(gpu)


def test_an_arithmetic_nobody_has():
    with pytest.raises(ValueError, match="is not known"):
        SPECS["T4"].peak("int3")


def test_gpus_are_known_by_the_names_of_their_driver():
    names = {
        "Tesla T4": "T4",
        "Tesla P100-PCIE-16GB": "P100",
        "Tesla V100-SXM2-16GB": "V100-16GB",
        "Tesla V100-PCIE-32GB": "V100-32GB",
        "NVIDIA A100-SXM4-40GB": "A100-40GB",
        "NVIDIA A100-SXM4-80GB": "A100-80GB",
        "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100-PCIe",
        "NVIDIA H200": "H200",
        "NVIDIA L4": "L4",
        "NVIDIA GeForce RTX 3060": "RTX 3060",
        "NVIDIA GeForce RTX 4060 Laptop GPU": "RTX 4060 Laptop",
        "NVIDIA GeForce GTX 1650": "GTX 1650",
    }
    assert {device: of_device(device).name for device in names} == names
    for other in ("NVIDIA L40S", "NVIDIA T400", "NVIDIA GeForce RTX 3060 Ti", "AMD MI250", ""):
        assert of_device(other) is None, other


def test_which_arithmetic_a_gpu_has():
    assert has_arithmetic("bf16", "A100-40GB") and not has_arithmetic("bf16", "T4")
    assert has_arithmetic("tf32", "T4") and has_arithmetic("fp32", "P4")
    with pytest.raises(ValueError, match="the nearest is"):
        has_arithmetic("fp32", "K80")
