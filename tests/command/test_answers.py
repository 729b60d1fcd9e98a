"""What an answer says of itself, and that what it recommends can be run."""

import pytest
import transformers as library

from helpers.plan import plan
from helpers.recipe import Recipe
from tests.night import few_by_day
from tests.small import configured
from tight_fit import gpus
from tight_fit.command import report
from tight_fit.command.answer import step_of, trainer_optimizer
from tight_fit.command.options import parser
from tight_fit.command.question import Question
from tight_fit.gpus import find
from tight_fit.gpus.specs import has_arithmetic
from tight_fit.kernels.step_seconds import lacks
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import ALSO, KINDS, OPTIMIZERS
from tight_fit.plans.model import plan_model_step
from tight_fit.search.remedies import Remedies
from tight_fit.trace import cuda_kernels
from tight_fit.units import size

LLAMA = configured(
    library.LlamaConfig, 256, 2, 4, 512, 4096, num_key_value_heads=2, max_position_embeddings=512,
    dtype="bfloat16", architectures=["LlamaForCausalLM"],
)  # fmt: skip


@pytest.fixture
def larger(tmp_path):
    LLAMA.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# -- the optimizer ---------------------------------------------------------------------------------


def test_trainers_default_is_that_of_the_installed_version():
    assert trainer_optimizer() == library.TrainingArguments("x", report_to=[]).optim
    names = {optimizer.value for optimizer in library.training_args.OptimizerNames}
    assert {kind.trainer for kind in KINDS.values() if kind.trainer} <= names


@pytest.mark.parametrize(
    "optimizer, words",
    [
        ("adamw_torch_fused", "fused AdamW (Trainer's default, adamw_torch_fused)"),
        ("adamw_torch", "foreach AdamW (PyTorch's default on a GPU; Trainer's adamw_torch)"),
        ("muon", "Muon for hidden matrices with fused AdamW for the rest"),
    ],
)
def test_the_first_line_names_the_optimizer(ask, optimizer, words):
    text = ask(f"--gpu A100 --quick --batch 2 --optimizer {optimizer}")[1]
    assert f"; {words}; sdpa attention" in text.splitlines()[0]
    assert ("--optimizer adamw_foreach plans that" in text) == words.startswith("fused")


def test_other_names_of_an_optimizer_mean_one_of_the_table():
    for typed, meant in ALSO.items():
        assert parser().parse_args(["m", "--optimizer", typed]).optimizer == meant in OPTIMIZERS


def test_foreach_takes_what_the_note_says():
    """The most that the optimizer phase holds: one more copy of what trains."""
    peaks = {}
    for name in ("adamw", "adamw_foreach", "adamw_forloop"):
        planned = plan_model_step(ModelStep(LLAMA, 2, optimizer=name, task="causal-lm"))
        peaks[name] = int(planned.timeline[planned.phases == 2].sum(axis=1).max())
        copy = planned.highest["optimizer states"] // 2
    assert abs(peaks["adamw_foreach"] - peaks["adamw"] - copy) < 0.02 * copy
    assert peaks["adamw"] < peaks["adamw_forloop"] < peaks["adamw_foreach"]


@pytest.mark.parametrize("optimizer", few_by_day(OPTIMIZERS, 5))
def test_mfu_is_no_more_than_a_hundred_percent(optimizer):
    base = {"base": "bf16"} if KINDS[optimizer].base else {}
    planned = plan(Recipe("vit", profile="full", batch_size=4, optimizer=optimizer, **base))
    for gpu in ("T4", "A100-40GB", "H100"):
        if not lacks(planned.operations, gpu):
            assert 0 < planned.seconds(gpu).mfu("fp32") < 1


def test_muon_multiplies_in_its_own_arithmetic():
    """Its plan runs where its products do: in fp32 without autocast a T4 lacks them, for Muon."""
    plain, muon = (
        plan(Recipe("vit", profile="full", batch_size=4, optimizer=name))
        for name in ("adamw", "muon")
    )
    assert KINDS["muon"].arithmetic == "bf16" and has_arithmetic(muon.recipe.precision, "T4")
    assert lacks(muon.operations, "T4") == "bf16" and not lacks(plain.operations, "T4")
    assert not lacks(muon.operations, "RTX 3060")
    useful = []
    for planned in (plain, muon):  # the model's own FLOPs are the same
        took = planned.seconds("A100-40GB")
        assert 0 < took.mfu("fp32") < 1
        useful.append(took.mfu("fp32") * took.total)
    assert useful[0] == pytest.approx(useful[1])


# -- four bits, attention --------------------------------------------------------------------------


