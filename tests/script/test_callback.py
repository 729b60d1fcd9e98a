"""PlanCallback and LightningPlanCallback in real training on the CPU, against plans of the same
program."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.forked import forked
from tests.script import run
from tight_fit import LightningPlanCallback, PlanCallback
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
    "out", per_device_train_batch_size=8, max_steps=8, report_to=[], save_strategy="no",
    **dict(OPTIONS)
)
trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=collate)
trainer.train()
"""
MODULE, _, _ = (
    (Path(__file__).parent / "programs" / "lightning_module.py")
    .read_text(encoding="utf8")
    .partition("if __name__")
)
FIT = """\
trainer = lightning.Trainer(**options | dict(OPTIONS))
trainer.fit(Tagger(), DataLoader(data, batch_size=8, collate_fn=collate))
"""
PROGRAMS = {"transformers": LLAMA + TRAIN, "lightning": MODULE + FIT}
A_BATCH = 2 * 8 * 64 * 8  # bytes of the longest
LOGGED = 4096  # bytes of losses that Lightning keeps to log them


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trainer(*callbacks, data=None, change=lambda model: model, **options):
    """A Trainer of transformers."""
    names = {}
    exec(LLAMA, names)
    usual = {
        "per_device_train_batch_size": 8, "max_steps": 4, "report_to": [], "save_strategy": "no",
        "use_cpu": True, "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    return transformers.Trainer(
        change(names["model"]),
        transformers.TrainingArguments("out", **usual | options),
        train_dataset=data or names["data"],
        data_collator=names["collate"],
        callbacks=[*callbacks],
    )


def fit(*callbacks, library="lightning", change=None, data=None, rows=8, manual=False, **options):
    """The module after Lightning's training."""
    lightning, names = pytest.importorskip(library), {}
    exec(MODULE.replace("import lightning\n", f"import {library} as lightning\n"), names)
    if options.get("precision") == "16-mixed":  # which the Trainer makes bf16-mixed on a CPU
        del options["precision"]
        options["plugins"] = [lightning.pytorch.plugins.MixedPrecision("16-mixed", device="cpu")]
    module = names["Tagger"]()
    module.automatic_optimization = not manual
    if change:
        module.training_step = change.__get__(module)
    settings = names["options"] | {"max_steps": 4, "accelerator": "cpu"} | options
    loader = DataLoader(data or names["data"], rows, collate_fn=None if data else names["collate"])
    lightning.Trainer(callbacks=[*callbacks], **settings).fit(module, loader)
    return module


def told(library="transformers", gpu="A100", **options):
    """(the callback, the lines it said) of a training."""
    lines: list[str] = []
    if library == "transformers":
        callback = PlanCallback(gpu, say=lines.append)
        trainer(callback, **options).train()
    else:
        callback = LightningPlanCallback(gpu, say=lines.append)
        fit(callback, library=library, **options)
    return callback, lines


def same_plan(callback, lines, facts, reserved, allocated):
    """A callback planned what `tight-fit script` plans, but for up to so many bytes less, of the
    longest batch of 8 × 64, and said so in one line."""
    (line,), found = lines, callback.facts
    assert found["batch"] == facts["batch_longest"] == [8, 64]
    assert json.loads(json.dumps(found)) == found
    assert found["terms"].keys() == facts["terms"].keys()
    assert sum(found["terms"].values()) == found["need"]
    assert 0 <= facts["reserved"] - found["reserved"] <= reserved
    assert 0 <= facts["allocated"] - found["allocated"] <= allocated
    assert found["seconds"] == pytest.approx(facts["longest_seconds"], rel=0.15)
    assert "(8 × 64)" in line and "it fits. A step takes about" in line


