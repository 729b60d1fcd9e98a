"""The same step asked in two ways, of the command by options and as a program, is the same plan."""

import json

import pytest
import transformers as library

from tests.script import run
from tests.small import configured
from tight_fit import gpus
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import ADAMW
from tight_fit.plans.model import plan_model_step

# A plain training loop of one's own: AdamW as its last argument but one says.
PROGRAM = """\
import json, sys
import torch
import torch.nn.functional as F
import transformers
folder, kind, how, weights = sys.argv[1:]
config = transformers.AutoConfig.from_pretrained(folder)
config.use_cache = False
model = getattr(transformers, kind)(config).to(getattr(torch, weights)).to("cuda").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, **json.loads(how))
def batch_of(examples=4, tokens=32):
    if hasattr(config, "image_size"):
        pixels = torch.randn(examples, 3, config.image_size, config.image_size)
        return {"pixel_values": pixels}, torch.randint(config.num_labels, (examples,))
    ids = torch.randint(config.vocab_size, (examples, tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind.startswith("T5"):
        batch["decoder_input_ids"] = torch.randint(config.vocab_size, (examples, tokens))
    return batch, torch.randint(2, (examples * tokens,))
def step():
    batch, labels = batch_of()
    batch = {name: value.to("cuda") for name, value in batch.items()}
    labels = labels.to("cuda")
    logits = model(**batch).logits.flatten(0, -2)
    if logits.dtype != torch.float32:
        logits = logits.float()
    loss = F.cross_entropy(logits, labels, reduction="sum") / 4
    loss.backward()
    total = 0.0 + loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
for number in range(3):
    step()
"""
HOW = {
    "adamw": {"fused": True},
    "adamw_foreach": {},  # PyTorch's default on a GPU
    "adamw_forloop": {"foreach": False},
}
LLAMA = configured(library.LlamaConfig, 64, 3, 4, 128, 512, num_key_value_heads=2)
T5 = library.T5Config(vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
VIT = library.ViTConfig(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
    image_size=32, patch_size=8,
)  # fmt: skip
CASES = [
    ("LlamaForCausalLM", LLAMA, "causal-lm", "adamw_foreach", "bf16"),
    ("T5ForConditionalGeneration", T5, "seq2seq-lm", "adamw", "fp32"),
    ("ViTForImageClassification", VIT, "image-classification", "adamw_forloop", "fp32"),
]


@pytest.mark.parametrize("kind, config, task, optimizer, weights", CASES)
def test_options_and_a_program_give_the_same_bytes(
    kind, config, task, optimizer, weights, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    config.architectures = [kind]
    config.save_pretrained("model")
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[weights]
    how = json.dumps(HOW[optimizer])
    facts = run("train.py", "model", kind, how, dtype, gpu="A100", steps=3)
    length = None if config is VIT else 32
    step = ModelStep(config, 4, length, optimizer=optimizer, weights=weights, task=task)
    planned = plan_model_step(step)
    # A plan by options counts what PyTorch allocates, blocks of 512 bytes; so does `allocated`.
    assert facts["peak_phase"] == planned.peak_phase
    assert facts["allocated"] == planned.allocator_peaks(gpus.find("A100")).allocated


def test_all_kinds_of_adamw_are_tried():
    assert set(HOW) == set(ADAMW) == {case[3] for case in CASES}
