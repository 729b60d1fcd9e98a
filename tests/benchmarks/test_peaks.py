"""Published peaks of memory: the kept plans, and what is said of them."""

import csv

import pytest
import torch

from benchmarks.peaks import kept, page, qwen_plans
from benchmarks.peaks.points import LEFT_OUT, POINTS
from benchmarks.peaks.qwen import LORA, PUBLISHED, QLORA, Qwen
from tight_fit.gpus import MARGIN
from tools.course import readme

BY_NAME = {point.name: point for point in POINTS}


def test_every_point_that_counts_has_a_kept_plan():
    planned = kept.read()
    assert planned.keys() <= BY_NAME.keys()
    assert not BY_NAME.keys() - planned.keys() - LEFT_OUT.keys()


def test_the_page_is_what_the_kept_plans_give():
    text = page.PAGE.read_text(encoding="utf8")
    assert text == page.with_kept(page.text(), text), "run `python -m benchmarks.peaks`"
    assert page.with_kept(page.text(), "") == page.text() != text


def test_the_data_are_what_the_kept_plans_give():
    for name, content in page.files().items():
        kept_data = (page.PAGE.parent / "data" / name).read_text(encoding="utf8")
        assert kept_data == content, f"{name}: run `python -m benchmarks.peaks --page`"
    rows = list(csv.DictReader(page.data().splitlines()))
    assert len(rows) == len(kept.misses())
    for kind in (page.ALLOCATED, page.RESERVED):
        of_kind = [row for row in rows if row["peak"] == kind and row["counts"] == "yes"]
        assert len(of_kind) == len(page.counted(kind))
    for row in rows:
        error = int(row["planned_bytes"]) / float(row["measured_bytes"]) - 1
        assert f"{error:+.4f}" == row["error"] and row["source"], row["step"]


def test_every_published_step_of_qwen_is_in_the_data():
    """None is left out for its error, and what is shown for the context is said."""
    planned, section = qwen_plans.read(), qwen_plans.section()
    data = page.files()["qwen.csv"]
    assert set(planned) <= {row.name for row in PUBLISHED} and len(PUBLISHED) == 9
    for row in PUBLISHED:
        shown = f'"{row.name}",{row.memory} GB,' if row.name in planned else row.name
        assert shown in (data if row.name in planned else section), row.name
    assert "500.0 MiB for the CUDA context" in section


def test_qwens_set_up_has_the_published_sizes():
    """7.7 billion weights, adapters of 143 million, and half a byte for each quantized weight."""
    with torch.device("meta"):
        plain, quantized = (Qwen(way, layers=1) for way in (LORA, QLORA))
    count = {name: part.numel() for name, part in plain.named_parameters()}
    layer = sum(number for name, number in count.items() if name.startswith("h.0."))
    adapters = sum(number for name, number in count.items() if "lora_" in name)
    assert 32 * (layer - adapters) + 2 * 151_936 * 4096 + 4096 == 7_721_324_544
    assert 32 * adapters == 143_130_624
    packed = sum(part.nbytes for name, part in quantized.named_buffers() if "qweight" in name)
    products = 4096 * 3 * 4096 + 4096 * 4096 + 3 * 4096 * 11_008
    assert packed == products / 2


def test_readme_says_the_same():
    allocated, reserved = (
        page.Errors.of(page.counted(kind)) for kind in (page.ALLOCATED, page.RESERVED)
    )
    said = (
        f"measured on GPUs by {allocated.mean:.1%} in the mean ({allocated.count} steps, "
        f"{allocated.worst:+.1%} at worst), the reserved by {reserved.mean:.1%} "
        f"({reserved.count}, {reserved.worst:+.1%})"
    )
    assert said in readme.README.read_text(encoding="utf8"), "run `make readme`"


def test_the_margin_is_what_the_reserved_peaks_ask_for():
    assert page.margin() == MARGIN
    short = page.shortfalls(m for m in page.counted(kept.RESERVED) if not page.is_old(m))
    assert sum(need <= MARGIN for need in short) >= page.SUFFICES * len(short)
    assert sum(need <= MARGIN - 0.01 for need in short) < page.SUFFICES * len(short)


@pytest.mark.night
@pytest.mark.parametrize(
    "name",
    [
        "DistilBERT, 4 × 128",
        "BERT-base, fp16, 4 × 256, sdpa",
        "DistilBERT, fp16, 8 × 256, sdpa",  # measured on a Turing
        "GPT 124M, 8 × 1024, fused attention",
        "20 linear layers, DDP, after the first update",
        "RMSNorm, 2048 × 32768",
    ],
)
def test_kept_plans_are_todays(name):
    peaks = BY_NAME[name].planned()
    assert kept.read()[name] == {"allocated": peaks.allocated, "reserved": peaks.reserved}


def test_what_is_still_to_be_planned_has_its_source_and_counts_nowhere():
    waiting = page.to_plan()
    assert waiting, "what is planned leaves the file"
    for row in waiting:
        assert row["source"] and row["licence"] and float(row["measured"]) > 0, row
    planned = {(miss.point.source, miss.measured) for miss in page.misses()}
    sizes = {"GB": 10**9, "GiB": 2**30}
    for row in waiting:
        size = round(float(row["measured"]) * sizes[row["unit"]])
        assert not any(size == round(measured) for _, measured in planned), row
