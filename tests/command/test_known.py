"""Models and GPUs as people type them, and the answers that are kept."""

import importlib
import json
import lzma
import os
import random
import tomllib
from dataclasses import replace

import pytest
import torch

from tests.small import ROOT
from tight_fit import gpus
from tight_fit.command import kept, question, ship
from tight_fit.command.answer import Answers
from tight_fit.command.options import parser
from tight_fit.command.progress import Progress
from tight_fit.command.ship import SIZES, asked_of
from tight_fit.models import config as hf_config
from tight_fit.models import hub, made
from tight_fit.models import names as model_names
from tight_fit.models.step import ModelStep

# Parameters as published or counted by others on the checkpoints, heads of two classes included.
PUBLISHED = {
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-xl": 1_557_611_200,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "google-bert/bert-base-uncased": 109_482_240 + 2 * 769,
    "google-t5/t5-base": 222_903_552,
    "facebook/bart-base": 139_420_416,
    "openai/clip-vit-base-patch32": 151_277_313,
    "microsoft/resnet-50": 25_557_032,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "llava-hf/llava-1.5-7b-hf": 7_063_427_072,
    "openai/whisper-small": 241_734_912,
    "openai/whisper-large-v3": 1_543_490_560,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_the_published_sizes(name):
    step = ModelStep(hf_config.read(name))
    with torch.device("meta"):
        model = made.make(step)
        model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_short_and_older_names_of_models():
    for typed, full in {
        "roberta-base": "FacebookAI/roberta-base",
        "gpt2": "openai-community/gpt2",
        "bert-base-uncased": "google-bert/bert-base-uncased",
        "distilbert": "distilbert/distilbert-base-uncased",
        "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
        "deberta-v3-base": "microsoft/deberta-v3-base",
        "somebody/something": "somebody/something",
    }.items():
        assert model_names.full_name(typed) == full


def test_a_known_model_needs_no_network(monkeypatch):
    monkeypatch.setattr(hub, "unreachable", lambda repo: pytest.fail("the hub was asked"))
    assert hf_config.read("roberta-base").hidden_size == 768


def test_the_courses_configurations_are_the_known_ones():
    """They stand in two places: the course's own folder, and among the known models.

    Among these with the class and the dtype of the stored weights, which a plan takes; the course
    chooses both itself, for each recipe.
    """
    from helpers import models

    for folder, name in models.REPOS.items():
        ours = json.loads((models.CONFIGS / folder / "config.json").read_text())
        published = dict(model_names.known()[name])
        chosen = {key: published.pop(key) for key in ("architectures", "dtype") if key in published}
        assert published == ours
        assert (chosen.get("dtype") == "bfloat16") == ("Qwen3" in name)


def test_a_size_is_what_pytorch_sees_of_it():
    assert gpus.find("24GiB").memory == 24 * 2**30
    sold = {"GTX 1650": 4, "RTX 4060 Laptop": 8, "RTX 3060": 12, "RTX 4090": 24, "A100-40GB": 40}
    for name, size in sold.items():  # never more than a card of that size has
        assert 0.94 < gpus.find(f"{size}GB").memory / gpus.find(name).memory < 1


def test_an_answer_is_kept_and_found_again(monkeypatch, ask):
    """The second time nothing is planned; after a change of options, versions or code it is."""

    def found(options, model="gpt2"):
        return kept.find(question.of(parser().parse_args([model, *options.split()])))

    options = "--gpu T4 --batch 3 --length 8 --quick"
    first = ask(options, "gpt2")
    monkeypatch.setattr(
        "tight_fit.command.answer.answers", lambda *rest: pytest.fail("planned again")
    )
    assert ask(options, "gpt2") == first
    assert found(options)["batch_size"] == 3
    assert found(f"{options} --optimizer adamw") is not None, "as it was without"
    assert found(options.replace(" --quick", "")) is None, "with advice"
    assert found(f"{options} --optimizer sgd") is None
    assert found(options, "distilgpt2") is None
    for name, other in (("versions", {"torch": "9.9"}), ("code", "other")):
        with monkeypatch.context() as changed:
            changed.setattr(question, name, lambda other=other: other)
            assert found(options) is None
    (file,) = kept.folder().glob("*.json")
    file.write_text("{")
    assert found(options) is None, "a damaged answer is made anew"


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kept.keep(asked_of("openai-community/gpt2"), {"peak": 1})
    assert kept.find(replace(asked_of("openai-community/gpt2"), fields={"length": 7})) is None


def test_few_answers_are_kept(monkeypatch):
    monkeypatch.setattr(kept, "MOST", 2)
    for length in range(1, 5):
        asked = replace(asked_of("openai-community/gpt2"), fields={"length": length})
        kept.keep(asked, {"peak": length})
        for file in kept.folder().glob("*.json"):
            os.utime(file, (length, length)) if file.stat().st_mtime > 9 else None
    assert len(list(kept.folder().glob("*.json"))) == 2 and kept.find(asked) == {"peak": 4}


def test_shipped_answers_are_small_and_say_their_versions():
    assert kept.SHIPPED.stat().st_size < 500_000
    shipped = json.loads(lzma.decompress(kept.SHIPPED.read_bytes()))
    assert set(shipped["versions"]) == set(question.versions())
    for plan in shipped["plans"]:
        asked = asked_of(plan["model"])
        for gpu in (None, *map(gpus.find, ("T4", "A100", "8GB"))):
            assert kept.shipped(replace(asked, gpu=gpu))["planned_with"] == shipped["versions"]


def test_a_shipped_answer_says_so(ask, facts):
    text = ask("--gpu 8GB", "roberta-base")[1]
    assert "this plan came with the package, made with PyTorch" in text
    assert facts("--gpu 8GB", "roberta-base")["shipped"] is True


def test_the_entry_point_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["tight-fit"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def different(shipped, today):
    """The facts planned today that are not those shipped; figures of time have six digits there."""
    return {
        name
        for name, value in today.items()
        if shipped[name]
        != (
            pytest.approx(value, rel=1e-5)
            if isinstance(value, float) or name in ("seconds_by_phase", "seconds_by_gpu")
            else json.loads(json.dumps(value))
        )
    }


@pytest.fixture
def shipped_today():
    """The models whose answers are shipped, where these libraries made them."""
    shipped = json.loads(lzma.decompress(kept.SHIPPED.read_bytes()))
    if shipped["versions"] != question.versions():
        pytest.skip("planned with other versions of the libraries")
    return [plan["model"] for plan in shipped["plans"]]


def test_a_shipped_answer_is_what_is_planned_today(shipped_today):
    asked = replace(asked_of("distilbert/distilbert-base-uncased"), gpu=gpus.find("GTX 1650"))
    maker, shipped = Answers(asked), kept.shipped(asked)
    today = maker.shared() | maker.on(asked.gpu) | maker.advice(asked.gpu)
    assert set(today) == set(shipped) - {"shipped"}
    assert not different(shipped, today)


def test_a_sample_of_the_shipped_answers_is_what_is_planned_today(shipped_today):
    """To the byte, without advice. The planner's code draws them, so each change of it tries
    others: where they differ, `python -m tight_fit.command.ship` plans all anew."""
    draw = random.Random(question.code())
    for name in draw.sample(shipped_today, 3):
        gpu = draw.choice([*gpus.GPUS.values(), *map(gpus.find, SIZES)])
        asked = replace(asked_of(name), gpu=gpu)
        maker, shipped = Answers(asked), kept.shipped(asked)
        today = maker.shared() | maker.on(gpu)
        assert not different(shipped, today), f"{name} on {gpu.name}: plan and ship it anew"
        assert different(shipped | {"peak": shipped["peak"] + 1}, today) == {"peak"}


ADAMW = "fused AdamW (Trainer's default, adamw_torch_fused)"
FUSED = "sdpa attention in a fused kernel"


def test_the_first_line_says_what_is_planned(ask):
    def first(model, options):
        return ask(f"{options} --quick", model)[1].splitlines()[0]

    adapters = "--gpu RTX4090 --batch 1 --lora-rank 8"
    assert first("meta-llama/Llama-3.2-1B", adapters).startswith(
        "Planned: bf16 weights, as its configuration says, frozen; fp32 adapters of rank 8; "
        f"bf16 autocast; {ADAMW}; {FUSED}. Assumed: 512 tokens (--length), causal-lm (--task)"
    )
    plain = f"Planned: fp32 weights; no autocast; {ADAMW}; {FUSED}."
    assert first("distilbert", "--gpu T4") == (
        f"{plain} Assumed: batch 16 (--batch), 512 tokens (--length), sequence-classification "
        "(--task). Its configuration names masked-lm."
    )
    said = first("distilbert", "--gpu T4 --task masked-lm --batch 2 --length 9")
    assert said == plain


def test_an_ambiguous_gpu_is_said(ask):
    text = ask("--gpu A100 --quick --length 8")[1]
    assert "There is also the A100-80GB: say which with --gpu." in text


def test_what_is_shipped_has_six_digits_of_times_and_all_of_bytes():
    facts = {"peak": 123456789, "seconds": 0.123456789, "by": {"forward": 1e-7 / 3}, "fits": True}
    shipped = {"peak": 123456789, "seconds": 0.123457, "by": {"forward": 3.33333e-08}, "fits": True}
    assert ship._rounded(facts) == shipped


def test_the_line_of_progress_is_taken_away_whole(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = Progress()
    progress.say("planning a long thing")
    progress.say("short")
    progress.clear()
    progress.clear()
    lines = capsys.readouterr().err.split("\r")
    assert lines[1] == "planning a long thing ..."
    assert lines[2] == "short ...".ljust(len(lines[1])) and lines[3:] == [" " * 9, ""]
