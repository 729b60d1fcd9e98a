"""The lines to paste of lessons 01 to 06 run, on tiny models, and do what the page says."""

import ast
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

from by_hand.trainer_factors import tiny
from helpers import models
from helpers.recipe import Recipe
from tests.lessons.cells import markdown_of

TOKENS, LABELS = torch.arange(48).view(4, 12) + 5, torch.arange(4) % 2


def blocks(number):
    return re.findall(r"```python\n(.*?)```", markdown_of(number), re.DOTALL)


def pasted(number, *changes, **given):
    """Run the lines of the first screen where `given` names are defined; all names after."""
    text = blocks(number)[0]
    for old, new in changes:
        assert text.count(old) == 1, f"lesson {number} has no {old!r}"
        text = text.replace(old, new)
    exec(text, given)
    return given


def classifier(layers=2):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    positions = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    config = DebertaV2Config(
        vocab_size=100, num_hidden_layers=layers, norm_rel_ebd="layer_norm", **sizes, **positions
    )
    return DebertaV2ForSequenceClassification(config).eval()  # without dropout


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


class Step:
    """In place of an optimizer: keeps the gradients that its step would take, and clears them."""

    def __init__(self, model):
        self.model, self.taken = model, []

    def step(self):
        self.taken.append(gradients(self.model))

    def zero_grad(self):
        self.model.zero_grad()


def test_01_prints_the_new_head_and_nothing_else(capsys):
    name = str(models.source(Recipe("vit")))
    pasted("01", ("google/vit-base-patch16-224-in21k", name))
    new = sorted(ast.literal_eval(capsys.readouterr().out))
    assert new == ["classifier.bias", "classifier.weight"]


def test_02_takes_the_gradient_of_the_whole_batch():
    torch.manual_seed(0)
    model, inputs, labels = nn.Linear(8, 3), torch.randn(10, 8), torch.arange(10) % 3
    F.cross_entropy(model(inputs), labels).backward()
    whole, optimizer = gradients(model), Step(model)
    model.zero_grad()
    parts = list(zip(inputs.split(4), labels.split(4)))
    pasted("02", model=model, optimizer=optimizer, size=10, micro_batches=parts)
    torch.testing.assert_close(optimizer.taken, [whole])


def test_02_takes_the_gradient_of_all_labelled_tokens_of_a_language_model():
    model = tiny("LlamaForCausalLM").double()
    batch = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
    batch["labels"] = TOKENS.clone()
    batch["labels"][0, :7] = batch["labels"][3] = -100
    model(**batch).loss.backward()
    whole, optimizer = gradients(model), Step(model)
    model.zero_grad()
    parts = [{key: value[rows] for key, value in batch.items()} for rows in ([0, 1, 2], [3])]
    exec(blocks("02")[1], {"model": model, "optimizer": optimizer, "micro_batches": parts})
    torch.testing.assert_close(optimizer.taken, [whole])


def test_03_ends_the_backward_pass_above_the_frozen_layers():
    model = classifier(layers=8)
    names = pasted("03", model=model)
    states = model(TOKENS, output_hidden_states=True).hidden_states
    assert [state.requires_grad for state in states] == [False] * 7 + [True] * 2
    held = names["optimizer"].param_groups[0]["params"]
    assert {id(p) for p in held} == {id(p) for p in model.parameters() if p.requires_grad}


def test_04_trains_weights_that_stay_fp32():
    model = classifier()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = {"input_ids": TOKENS, "labels": LABELS}
    pasted("04", ('"cuda"', '"cpu"'), model=model, optimizer=optimizer, batch=batch)
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())
    assert not all(map(torch.equal, start, model.parameters()))


def test_05_keeps_32_bits_for_embeddings_alone():
    pytest.importorskip("bitsandbytes")
    model = classifier()
    names = pasted("05", model=model)
    model(input_ids=TOKENS, labels=LABELS).loss.backward()
    names["optimizer"].step()
    names["manager"].initialize()
    state = names["optimizer"].state
    words, dense = model.deberta.embeddings.word_embeddings, model.deberta.encoder.layer[0]
    assert state[words.weight]["state1"].dtype == torch.float32 and words.weight.numel() >= 4096
    assert state[dense.output.dense.weight]["state1"].dtype == torch.uint8


def kept_and_gradients(model):
    """The bytes that a forward pass keeps, and the gradients of its backward pass."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = model(input_ids=TOKENS, labels=LABELS).loss
    loss.backward()
    return sum(tensor.nbytes for tensor in saved), gradients(model)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_06_gives_the_same_gradients_and_keeps_less():
    plain, lean = classifier(), classifier().train()  # checkpoints are for training
    for part in lean.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    layer = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    assert pasted("06", model=lean, layer=layer, x=torch.ones(1, 4))["x"].requires_grad
    (kept, right), (less, same) = kept_and_gradients(plain), kept_and_gradients(lean)
    torch.testing.assert_close(same, right)
    assert less < 0.7 * kept
