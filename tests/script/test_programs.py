"""Training programs as people write them, unchanged: planned for a GPU, and against real runs.

They have the shapes of the examples that transformers, accelerate, peft, torchvision, timm,
nanoGPT, Fabric and PyTorch publish, written again.
"""

import runpy
from pathlib import Path

import datasets  # noqa: F401  # imported once for all programs
import lightning_fabric  # noqa: F401
import peft  # noqa: F401
import pytest
import torch
from torch import nn

from benchmarks.programs.real import steps_of
from tests.script import run, taken
from tight_fit.trace.quantized import state_tensors

PROGRAMS = Path(__file__).parent / "programs"
ARGUMENTS = {  # of a program, or of one way to run it; "{}" is the folder of the small models
    "text_classification_trainer": (
        "--model_name_or_path {}/bert --output_dir out --per_device_train_batch_size 8 "
        "--report_to none --train_sampling_strategy sequential"
    ),
    "language_model_own": "",
    "accelerate_loop": "{}/bert",
    "translation_seq2seq_trainer": "{}/t5",
    "vision_mixup_loop": "",
    "lora_loop": "{}/gpt2",
    "quantized_lora_loop": "{}/gpt2",
    "fabric_loop": "",
    "adversarial_pair": "",
    "loss_in_chunks": "",
    "pooled_words": "",
    "convolution_reference": "",
    "checkpointed_compiled_loop": "bfloat16",
    "compiled_blocks": "",
    "evaluation_loop": "--first",
    "lightning_module": "",
    "preferences_trl dpo": "{}/gpt2 DPO",
    "preferences_trl kto": "{}/gpt2 KTO",
    "preferences_trl reward": "{}/gpt2 Reward",
    "preferences_trl sft": "{}/gpt2 SFT",
}
NEEDED = {"lightning_module": "lightning", "preferences_trl": "trl"}
ELSEWHERE = {  # in other files, and below
    "ddp_loop", "fully_shard_loop", "evaluation_trainer", "text_classification_loop",
    "compiled_early_trainer", "lightning_tagger",
}  # fmt: skip
# For a GPU: a few shapes, and what is not compared with a run on a CPU.
FOR_A_GPU = [
    "text_classification_trainer", "language_model_own", "lora_loop", "fabric_loop",
    "checkpointed_compiled_loop", "evaluation_loop", "preferences_trl reward",
    "convolution_reference", "quantized_lora_loop", "compiled_blocks",
]  # fmt: skip
# oneDNN's convolutions lay their images out anew inside the kernel, which no operation tells of;
# bitsandbytes's products are planned as those of its CUDA kernels; inductor's code for a CPU has a
# test of its own.
NOT_ON_A_CPU = {"convolution_reference", "quantized_lora_loop", "compiled_blocks"}
# PyTorch's CPU makes a tensor of 8 bytes of each number by which a tensor is divided or multiplied,
# and keeps it for the backward pass; a GPU gets the number itself.
NUMBERS = 64  # bytes
STEPS = 3


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def program(name: str) -> Path:
    return PROGRAMS / f"{name.partition(' ')[0]}.py"


def arguments_of(name: str, tiny: Path) -> tuple[str, ...]:
    if needed := NEEDED.get(program(name).stem):
        pytest.importorskip(needed)
    return tuple(ARGUMENTS[name].format(tiny).split())


def planned(name: str, arguments: tuple[str, ...], gpu=None, **wanted):
    return run(str(program(name)), *arguments, gpu=gpu, seconds=300.0, **wanted)


def test_every_program_is_tried():
    assert {*PROGRAMS.glob("*.py")} == {program(name) for name in (*ARGUMENTS, *ELSEWHERE)}
    assert {*FOR_A_GPU} >= NOT_ON_A_CPU


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name not in NOT_ON_A_CPU])
def test_a_plan_is_what_the_real_run_takes(name, tiny, tmp_path):
    """The last two of three steps, by the record of the CPU's own allocator, to the byte."""
    if "bfloat16" in ARGUMENTS[name] and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("This CPU has no products in bf16: oneDNN takes room for them that it hides.")
    arguments = arguments_of(name, tiny)
    plan = taken(planned(name, arguments, steps=STEPS))
    assert not any(tmp_path.iterdir()), "a planned program wrote into its folder"
    real = steps_of(program(name), arguments, STEPS, tmp_path)
    beside = [there - here for there, here in zip(real, plan)][1:]
    assert all(0 <= number <= NUMBERS and number % 4 == 0 for number in beside), (plan, real)
    assert min(plan[1:]) > 20 * NUMBERS, "too small to show anything"


