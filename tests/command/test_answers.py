"""What an answer says of itself, and that what it recommends can be run."""

import itertools
import json

import pytest
import transformers as library

from helpers.plan import plan
from helpers.recipe import Recipe
from tests.night import few_by_day
from tight_fit import gpus
from tight_fit.command.answer import step_of, trainer_optimizer
from tight_fit.command.main import main
from tight_fit.command.options import parser
from tight_fit.command.question import Question
from tight_fit.gpus import find
from tight_fit.gpus.specs import has_arithmetic
from tight_fit.kernels.step_seconds import lacks
from tight_fit.memory.plan import CATEGORIES
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import ALSO, KINDS, OPTIMIZERS
from tight_fit.plans.model import plan_model_step
from tight_fit.search.remedies import Remedies
from tight_fit.trace import cuda_kernels
from tight_fit.units import size

LLAMA = library.LlamaConfig(
    vocab_size=4096, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=512, max_position_embeddings=512, dtype="bfloat16",
    architectures=["LlamaForCausalLM"],
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    LLAMA.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def said(capsys, *arguments) -> str:
    main([str(part) for part in arguments])
    return capsys.readouterr().out


# -- the optimizer ---------------------------------------------------------------------------------


def test_trainers_default_is_that_of_the_installed_version():
    assert trainer_optimizer() == library.TrainingArguments("x", report_to=[]).optim
    names = {optimizer.value for optimizer in library.training_args.OptimizerNames}
    assert {kind.trainer for kind in KINDS.values() if kind.trainer} <= names


@pytest.mark.parametrize(
    "optimizer, words",
    (
        ("adamw", "fused AdamW (Trainer's default, adamw_torch_fused)"),
        ("adamw_torch_fused", "fused AdamW (Trainer's default, adamw_torch_fused)"),
        ("adamw_torch", "foreach AdamW (PyTorch's default on a GPU; Trainer's adamw_torch)"),
        ("adamw_forloop", "AdamW in a for-loop"),
        ("muon", "Muon for hidden matrices with fused AdamW for the rest"),
    ),
)
def test_the_first_line_names_the_optimizer(folder, capsys, optimizer, words):
    text = said(capsys, folder, "--gpu", "A100", "--quick", "--batch", 2, "--optimizer", optimizer)
    assert f"; {words}; sdpa attention in a fused kernel." in text.splitlines()[0]
    assert ("--optimizer adamw_foreach plans that" in text) == words.startswith("fused")


def test_other_names_of_an_optimizer_mean_one_of_the_table():
    for typed, meant in ALSO.items():
        assert parser().parse_args(["m", "--optimizer", typed]).optimizer == meant in OPTIMIZERS


def test_foreach_takes_what_the_note_says():
    """The most that the optimizer phase holds: one more copy of what trains."""
    peaks = {}
    for name in ("adamw", "adamw_foreach", "adamw_forloop"):
        planned = plan_model_step(ModelStep(LLAMA, 2, optimizer=name, task="causal-lm"))
        in_step = planned.timeline[planned.phases == 2].sum(axis=1)
        peaks[name] = int(in_step.max())
        states = planned.highest["optimizer states"]
    copy = states // 2
    assert abs(peaks["adamw_foreach"] - peaks["adamw"] - copy) < 0.02 * copy
    assert peaks["adamw"] < peaks["adamw_forloop"] < peaks["adamw_foreach"]
    assert "temporaries" in CATEGORIES


@pytest.mark.parametrize("optimizer", few_by_day(OPTIMIZERS, 5))
def test_mfu_is_no_more_than_a_hundred_percent(optimizer):
    base = {"base": "bf16"} if KINDS[optimizer].base else {}
    planned = plan(Recipe("vit", profile="full", batch_size=4, optimizer=optimizer, **base))
    for gpu in ("T4", "A100-40GB", "H100"):
        if not lacks(planned.operations, gpu):
            assert 0 < planned.seconds(gpu).mfu("fp32") < 1


def test_muon_multiplies_in_its_own_arithmetic():
    """Its plan runs where its products do: in fp32 without autocast a T4 lacks them, for Muon."""
    plain, muon = (plan(Recipe("vit", batch_size=4, optimizer=name)) for name in ("adamw", "muon"))
    assert KINDS["muon"].arithmetic == "bf16" and has_arithmetic(muon.recipe.precision, "T4")
    assert lacks(muon.operations, "T4") == "bf16" and not lacks(plain.operations, "T4")
    assert not lacks(muon.operations, "RTX 3060")
    model = plain.seconds("A100-40GB").mfu("fp32") * plain.seconds("A100-40GB").total
    assert muon.seconds("A100-40GB").mfu("fp32") * muon.seconds("A100-40GB").total == pytest.approx(
        model
    )


# -- four bits -------------------------------------------------------------------------------------


def test_an_answer_says_why_a_mixture_in_four_bits_is_not_small(folder, tmp_path, capsys):
    """The sentence names the bytes that the plan holds beside those of half as many experts."""
    mixtures = {
        count: library.MixtralConfig(
            **{**LLAMA.to_diff_dict(), "architectures": ["MixtralForCausalLM"]},
            num_local_experts=count,
            num_experts_per_tok=1,
        )
        for count in (2, 4)
    }
    asked = ("--gpu", "A100", "--quick", "--batch", 1, "--lora", 4, "--base", "nf4")
    for more, bits in (((), 16), (("--kbit",), 32)):
        found = {}
        for count, mixture in mixtures.items():
            mixture.save_pretrained(tmp_path / str(count))
            text = said(capsys, tmp_path / str(count), *asked, *more, "--json")
            notes = [note for note in json.loads(text)["notes"] if f"stay in {bits} bits" in note]
            found[count] = json.loads(text)["at_peak"]["parameters"], notes
        router = 2 * 2 * LLAMA.hidden_size  # layers, more experts, width
        experts = 2 * 2 * 3 * LLAMA.hidden_size * LLAMA.intermediate_size
        assert found[4][0] - found[2][0] == (router + experts) * bits // 8
        (note,) = found[4][1]
        assert note.startswith(f"{size(2 * experts * bits // 8)} of experts stay in {bits} bits")
    assert "of experts stay" not in said(capsys, folder, *asked)
    assert "of experts stay" not in said(capsys, tmp_path / "4", *asked[:-2])


# -- attention -------------------------------------------------------------------------------------


def test_a_gpu_without_the_kernel_takes_what_a_program_takes_there(folder, capsys):
    """Grouped queries before Ampere: written out, and the first line says so."""
    fp32 = (folder, "--batch", 2, "--weights", "fp32", "--quick", "--precision", "fp32")
    arguments = (*fp32[:-1], "fp16")
    text = said(capsys, *arguments, "--gpu", "T4")
    assert "sdpa attention, written out, as the T4 has no fused kernel for it" in text
    full = said(capsys, *fp32, "--gpu", "A100")
    written = "sdpa attention, written out, as the A100-40GB has no fused kernel" in full
    assert written == (not cuda_kernels.GROUPED)
    older, newer = (json.loads(said(capsys, *arguments, "--gpu", gpu, "--json")) for gpu in CARDS)
    scores = 2 * 4 * 512 * 512 * 4  # examples, heads, queries, keys, bytes: computed in fp32
    more = older["at_peak"]["activations"] - newer["at_peak"]["activations"]
    assert more >= 2 * scores  # of each layer the probabilities, for the backward pass
    assert older["attention_fused"] is False and newer["attention_fused"] is True


CARDS = ("T4", "A100")


# -- what is recommended ---------------------------------------------------------------------------

SMALL = ("T4", "P4", "RTX 3060")


@pytest.mark.parametrize(
    "fields, name",
    few_by_day(itertools.product(({}, {"lora_rank": 4}, {"weights": "fp32"}), SMALL), 4),
)
def test_every_change_that_is_offered_runs_on_the_gpu(name, fields):
    step = ModelStep(LLAMA, 16, task="causal-lm", **fields)
    step = ModelStep(LLAMA, 16, task="causal-lm", **fields, precision=step.weights)
    known = find(name)
    need = plan_model_step(step.on(known.capability)).fits(known).need
    card = gpus.GPU(name, need - 2**20, known.capability)
    remedies = Remedies(step, card)
    changes = remedies.changes()
    assert changes
    for change in changes:
        planned = remedies.plan(change, traced=True)
        assert planned.fits(card), change
        assert not lacks(planned.operations, name), change
        if not known.bf16:
            assert "bf16" not in (planned.recipe.precision, planned.recipe.weights), change


def test_the_fastest_of_them_trains_the_same_weights_or_says_that_it_does_not(capsys, monkeypatch):
    from tight_fit.command import report

    facts = {
        "model": "m",
        "card": "T4",
        "asked": {"batch_size": 20},
        "would_fit": [{"accumulation": 2}, {"checkpointing": True}, {"lora_rank": 8}],
        "would_take": [{"need": 1, "seconds": seconds} for seconds in (6.6, 8.7, 4.7)],
    }
    line, more = report._recipe(facts)
    assert line.startswith("YES with the fastest of them that trains the same weights: tight-fit m")
    assert line.endswith("--accumulation 2") and "--fastest" in more
    only = facts | {"would_fit": [{"lora_rank": 8}, {"base": "nf4", "lora_rank": 8}]}
    only["would_take"] = facts["would_take"][:2]
    assert "which trains adapters and not the weights: tight-fit" in report._recipe(only)[0]


def test_advice_is_a_line_for_each_change():
    from tight_fit.command import report

    facts = {
        "model": "m",
        "card": "T4",
        "fits": False,
        "asked": {"batch_size": 20},
        "would_fit": [{"accumulation": 2}, {"checkpointing": True}],
        "would_take": [{"need": 1, "seconds": 1.0}, {"need": 1, "seconds": 2.0}],
        "largest_batch": 7,
        "accumulation": 1,
    }
    lines = report.advice(facts)
    assert lines[0] == "What would fit, each change alone:"
    assert lines[1].startswith("  --accumulation 2") and lines[2].startswith("  --checkpointing")
    assert any("Largest batch" in line and "7" in line for line in lines)


def test_the_gpu_of_a_question_decides_nothing_of_its_step():
    """A question in bf16 for a T4 is planned as asked; the note says what to use."""
    asked = Question("m", "m", LLAMA.to_dict(), {"batch_size": 2}, find("T4"))
    assert step_of(asked).precision == "bf16"


# -- sizes and other makers ------------------------------------------------------------------------


def test_a_size_alone_gives_the_seconds_of_the_gpus_that_are_sold_with_it(folder, capsys):
    arguments = ("--batch", "2", "--quick", "--gpu")
    facts = json.loads(said(capsys, folder, "--json", *arguments, "48GB"))
    by_gpu = facts["seconds_by_gpu"]
    assert facts["seconds"] is None and set(by_gpu) >= {"L40S", "A40", "RTX A6000"}
    for name, seconds in by_gpu.items():  # as it is for the GPU itself
        named = json.loads(said(capsys, folder, "--json", *arguments, name))
        assert named["seconds"] == seconds
    text = said(capsys, folder, *arguments, "48GB")
    assert "A step takes" in text and "of 48GB that run it" in text and "described" not in text


def test_of_an_amd_gpu_the_memory_is_planned_and_one_sentence_says_so(folder, capsys):
    text = said(capsys, folder, "--gpu", "MI300X", "--batch", "2", "--quick")
    assert "YES, it fits on an MI300X" in text
    assert "is not planned: time is not known for AMD" in text