@pytest.mark.parametrize(
    "library, options, reserved, allocated",
    [
        # Trainer's own loop draws the batches of a step ahead.
        ("transformers", {"bf16": True, "gradient_accumulation_steps": 2,
                          "gradient_checkpointing": True}, 2 * MIB, 8 * A_BATCH + 2**17),
        ("transformers", {"optim": "sgd", "max_grad_norm": 0}, 0, 4 * A_BATCH + 2**17),
        # In Lightning's gradients live through the next forward pass.
        ("lightning", {"precision": "bf16-mixed", "gradient_clip_val": 1.0}, 0, LOGGED),
        ("lightning", {"precision": "bf16-true"}, 0, LOGGED),
        ("lightning", {"precision": "16-mixed", "accumulate_grad_batches": 2}, 0, LOGGED),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_the_plan_is_that_of_the_same_program(library, options, reserved, allocated, program):
    callback, lines = told(library, **options)
    text = PROGRAMS[library].replace("OPTIONS", repr(options))
    facts = run(program(text), gpu="A100", seconds=200.0)
    same_plan(callback, lines, facts, reserved, allocated)


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


def test_training_is_what_it_is_without():
    """The same losses to the bit: no random number is drawn, and the model is left as it is."""

    def with_dropout(model):
        model.config.attention_dropout = 0.5
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        return model

    def losses(*callbacks):
        one = trainer(*callbacks, change=with_dropout)
        one.train()
        return [entry["loss"] for entry in one.state.log_history if "loss" in entry]

    assert losses(PlanCallback("T4", say=lambda line: None)) == losses()


def test_training_with_lightning_is_what_it_is_without(capsys):
    """The same weights to the bit; what the copy logs and prints reaches nobody."""
    lightning = pytest.importorskip("lightning")

    class Kept(lightning.pytorch.loggers.logger.DummyLogger):
        def __init__(self):
            super().__init__()
            self.metrics, self.images = [], []

        def log_metrics(self, metrics, step=None):
            self.metrics.append((step, metrics["loss"]))

        @property
        def experiment(self):
            return self.images

    def step(module, batch, number):
        module.logger.experiment.append(number)
        print("a step")
        return type(module).training_step(module, batch, number)

    def trained(*callbacks):
        logger = Kept()
        module = fit(*callbacks, change=step, logger=logger, log_every_n_steps=1)
        return list(module.state_dict().values()), logger.metrics, logger.images

    planned = trained(LightningPlanCallback("T4"))
    said = capsys.readouterr().out
    assert said.count("a step\n") == 4 and "tight-fit: with the longest batch" in said
    plain = trained()
    assert planned[1:] == plain[1:] and planned[2] == [0, 1, 2, 3]
    assert all(torch.equal(*pair) for pair in zip(planned[0], plain[0], strict=True))


@pytest.mark.parametrize(
    "library, changes, without",
    [
        (
            "transformers",
            {
                "gradient_checkpointing=True": {"gradient_checkpointing": True},
                "per_device_train_batch_size=4, gradient_accumulation_steps=2": {
                    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
                },
            },
            "neither smaller batches nor gradient_checkpointing=True make it fit.",
        ),
        (
            "lightning",
            {
                "it fits with batch_size=4 in the DataLoader and accumulate_grad_batches=2": {
                    "rows": 4, "accumulate_grad_batches": 2,
                }
            },
            "no batch of a half, a quarter or an eighth of the size makes it fit.",
        ),
    ],
    ids=["transformers", "lightning"],
)  # fmt: skip
def test_where_it_does_not_fit_what_it_advises_fits(library, changes, without):
    need = told(library)[0].facts["need"]
    small = GPU("a small GPU", need - 6 * MIB, (8, 0))
    callback, (verdict, advice) = told(library, small)
    assert "it will run out of memory" in verdict and not callback.facts["fits"]
    for words, change in changes.items():
        assert words in advice and told(library, small, **change)[0].facts["fits"]
    _, (_, advice) = told(library, GPU("a tiny GPU", GIB // 2, (8, 0)))
    assert advice.endswith(without)


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield {"input_ids": torch.arange(8), "labels": torch.arange(8)}


class Pairs(Stream):
    def __iter__(self):
        return (tuple(row.values()) for row in super().__iter__())


def other_parameter(model):
    model.lm_head.weight = type("Weight2bit", (nn.Parameter,), {})(model.lm_head.weight.data)
    return model


def on_the_copy_alone(module, batch, number):
    if module.device.type == "cuda":
        raise KeyError("it is on a GPU")
    return type(module).training_step(module, batch, number)


def by_hand(module, batch, number):
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(type(module).training_step(module, batch, number))
    optimizer.step()


@pytest.mark.parametrize(
    "library, options, words",
    [
        ("transformers", {"label_smoothing_factor": 0.1}, "label smoothing computes another loss"),
        ("transformers", {"data": Stream()}, "the data set has no length"),
        ("transformers", {"gpu": None}, 'no GPU here; PlanCallback(gpu="T4") names one.'),
        ("transformers", {"change": other_parameter}, "lm_head.weight is a Weight2bit; `tight-fit"),
        ("lightning", {"data": Pairs()}, "the data set has no length"),
        ("lightning", {"gpu": None}, 'no GPU here; LightningPlanCallback(gpu="T4") names one.'),
        ("lightning", {"precision": "64-true"}, "precision '64-true' is not planned"),
        ("lightning", {"change": on_the_copy_alone}, "training_step ends in KeyError: 'it is on"),
        ("lightning", {"change": by_hand, "manual": True}, "its optimization is manual"),
    ],
)
def test_what_is_not_planned_is_said_and_training_goes_on(library, options, words):
    callback, (line,) = told(library, **options)
    assert line.startswith("tight-fit: this training is not planned: ") and words in line
    assert not callback.facts


def test_a_gpu_that_nobody_knows_is_refused_at_once():
    with pytest.raises(ValueError, match="RTX"):
        PlanCallback("RTX 39600")


def test_a_trainer_of_lightnings_other_name_takes_it():
    assert told("pytorch_lightning")[0].facts == told("lightning")[0].facts != {}


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


@pytest.mark.parametrize(
    "library, options, words",
    [
        ("transformers", "use_cpu=True, disable_tqdm=True", "several GPUs train it"),
        ("lightning", "accelerator='cpu', devices=2, strategy='ddp', callbacks=[callback]",
         "several processes train it"),
    ],
    ids=["transformers", "lightning"],
)  # fmt: skip
def test_of_several_processes_one_says_once_that_they_are_not_planned(
    library, options, words, tmp_path
):
    """Two real ones that gloo connects, as torchrun and `accelerate launch` start them."""
    pytest.importorskip(library)
    kind = "PlanCallback" if library == "transformers" else "LightningPlanCallback"
    text = PROGRAMS[library].replace("OPTIONS", options)
    text = text.replace("model, arguments,", "model, arguments, callbacks=[callback],")
    path = tmp_path / "two.py"
    path.write_text(f"from tight_fit import {kind}\ncallback = {kind}('T4')\n{text}print('done')\n")
    said = forked(path, ranks=2)
    assert [text.count("done") for text in said] == [1, 1]
    assert [text.count("tight-fit:") for text in said] == [1, 0]
    assert words in said[0]