@pytest.mark.night
def test_a_compiled_module_takes_what_inductors_code_takes_and_a_little_more(tmp_path):
    """Inductor's code writes the gradient of logits over what it reads for the last time; a plan
    holds both. Uncompiled the step takes half as much again."""
    plan = taken(planned("compiled_blocks", (), steps=STEPS))[1:]
    real = steps_of(program("compiled_blocks"), (), STEPS, tmp_path)[1:]
    assert all(1 <= here / there < 1.15 for here, there in zip(plan, real, strict=True))


def test_a_module_that_checkpoints_inside_is_planned_uncompiled_and_the_plan_says_so():
    whole, checkpoints = (
        planned(name, (), "RTX 3060")["notes"]
        for name in ("compiled_blocks", "checkpointed_compiled_loop")
    )
    said = ["without compiling" in " ".join(notes) for notes in (whole, checkpoints)]
    assert said == [False, True]


def test_a_model_compiled_before_trainer_is_planned_in_trainers_precision():
    """torch compiles at the first call, when Accelerate has put autocast around the `forward`."""
    early, late = (
        planned("compiled_early_trainer", arguments, "RTX 3060") for arguments in (("--early",), ())
    )
    assert early["peak"] == late["peak"] and not early["notes"] and not late["notes"]


@pytest.mark.parametrize("name", FOR_A_GPU)
def test_programs_run_unchanged_for_a_gpu(name, tiny, tmp_path):
    facts = planned(name, arguments_of(name, tiny), "RTX 3060")
    assert facts["fits"] and facts["peak"] == sum(facts["at_peak"].values())
    assert facts["peak"] <= facts["allocated"] <= facts["reserved"] < facts["need"]
    assert facts["at_peak"]["parameters"] and facts["at_peak"]["optimizer states"]
    assert facts["largest"][0]["line"].startswith(f"{program(name).name}:")
    assert facts["seconds"] > 0 and facts["regular"] >= 3
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("options", [(), ("--prepare",)], ids=["as loaded", "prepared"])
def test_weights_in_4_bits_take_what_the_libraries_take(options, tiny):
    """Against the model that transformers, bitsandbytes and peft make on a CPU, to the byte."""
    folder = str(tiny / "gpt2")
    facts = planned("quantized_lora_loop", (folder, *options), "T4")
    module = runpy.run_path(str(PROGRAMS / "quantized_lora_loop.py"))
    model: nn.Module = module["load"](folder, bool(options)).train()
    model(torch.ones(1, 8, dtype=torch.long))  # gives biases the dtype in which products run
    held = [*model.parameters(), *model.buffers(), *state_tensors(model)]
    by_id = {id(tensor): tensor.nbytes for tensor in held}  # peft's layer has its base's weight
    assert facts["at_peak"]["parameters"] == sum(by_id.values())
    assert facts["parameters"] == model.get_nb_trainable_parameters()[1]


@pytest.mark.parametrize("bits", ("8", "32"))
def test_paged_states_are_counted_on_the_gpu(bits):
    """As the same optimizer's without pages, of which a CPU can make real ones."""
    pytest.importorskip("bitsandbytes")
    Path("train.py").write_text(
        "import sys, torch, bitsandbytes as bnb\n"
        "model = torch.nn.Linear(1024, 1024, bias=False).cuda()\n"
        "optimizer = getattr(bnb.optim, sys.argv[1])(model.parameters())\n"
        "for step in range(5):\n"
        "    model(torch.rand(8, 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n",
        encoding="utf8",
    )
    paged, plain = (run("train.py", f"{kind}AdamW{bits}bit") for kind in ("Paged", ""))
    assert paged["at_peak"]["optimizer states"] == plain["at_peak"]["optimizer states"] > 2**21
    assert any(note.startswith("Paged optimizer states") for note in paged["notes"])
