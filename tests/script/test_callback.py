"""PlanCallback in real training on the CPU: what it says, against plans of the same program."""

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset

from tests.forked import forked
from tests.script import run, same_plan
from tight_fit import PlanCallback
from tight_fit.gpus import GPU
from tight_fit.units import GIB, MIB

DATA = """\
import torch, transformers
transformers.set_seed(0)
row = lambda count: {"input_ids": torch.arange(count), "labels": torch.arange(count)}
data = [row(count) for count in (17, 33, 64, 20, 9, 12, 40, 50) * 8]
def collate(rows):
    most = max(len(row["input_ids"]) for row in rows)
    pad = lambda ids: torch.nn.functional.pad(ids, (0, most - len(ids)))
    return {key: torch.stack([pad(row[key]) for row in rows]) for key in rows[0]}
"""
LLAMA = f"""\
{DATA}
config = transformers.LlamaConfig(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_hidden_layers=2,
    vocab_size=512, bos_token_id=1, eos_token_id=2,
)
model = transformers.LlamaForCausalLM(config)
"""
TRAIN = """\
arguments = transformers.TrainingArguments(
    "out", per_device_train_batch_size=8, max_steps=8, report_to=[], save_strategy="no", **OPTIONS
)
trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=collate)
trainer.train()
"""
A_BATCH = 2 * 8 * 64 * 8  # bytes of the longest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trainer(*callbacks, data=None, change=lambda model: model, **options):
    names = {}
    exec(LLAMA, names)
    arguments = {
        "per_device_train_batch_size": 8, "max_steps": 4, "report_to": [], "save_strategy": "no",
        "use_cpu": True, "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    return transformers.Trainer(
        change(names["model"]),
        transformers.TrainingArguments("out", **{**arguments, **options}),
        train_dataset=data or names["data"],
        data_collator=names["collate"],
        callbacks=[*callbacks],
    )


def told(gpu="A100", **options):
    """(the callback, the lines it said) of a training."""
    lines: list[str] = []
    callback = PlanCallback(gpu, say=lines.append)
    trainer(callback, **options).train()
    return callback, lines


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        {"optim": "sgd", "max_grad_norm": 0},
    ],
    ids=" ".join,
)
def test_the_plan_is_that_of_the_same_program(options, program):
    """`tight-fit script` runs the Trainer's own loop, which draws the batches of a step ahead."""
    callback, lines = told(**options)
    facts = run(program(LLAMA + TRAIN.replace("OPTIONS", repr(options))), gpu="A100")
    ahead = options.get("gradient_accumulation_steps", 1) * A_BATCH
    same_plan(callback, lines, facts, 2 * MIB if ahead > A_BATCH else 0, 4 * ahead + 2**17)


def test_training_is_what_it_is_without():
    """The same losses to the bit: no random number is drawn, and the model is left as it is."""

    def losses(*callbacks):
        one = trainer(*callbacks, change=with_dropout)
        one.train()
        return [entry["loss"] for entry in one.state.log_history if "loss" in entry]

    assert losses(PlanCallback("T4", say=lambda line: None)) == losses()


def with_dropout(model):
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model


QLORA = """\
import torch, transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
transformers.set_seed(0)
four = transformers.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = transformers.AutoModelForCausalLM.from_pretrained(
    "tiny", quantization_config=four, dtype=torch.bfloat16, device_map=WHERE
)
model = get_peft_model(
    prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": False}
    ),
    LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
"""


def test_adapters_on_4_bits_are_planned_as_the_same_program(program):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    names = {}
    exec(LLAMA, names)
    names["model"].to(torch.bfloat16).save_pretrained("tiny")
    exec(QLORA.replace("WHERE", "'cpu'"), names)
    callback, lines = told(change=lambda model: names["model"], bf16=True)
    text = DATA + QLORA.replace("WHERE", "'auto'") + TRAIN.replace("OPTIONS", "{'bf16': True}")
    facts = run(program(text), gpu="A100", seconds=200.0)
    same_plan(callback, lines, facts, 2 * MIB, 4096)


