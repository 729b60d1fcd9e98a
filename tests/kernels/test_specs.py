"""GPUs as data, and what is said to bad input."""

import pytest

from helpers.plan import plan
from helpers.recipe import Recipe
from tight_fit.gpus import KNOWN, find, matches
from tight_fit.gpus.names import of_size
from tight_fit.gpus.specs import MEASURED, SPECS, described, find_gpu, has_arithmetic, of_device
from tight_fit.gpus.table import AMD, CUDNN_ATTENTION, FLASH_2_ATTENTION
from tight_fit.kernels.kernel_time import kernel_seconds, seconds_at_full_rate
from tight_fit.kernels.op import Op
from tight_fit.kernels.step_seconds import seconds
from tight_fit.units import GIB

FIELDS = "sms lanes clock bandwidth l2 tf32 fp16 bf16 fp8".split()

SHEETS = {  # TFLOP/s of fp32
    "T4": 8.1, "P4": 5.5, "P100": 9.3, "V100-32GB": 14.1, "A100-40GB": 19.5, "A100-80GB": 19.5,
    "RTX 3090": 35.6, "RTX 3060": 12.7, "RTX 4090": 82.6, "L4": 30.3, "H100": 67.0, "H200": 67.0,
    "H100-PCIe": 51.2, "H100 NVL": 60.0, "GH200": 67.0, "B200": 75.0, "RTX 2080 Ti": 13.4,
    "RTX 3070": 20.3, "RTX 3080": 29.8, "RTX 3080 Ti": 34.1, "RTX 4080": 48.7, "RTX 5070": 30.9,
    "RTX 5080": 56.3, "RTX 5090": 104.8, "RTX PRO 6000": 125.0, "A10": 31.2, "A10G": 31.5,
    "A40": 37.4, "RTX A4000": 19.2, "RTX A5000": 27.8, "RTX A6000": 38.7, "RTX 6000 Ada": 91.1,
    "L40": 90.5, "L40S": 91.6, "GTX 1080": 8.87, "GTX 1080 Ti": 11.3, "Titan RTX": 16.3,
    "P40": 11.76, "GTX 1050 Ti": 2.14, "GTX 1060 6GB": 4.37, "GTX 1070": 6.46, "GTX 1070 Ti": 8.19,
    "GTX 1660 Ti": 5.44, "Titan Xp": 12.15, "Titan X Pascal": 10.97, "Titan V": 14.9,
    "Quadro RTX 4000": 7.1, "Quadro RTX 5000": 11.2, "Quadro RTX 6000": 16.3, "RTX 8000": 16.3,
    "RTX 4090 D": 73.5, "T4G": 8.1, "V100S": 16.4, "A2": 4.5, "A16": 4.5, "A30": 10.3,
    "RTX A2000 12GB": 8.0, "RTX A4500": 23.7, "RTX A5500": 34.1, "RTX 4500 Ada": 39.6, "L20": 59.8,
    "A800-80GB": 19.5, "H800": 67.0, "H800-PCIe": 51.2, "H200 NVL": 60.0,
}  # fmt: skip


# Without sparsity and with sums in fp32: H100 SXM, L4, RTX 4090 (Ada architecture, appendix A),
# L40S, HGX B200 (72 petaFLOPS of eight GPUs, with sparsity).
FP8_SHEETS = {
    "H100": 1979, "H200": 1979, "L4": 242.5, "RTX 4090": 330.3, "L40S": 733, "B200": 4500,
    "RTX 5090": 419,
}  # fmt: skip


def test_lanes_and_clock_give_the_data_sheets_peak():
    for name, sheet in SHEETS.items():
        assert SPECS[name].fp32 / 1e12 == pytest.approx(sheet, rel=0.015), name
    for name, sheet in FP8_SHEETS.items():
        assert SPECS[name].fp8 / 1e12 == pytest.approx(sheet, rel=0.02), name


