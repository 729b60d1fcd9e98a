"""The same step asked in two ways, of the command by options and as a program, is the same plan."""

import json

import pytest
import transformers as library

from tests.script import run
from tight_fit import gpus
from tight_fit.models.config import named_task
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import ADAMW
from tight_fit.plans.model import plan_model_step

# A plain training loop of one's own: AdamW as it comes, or as its last argument says.
PROGRAM = """\
import json, sys
import torch
import torch.nn.functional as F
import transformers
folder, kind, how, weights = sys.argv[1:]
config = transformers.AutoConfig.from_pretrained(folder)
config.use_cache, config.problem_type = False, "single_label_classification"
model = getattr(transformers, kind)(config).to(getattr(torch, weights)).to("cuda").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, **json.loads(how))
def batch_of(examples=4, tokens=32):
    if hasattr(config, "image_size"):
        pixels = torch.randn(examples, 3, config.image_size, config.image_size)
        labels = torch.randint(config.num_labels, (examples,))
        return {"pixel_values": pixels, "labels": labels}
    ids = torch.randint(config.vocab_size, (examples, tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind.startswith("T5"):
        batch["decoder_input_ids"] = torch.randint(config.vocab_size, (examples, tokens))
    each = not kind.endswith("SequenceClassification")
    labels = torch.randint(2, (examples * tokens if each else examples,))
    return batch | {"labels": labels}
def loss_of(batch):
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.flatten(0, -2)
    if logits.dtype != torch.float32:
        logits = logits.float()
    return F.cross_entropy(logits, batch["labels"], reduction="sum") / 4
def step():
    batch = {name: value.to("cuda") for name, value in batch_of().items()}
    loss = loss_of(batch)
    loss.backward()
    total = 0.0 + loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
for number in range(3):
    step()
"""
SIZES = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "LlamaForCausalLM": library.LlamaConfig(**SIZES, num_key_value_heads=2),
    "DebertaV2ForTokenClassification": library.DebertaV2Config(
        **SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16
    ),
    "T5ForConditionalGeneration": library.T5Config(
        vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    ),
    "ViTForImageClassification": library.ViTConfig(
        **{name: SIZES[name] for name in list(SIZES)[1:5]}, image_size=32, patch_size=8
    ),
}
HOW = {
    "adamw": {"fused": True},
    "adamw_foreach": {},  # PyTorch's default on a GPU
    "adamw_forloop": {"foreach": False},
}


def both(kind: str, optimizer: str, weights: str, path, folder):
    """(facts of the program, the plan by options)."""
    config = MODELS[kind]
    config.architectures = [kind]
    config.save_pretrained(folder)
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[weights]
    facts = run(path, str(folder), kind, json.dumps(HOW[optimizer]), dtype, gpu="A100", steps=3)
    length = {} if kind.startswith("ViT") else {"length": 32}
    fields = {"optimizer": optimizer, "weights": weights, "task": named_task(config)}
    step = ModelStep(config, 4, **fields, **length)
    return facts, plan_model_step(step)


CASES = [
    ("LlamaForCausalLM", "adamw_foreach", "bf16"),
    ("LlamaForCausalLM", "adamw_forloop", "fp32"),
    ("DebertaV2ForTokenClassification", "adamw_foreach", "fp32"),
    ("T5ForConditionalGeneration", "adamw", "fp32"),
    ("ViTForImageClassification", "adamw_foreach", "fp32"),
]
# DeBERTa makes three numbers a layer on the host, and keeps them for the backward pass. A plan by
# options counts them, in a block of 512 bytes each, as if they were on the GPU.
BESIDE = {"DebertaV2ForTokenClassification": 3 * 3 * 512}


@pytest.mark.parametrize("kind, optimizer, weights", CASES)
def test_options_and_a_program_give_the_same_bytes(kind, optimizer, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    facts, planned = both(kind, optimizer, weights, "train.py", tmp_path / "model")
    card = gpus.find("A100")
    # A plan by options counts what PyTorch allocates, blocks of 512 bytes; so does `allocated`.
    assert facts["peak_phase"] == planned.peak_phase
    assert facts["allocated"] == planned.allocator_peaks(card).allocated - BESIDE.get(kind, 0)


def test_all_kinds_of_adamw_are_tried():
    assert set(HOW) == set(ADAMW) == {name for _, name, _ in CASES}