def test_where_it_does_not_fit_what_it_advises_fits():
    need = told()[0].facts["need"]
    small = GPU("a small GPU", need - 6 * MIB, (8, 0))
    callback, (verdict, advice) = told(small)
    assert "it will run out of memory" in verdict and not callback.facts["fits"]
    smaller = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    for change in ({"gradient_checkpointing": True}, smaller):
        assert ", ".join(f"{name}={value}" for name, value in change.items()) in advice
        assert told(small, **change)[0].facts["fits"]
    _, (_, advice) = told(GPU("a tiny GPU", GIB // 2, (8, 0)))
    assert advice.endswith("neither smaller batches nor gradient_checkpointing=True make it fit.")


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield {"input_ids": torch.arange(8), "labels": torch.arange(8)}


def other_parameter(model):
    model.lm_head.weight = type("Weight2bit", (nn.Parameter,), {})(model.lm_head.weight.data)
    return model


@pytest.mark.parametrize(
    "options, words",
    [
        ({"label_smoothing_factor": 0.1}, "label smoothing computes another loss"),
        ({"data": Stream()}, "the data set has no length"),
        ({"gpu": None}, 'there is no GPU here; PlanCallback(gpu="T4") names one.'),
        ({"change": other_parameter}, "lm_head.weight is a Weight2bit; `tight-fit script` plans"),
    ],
)
def test_what_is_not_planned_is_said_and_training_goes_on(options, words):
    callback, (line,) = told(**options)
    assert line.startswith("tight-fit: this training is not planned: ") and words in line
    assert not callback.facts


def test_a_gpu_that_nobody_knows_is_refused_at_once():
    with pytest.raises(ValueError, match="RTX"):
        PlanCallback("RTX 39600")


def test_afterwards_the_plan_stands_beside_what_was_reserved(monkeypatch):
    lines: list[str] = []
    callback = PlanCallback("A100", say=lines.append)
    one = trainer(callback)
    callback.on_train_begin(
        one.args,
        transformers.TrainerState(is_world_process_zero=True),
        None,
        model=one.model,
        optimizer=torch.optim.AdamW(one.model.parameters(), fused=True),
        train_dataloader=one.get_train_dataloader(),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 68 * MIB)
    callback.on_train_end(one.args, one.state, None)
    off = 100 * (callback.facts["reserved"] / (68 * MIB) - 1)
    assert "PyTorch reserved 68.0 MiB; the plan" in lines[-1] and f"({off:+.1f} %)" in lines[-1]
    assert callback.facts["measured"] == 68 * MIB


def test_out_of_memory_is_explained_by_the_plan():
    lines: list[str] = []
    callback = PlanCallback("T4", say=lines.append)
    for facts in ({}, {"need": 4 * GIB, "fits": True}, {"need": 40 * GIB, "fits": False}):
        callback.facts = facts
        callback._explain(0, 2 * GIB, 9 * GIB, 0)
    held = "PyTorch holds 9.00 GiB, and 2.00 GiB more were asked for."
    assert [held in line for line in lines] == [True] * 3
    assert "needs only 4.00 GiB" in lines[1] and "as planned (40.00 GiB)" in lines[2]


def test_of_several_processes_one_says_once_that_they_are_not_planned(tmp_path):
    """Two real ones that gloo connects, as torchrun and `accelerate launch` start them."""
    train = TRAIN.replace("**OPTIONS", "use_cpu=True, disable_tqdm=True").replace(
        "train_dataset", "callbacks=[__import__('tight_fit').PlanCallback('T4')], train_dataset"
    )
    path = tmp_path / "two.py"
    path.write_text(f"{LLAMA}{train}print('done')\n")
    said = forked(path, ranks=2)
    assert [text.count("done") for text in said] == [1, 1]
    assert [text.count("tight-fit:") for text in said] == [1, 0]
    assert "several GPUs train it" in said[0]