@pytest.mark.parametrize(
    "name, products, held",
    [
        ("H100", 1.83, 1.755),
        ("H200", 1.83, 1.755),
        ("GH200", 1.83, 1.755),
        ("H100-PCIe", 1.62, 1.755),
        ("H100 NVL", 1.545, 1.755),
    ],
)  # GHz
def test_hoppers_peaks_stand_and_its_times_take_the_clocks_that_it_has(name, products, held):
    """NVIDIA's white paper: 4,096 operations a clock in fp16, a boost clock of products of its own;
    in fp32 a lower clock is held than that of the data sheet."""
    gpu = SPECS[name]
    assert gpu.bf16 == pytest.approx(gpu.sms * 4096 * products * 1e9, rel=1e-3)
    assert gpu.tensor_ops == 4096 and gpu.held("bf16") == gpu.bf16
    assert gpu.held("fp32") == pytest.approx(gpu.fp32 * held * 1e9 / gpu.clock)
    assert gpu.held("fp32") <= gpu.fp32
    large = Op("mm", "matmul", "fp32", 2 * 8192**3, 3 * 4 * 8192**2, 0, (1, 8192, 8192, 8192))
    boosted = gpu._replace(sustained=0.0)
    slower = kernel_seconds([large], gpu) / kernel_seconds([large], boosted)
    assert slower == pytest.approx(gpu.clock / held / 1e9, rel=1e-3)


def test_attention_on_hopper_takes_what_its_paper_measured():
    """TFLOP/s of a forward pass of f FLOPs and a backward one of 2.5 f (arXiv 2407.08608, figures 5
    and 6, H100, 4,096 tokens: not causal, but for heads of 128 forward, whose mean it is)."""
    for share, slot, forward, backward in [
        (CUDNN_ATTENTION, 0, 408, 417),
        (CUDNN_ATTENTION, 1, (609 + 518) / 2, 499),
        (FLASH_2_ATTENTION, 0, 321, 279),
        (FLASH_2_ATTENTION, 1, (368 + 319) / 2, 310),
    ]:
        both = 3.5 / (1 / forward + 2.5 / backward)
        assert share[slot] * 989.4 == pytest.approx(both, rel=0.03)
    today, older = SPECS["H100"], SPECS["A100-40GB"]
    assert today.attention == CUDNN_ATTENTION and older.attention == ()
    for width, share in [(64, 0.42), (128, 0.52)]:
        some = Op("sdpa", "attention", "bf16", 10**15, 0, 0, (32, 8192, 8192, width))
        for taken in (kernel_seconds([some], today)[0], seconds_at_full_rate(some, today)):
            assert 1e15 / taken == pytest.approx(share * 989.4e12, rel=1e-3)
        assert 0.5 * older.bf16 < 1e15 / kernel_seconds([some], older)[0] < 0.73 * older.bf16


def test_the_rows_are_gpus_that_can_be():
    """Within what `described` takes, and with the peaks that a compute capability has."""
    for gpu in SPECS.values():
        assert gpu.source and gpu.like in MEASURED and SPECS[gpu.like].measured
    for name, gpu in KNOWN.items():
        assert 3 * GIB < gpu.memory < 300 * GIB, name
        if name in AMD:
            assert name not in SPECS
        if name not in SPECS:
            continue
        specs = SPECS[name]
        figures = {field: getattr(specs, field) for field in FIELDS}
        assert described(name, **figures, like=specs.like) == specs._replace(
            source="described by its user",
            tensor_ops=0,
            sustained=0.0,
            watts=0,
            attention=(),
            rates=None,
        )
        assert gpu.bf16 == (specs.bf16 > 0) == (specs.tf32 > 0), name
        assert specs.fp8 == (2 * specs.bf16 if gpu.fp8 else 0), name
        if specs.bf16:
            assert specs.bf16 == specs.fp16 == pytest.approx(2 * specs.tf32, rel=0.02), name
        assert specs.lanes == (64 if gpu.capability in ((6, 0), (7, 0), (7, 5), (8, 0)) else 128)


