"""`tight-fit MODEL --float8`: the words and the facts of an answer, and the GPUs that have none."""

import json

import pytest

from tests.command.test_plan_command import asked, own_cache  # noqa: F401
from tight_fit.command import main as with_layouts
from tight_fit.plans.model import plan_model

STEP = ["--batch", 4, "--length", 32, "--quick"]


def test_the_answer_says_how_products_are_scaled_and_what_is_not_planned(folder, capsys):
    code, text = asked(capsys, folder, *STEP, "--gpu", "L4", "--float8", "rowwise")
    assert code == 0 and "products of linear layers in FP8 scaled rowwise" in text.splitlines()[0]
    assert "torch.compile, without which torchao's float8 is slower than this" in text
    together = asked(capsys, folder, *STEP, "--gpu", "L4", "--float8", "rowwise", "--compile")[1]
    assert "without which" not in together and "joins the casts to FP8" in together
    assert "FP8" not in asked(capsys, folder, *STEP, "--gpu", "L4")[1]


def test_json_holds_its_plan(folder, capsys):
    typed = [folder, *STEP, "--gpu", "H100", "--float8", "tensorwise", "--json"]
    facts = json.loads(asked(capsys, *typed)[1])
    fields = {"batch_size": 4, "length": 32, "float8": "tensorwise"}
    planned = plan_model(folder, gpu="H100", **fields)
    assert (facts["peak"], facts["float8"]) == (planned.peak, "tensorwise")
    assert facts["seconds"] == planned.seconds("H100").total


def test_without_a_gpu_those_that_lack_fp8_do_not_hold_it(folder, capsys):
    facts = json.loads(asked(capsys, folder, *STEP, "--float8", "tensorwise", "--json")[1])
    assert facts["cards"]["L4"] and not facts["cards"]["A100-80GB"] and not facts["cards"]["T4"]


def test_of_a_size_the_gpus_with_fp8_are_timed(folder, capsys):
    typed = [folder, *STEP, "--gpu", "24GB", "--float8", "tensorwise", "--json"]
    timed = json.loads(asked(capsys, *typed)[1])["seconds_by_gpu"]
    assert "RTX 4090" in timed and "RTX 3090" not in timed


@pytest.mark.parametrize(
    "typed, says",
    [
        (["--gpu", "T4", "--float8", "tensorwise"], "The T4 has no products in FP8"),
        (["--gpu", "H100", "--layout", "fsdp=2", "--float8", "rowwise"], "add compile"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_what_is_not_planned_is_refused_in_one_sentence(typed, says, folder, capsys):
    with pytest.raises(SystemExit) as ended:
        with_layouts.main([str(folder), "--batch", "4", "--length", "32", *typed])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and says in printed


def test_a_layout_is_planned_compiled_and_on_gpus_that_have_fp8(folder, capsys):
    typed = [str(folder), "--batch", "4", "--length", "32", "--layout", "fsdp=2", "--compile"]
    typed += ["--float8", "tensorwise", "--gpu"]
    assert with_layouts.main([*typed, "H100"]) == 0
    line = capsys.readouterr().out
    assert "each layer compiled, products of linear layers in FP8 scaled tensorwise" in line
    with pytest.raises(SystemExit):
        with_layouts.main([*typed, "A100-80GB"])
    assert "has no products in FP8" in capsys.readouterr().err
