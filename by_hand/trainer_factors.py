"""What transformers' Trainer makes of a model's gradients under accumulation, measured here.

Trainer counts the labels of a whole batch and hands the number to the model as
`num_items_in_batch`, if the model's `forward` takes any keyword. It then leaves the division to
the model. Most heads drop the number and return the mean over their micro-batch, so that nothing
divides by the number of micro-batches (huggingface/transformers#47688).
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from helpers.tables import Table
from tight_fit.checks import one_of

EXAMPLES, PARTS, CLASSES, TOKENS, LENGTH = 16, 4, 3, 64, 8

_BASE = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
}
_BERT = _BASE | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
_GROUPED = _BASE | {"num_key_value_heads": 2, "head_dim": 8}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2} | _IDS
_DISTIL = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
_BART = {"d_model": 16, "dropout": 0.0, "decoder_start_token_id": 1, "forced_eos_token_id": None}
_BART |= _IDS | dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
_BART |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
_BART |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)

# {class of transformers: sizes that make a tiny one without dropout}
MODELS: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": _BERT,
    "RobertaForSequenceClassification": _BERT,
    "DistilBertForSequenceClassification": _DISTIL
    | dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0),
    "ElectraForSequenceClassification": _BERT | {"embedding_size": 16},
    "AlbertForSequenceClassification": _BERT
    | {"embedding_size": 16, "classifier_dropout_prob": 0.0},
    "ModernBertForSequenceClassification": _BASE | _IDS | {"cls_token_id": 1, "sep_token_id": 2},
    "DebertaV2ForSequenceClassification": _BERT,
    "LlamaForSequenceClassification": _BASE | _IDS,
    "Qwen3ForSequenceClassification": _GROUPED | _IDS,
    "GPT2ForSequenceClassification": _GPT
    | dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    "BertForTokenClassification": _BERT,
    "BertForMaskedLM": _BERT,
    "T5ForConditionalGeneration": _T5 | {"pad_token_id": 0, "decoder_start_token_id": 0},
    "BartForConditionalGeneration": _BART,
    "LlamaForCausalLM": _BASE,
    "Qwen3ForCausalLM": _GROUPED,
    "ViTForImageClassification": _BERT | {"image_size": 8, "patch_size": 4},
}


class Measured(NamedTuple):
    """A model in Trainer, of 4 micro-batches of 4 examples, beside its own loss of all 16.

    factor  Trainer's gradient over that of the mean loss of the 16 examples
    loss    the loss that Trainer logs for the step
    """

    factor: float
    loss: float


def trainer_factors(*names: str) -> Table:
    """A row per model class: what Trainer multiplies its accumulated gradient by, and what it logs.

    Each is measured here, on the CPU, with the installed transformers: a tiny random model, 4
    micro-batches of 4 examples, no dropout, no clipping; a tenth of a second for each.

    names  of `MODELS`; all of them unless named
    Raises ValueError for a class that is not in `MODELS`.
    """
    for name in names:
        one_of("model class", name, MODELS)
    rows = []
    for name in names or MODELS:
        plain, told = measured(name), measured(name, accepts_loss_kwargs=False)
        rows.append(
            {
                "model": name,
                "gradient": f"× {plain.factor:.3f}",
                "first logged loss": f"{plain.loss:.2f}",
                "gradient, with the line": f"× {told.factor:.3f}",
                "loss, with the line": f"{told.loss:.2f}",
            }
        )
    return Table(
        rows,
        "Run: Trainer's gradient of 4 micro-batches of 4 examples, over that of 16 at once. "
        "The line is model.accepts_loss_kwargs = False.",
    )


def measured(name: str, accepts_loss_kwargs: bool | None = None) -> Measured:
    """One step of Trainer with the tiny model of a class.

    accepts_loss_kwargs  is set on the model; None leaves the model as it comes
    """
    model, examples = tiny(name), rows_of(name)
    if accepts_loss_kwargs is not None:
        model.accepts_loss_kwargs = accepts_loss_kwargs  # type: ignore[assignment]  # as in models
    return step(model, examples)


def step(model: torch.nn.Module, examples: list[dict[str, Any]]) -> Measured:
    """One step of Trainer over all examples, beside the gradient of one plain backward pass.

    Leaves the model one step of plain gradient descent further.
    """
    batch = batch_of(examples)
    with _few_objects():
        model(**batch).loss.backward()
        whole = _gradient(model)
        model.zero_grad()
        split, loss = _trainers_gradient(model, examples)
    return Measured((split @ whole / (whole @ whole)).item(), loss)


def tiny(name: str) -> torch.nn.Module:
    """A tiny random model of a class of `MODELS`, for texts of 64 tokens or images of 8 × 8."""
    import transformers

    kind = getattr(transformers, name)
    settings = dict(MODELS[name])
    if name.endswith("Classification"):
        settings["num_labels"] = CLASSES
    if "ViT" not in name:
        settings["vocab_size"] = TOKENS
    torch.manual_seed(0)
    return kind(kind.config_class(**settings))


def rows_of(name: str) -> list[dict[str, Any]]:
    """16 random examples for a class of `MODELS`, all equally long, each label counted."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, TOKENS, (EXAMPLES, LENGTH), generator=draw)
    images = torch.randn(EXAMPLES, 3, 8, 8, generator=draw)
    labels: Any = ids if "Classification" not in name else ids % CLASSES
    if "Token" not in name and name.endswith("Classification"):
        labels = [number % CLASSES for number in range(EXAMPLES)]
    column, inputs = ("pixel_values", images) if "ViT" in name else ("input_ids", ids)
    return [{column: row, "labels": label} for row, label in zip(inputs, labels, strict=True)]


def batch_of(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Examples of one shape, stacked: a tensor per column, the examples along its first axis."""
    return {
        name: torch.stack([torch.as_tensor(row[name]) for row in examples]) for name in examples[0]
    }


def _gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _trainers_gradient(
    model: torch.nn.Module, examples: list[dict[str, Any]]
) -> tuple[torch.Tensor, float]:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    seen: list[torch.Tensor] = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.append(_gradient(model))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=EXAMPLES // PARTS,
            gradient_accumulation_steps=PARTS,
            max_steps=1,
            logging_steps=1,
            optim="sgd",
            max_grad_norm=0,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=examples, callbacks=[Look()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return seen[0], trainer.state.log_history[0]["loss"]


@contextmanager
def _few_objects() -> Iterator[None]:
    """Trainer collects garbage at its end, which takes a second where many objects are alive."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