def test_an_answer_says_why_a_mixture_in_four_bits_is_not_small(facts, ask, tmp_path):
    """The sentence names the bytes that the plan holds beside those of half as many experts."""
    options = "--gpu A100 --quick --batch 1 --lora 4"
    for count in (2, 4):
        library.MixtralConfig(
            **{**LLAMA.to_diff_dict(), "architectures": ["MixtralForCausalLM"]},
            num_local_experts=count, num_experts_per_tok=1,
        ).save_pretrained(tmp_path / str(count))  # fmt: skip
    for more, bits in (("", 16), (" --kbit", 32)):
        few, many = (facts(f"{options} --base nf4{more}", tmp_path / name) for name in "24")
        router = 2 * 2 * LLAMA.hidden_size  # layers, more experts, width
        experts = 2 * 2 * 3 * LLAMA.hidden_size * LLAMA.intermediate_size
        held = many["at_peak"]["parameters"] - few["at_peak"]["parameters"]
        assert held == (router + experts) * bits // 8
        said = f"{size(2 * experts * bits // 8)} of experts stay in {bits} bits"
        assert any(note.startswith(said) for note in many["notes"])
    assert "of experts stay" not in ask(f"{options} --base nf4")[1]
    assert "of experts stay" not in ask(options, tmp_path / "4")[1]


def test_a_gpu_without_the_kernel_takes_what_a_program_takes_there(ask, facts, larger):
    """Grouped queries before Ampere: written out, and the first line says so."""
    half = "--batch 2 --weights fp32 --quick --precision fp16 --gpu"
    text = ask(f"{half} T4", larger)[1]
    assert "sdpa attention, written out, as the T4 has no fused kernel for it" in text
    full = ask("--batch 2 --weights fp32 --quick --precision fp32 --gpu A100", larger)[1]
    written = "sdpa attention, written out, as the A100-40GB has no fused kernel" in full
    assert written == (not cuda_kernels.GROUPED)
    older, newer = (facts(f"{half} {gpu}", larger) for gpu in ("T4", "A100"))
    scores = 2 * 4 * 512 * 512 * 4  # examples, heads, queries, keys, bytes: computed in fp32
    more = older["at_peak"]["activations"] - newer["at_peak"]["activations"]
    assert more >= 2 * scores  # of each layer the probabilities, for the backward pass
    assert older["attention_fused"] is False and newer["attention_fused"] is True


# -- what is recommended ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, name", [({}, "T4"), ({"lora_rank": 4}, "P4"), ({"weights": "fp32"}, "RTX 3060")]
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
        assert planned.fits(card) and not lacks(planned.operations, name), change
        if not known.bf16:
            assert "bf16" not in (planned.recipe.precision, planned.recipe.weights), change


FACTS = {
    "model": "m",
    "card": "T4",
    "fits": False,
    "asked": {"batch_size": 20},
    "would_fit": [{"accumulation": 2}, {"checkpointing": True}, {"lora_rank": 8}],
    "would_take": [{"need": 1, "seconds": seconds} for seconds in (6.6, 8.7, 4.7)],
    "largest_batch": 7,
    "accumulation": 1,
}


def test_the_fastest_of_them_trains_the_same_weights_or_says_that_it_does_not():
    line, more = report._recipe(FACTS)
    assert line.startswith("YES with the fastest of them that trains the same weights: tight-fit m")
    assert line.endswith("--accumulation 2") and "--fastest" in more
    only = FACTS | {"would_fit": [{"lora_rank": 8}, {"base": "nf4", "lora_rank": 8}]}
    only["would_take"] = FACTS["would_take"][:2]
    assert "which trains adapters and not the weights: tight-fit" in report._recipe(only)[0]


def test_advice_is_a_line_for_each_change():
    lines = report.advice(FACTS)
    assert lines[0] == "What would fit, each change alone:"
    assert lines[1].startswith("  --accumulation 2") and lines[2].startswith("  --checkpointing")
    assert any("Largest batch" in line and "7" in line for line in lines)


def test_the_gpu_of_a_question_decides_nothing_of_its_step():
    """A question in bf16 for a T4 is planned as asked; the note says what to use."""
    asked = Question("m", "m", LLAMA.to_dict(), {"batch_size": 2}, find("T4"))
    assert step_of(asked).precision == "bf16"


def test_a_size_alone_gives_the_seconds_of_the_gpus_that_are_sold_with_it(ask, facts):
    options = "--batch 2 --quick --gpu"
    of_size = facts(f"{options} 48GB")
    by_gpu = of_size["seconds_by_gpu"]
    assert of_size["seconds"] is None and set(by_gpu) >= {"L40S", "A40", "RTX A6000"}
    assert by_gpu["L40S"] == facts(f"{options} L40S")["seconds"]
    text = ask(f"{options} 48GB")[1]
    assert "A step takes" in text and "of 48GB that run it" in text


def test_of_an_amd_gpu_the_memory_is_planned_and_one_sentence_says_so(ask):
    text = ask("--gpu MI300X --batch 2 --quick")[1]
    assert "YES, it fits on an MI300X" in text
    assert "is not planned: time is not known for AMD" in text