SPOKEN = (
    ("4090", "RTX 4090"), ("rtx4090", "RTX 4090"), ("3080ti", "RTX 3080 Ti"),
    ("RTX 3080 10GB", "RTX 3080"), ("4060 Ti 16GB", "RTX 4060 Ti 16GB"),
    ("RTX 4070 Mobile", "RTX 4070 Laptop"), ("RTX 3060 Laptop GPU", "RTX 3060 Laptop"),
    ("4070 Ti Super", "RTX 4070 Ti Super"), ("a6000", "RTX A6000"), ("6000 Ada", "RTX 6000 Ada"),
    ("rtx pro 6000 blackwell", "RTX PRO 6000"), ("l40s", "L40S"), ("A10", "A10"), ("a10g", "A10G"),
    ("A2", "A2"), ("a2000", "RTX A2000 6GB"), ("a100", "A100-40GB"), ("A100 80GB", "A100-80GB"),
    ("A100 80GB SXM", "A100-80GB"), ("A100 PCIe", "A100-80GB-PCIe"), ("H-100", "H100"),
    ("h100 nvl", "H100 NVL"), ("AMD Instinct MI325X OAM", "MI325X"), ("tesla p40", "P40"),
    ("Quadro RTX 8000", "RTX 8000"), ("quadro rtx 6000", "Quadro RTX 6000"),
    ("Quadro RTX A4000", "RTX A4000"), ("NVIDIA TITAN V", "Titan V"), ("GTX 1060", "GTX 1060 6GB"),
    ("NVIDIA B300 SXM6", "B300"),
)  # fmt: skip


def test_a_gpu_is_found_however_people_write_it():
    for spoken, meant in SPOKEN:
        assert find(spoken).name == meant, spoken
        assert matches(spoken)[0] is KNOWN[meant], spoken


def test_a_size_is_found_and_a_card_of_another_size_is_not():
    for spoken, meant in (("8GB", "8GB"), ("8 gb", "8GB"), ("24GiB", "24GiB")):
        assert [gpu.name for gpu in matches(spoken)] == [meant]
    assert matches("RTX 3060 6GB") == matches("") == []
    several = [gpu.name for gpu in matches("4060 Ti")]
    assert several == ["RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB"], "the one with the least first"


@pytest.mark.parametrize(
    "name, nearest",
    (("RTX 6000", "Quadro RTX 6000 or RTX 6000 Ada"), ("L40X", "L40"), ("RTX 9090", "RTX 5090")),
)
def test_an_unknown_gpu_is_told_the_nearest(name, nearest):
    for look in (find, find_gpu):
        with pytest.raises(ValueError, match=f"did you mean {nearest}.*size such as 8GB") as error:
            look(name)
        assert "described" not in str(error.value)  # Python, which a shell does not speak


@pytest.mark.parametrize(
    "name, said",
    (
        ("2x4090", r"names 2 GPUs: name one of them, RTX 4090, .*--gpus 2, .*--ranks 2\."),
        ("4 x T4", "names 4 GPUs: name one of them, T4"),
        ("T4 x2", "names 2 GPUs: name one of them, T4"),
        ("8xA100", "names 8 GPUs: name one of them, A100-40GB"),
        ("2x whatever", "is not known"),
        ("TPU v3", "is not planned for: a TPU runs no CUDA"),
        ("v3-8", "a TPU runs no CUDA"),
        ("M3 Max", "Apple's GPUs run no CUDA"),
        ("Intel Arc A770", "Intel's GPUs"),
        ("RX 7900 XTX", "only Instincts"),
        ("GTX 980 Ti", "no kernels for Maxwell GPUs"),
        ("Tesla M40", "no kernels for Maxwell GPUs"),
        ("DGX Spark", "shares one memory with the CPU.*size such as 8GB"),
        ("Jetson AGX Orin 64GB", "shares one memory with the CPU"),
        ("Tesla K80", "left Kepler GPUs out.*size such as 8GB"),
        ("cpu", "a CPU has main memory"),
    ),
)
def test_what_no_plan_is_made_for_is_told_why(name, said):
    with pytest.raises(ValueError, match=said):
        find(name)


@pytest.mark.parametrize(
    "gpu, said",
    (
        ("48GB", "a size says nothing"),
        ("MI300X", "time is not known for AMD"),
        ("H20", "of the H20, whose speed is not known, the memory alone"),
    ),
)
def test_why_there_is_no_time_is_one_sentence(gpu, said):
    assert find(gpu).memory > 40 * GIB
    with pytest.raises(ValueError, match=said):
        find_gpu(gpu)


def test_the_gpus_of_a_size():
    of_48 = {gpu.name for gpu in of_size(find("48GB"))}
    assert of_48 >= {"A40", "RTX A6000", "RTX 6000 Ada", "L40", "L40S", "L20", "RTX 8000"}
    assert not of_48 & {"H100", "L4"}
    assert not of_size(find("T4")) and not of_size(find("5GB"))


def test_a_gpu_of_ones_own():
    own = described(
        "mine", sms=40, lanes=64, clock=1.59e9, bandwidth=320e9, l2=4 << 20, fp16=65e12, like="T4"
    )
    step = plan(Recipe(model="vit", batch_size=8)).operations
    assert seconds(step, own).total == pytest.approx(seconds(step, "T4").total)
    assert not seconds(step, own).measured


@pytest.mark.parametrize("gpu", ("T4", "GTX 1650"))
def test_bf16_where_there_is_none(gpu):
    with pytest.raises(ValueError, match=f"The {gpu} has no bf16 arithmetic: use fp32 or fp16."):
        plan(Recipe(model="vit", batch_size=8, precision="bf16")).seconds(gpu)


def test_gpus_are_known_by_the_names_of_their_driver():
    names = {
        "Tesla T4": "T4", "Tesla P100-PCIE-16GB": "P100", "Tesla V100-SXM2-16GB": "V100-16GB",
        "Tesla V100-PCIE-32GB": "V100-32GB", "NVIDIA A100-SXM4-40GB": "A100-40GB",
        "NVIDIA A100-SXM4-80GB": "A100-80GB", "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe", "NVIDIA H200": "H200",
        "NVIDIA L4": "L4", "NVIDIA GeForce RTX 3060": "RTX 3060",
        "NVIDIA GeForce RTX 4060 Laptop GPU": "RTX 4060 Laptop",
        "NVIDIA GeForce GTX 1650": "GTX 1650", "NVIDIA GeForce RTX 3060 Ti": "RTX 3060 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU": "RTX 4090 Laptop",
        "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX 4070 Ti Super", "NVIDIA L40S": "L40S",
        "NVIDIA A10G": "A10G", "NVIDIA RTX A6000": "RTX A6000",
        "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
        "NVIDIA H100 NVL": "H100 NVL", "NVIDIA GH200 480GB": "GH200", "NVIDIA B200": "B200",
    }  # fmt: skip
    assert {device: of_device(device).name for device in names} == names
    for other in ("NVIDIA T400", "NVIDIA GeForce GTX 980 Ti", "AMD Instinct MI250", ""):
        assert of_device(other) is None, other


def test_which_arithmetic_a_gpu_has():
    assert has_arithmetic("bf16", "A100-40GB") and not has_arithmetic("bf16", "T4")
    assert has_arithmetic("tf32", "T4") and has_arithmetic("fp32", "P4")
    with pytest.raises(ValueError, match="precision='fp12' is not known"):
        has_arithmetic("fp12", "T4")
    with pytest.raises(ValueError, match="is not known"):
        SPECS["T4"].peak("int3")
