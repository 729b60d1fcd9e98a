"""Muon: its update is PyTorch's, which weights it takes, and that the rest is AdamW's."""

import copy

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from helpers import models
from helpers.recipe import Recipe
from tests.small import configured
from tight_fit.techniques.muon import MuonWithAdamW, hidden_matrices
from tight_fit.techniques.optimizers import make_optimizer


def weights_with_gradients(shapes):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return weights


def test_both_parts_are_pytorchs_own_to_the_bit():
    matrices, rest = (
        weights_with_gradients([(8, 16), (16, 8)]),
        weights_with_gradients([(8,), (4, 2)]),
    )
    others = copy.deepcopy(matrices), copy.deepcopy(rest)
    for mine, theirs in zip(matrices + rest, others[0] + others[1]):
        theirs.grad = mine.grad.clone()
    ours = MuonWithAdamW(matrices, rest, lr=0.02, weight_decay=0.1)
    parts = (
        torch.optim.Muon(others[0], 0.02, 0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others[1], 0.02, weight_decay=0.1, fused=True),
    )
    for _ in range(3):
        ours.step()
        for part in parts:
            part.step()
    for mine, theirs in zip(matrices + rest, others[0] + others[1]):
        assert torch.equal(mine, theirs)
    assert [set(ours.state[each]) for each in matrices] == [{"momentum_buffer"}] * 2


def test_the_learning_rate_of_a_schedule_reaches_both_parts():
    matrices, rest = weights_with_gradients([(8, 16)]), weights_with_gradients([(8,)])
    optimizer = MuonWithAdamW(matrices, rest, lr=0.02, weight_decay=0.1)
    before = [each.detach().clone() for each in (*matrices, *rest)]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, (*matrices, *rest)))


def left_to_adamw(net):
    trained = [each for each in net.parameters() if each.requires_grad]
    hidden = {id(each) for each in hidden_matrices(net, trained)}
    return {
        name
        for name, each in net.named_parameters()
        if each.requires_grad and each.ndim > 1 and id(each) not in hidden
    }


@pytest.mark.parametrize(
    "fields, left",
    (
        ({"model": "decoder"}, {"model.embed_tokens.weight"}),  # which is its output layer too
        ({"model": "decoder", "lora_rank": 4}, set()),
        ({"model": "deberta", "lora_rank": 4}, {"pooler.dense.weight", "classifier.weight"}),
        (
            {"model": "vit"},
            {
                "classifier.weight",
                "vit.embeddings.cls_token",
                "vit.embeddings.position_embeddings",
                "vit.embeddings.patch_embeddings.projection.weight",
            },
        ),
    ),
    ids=str,
)
def test_embeddings_and_heads_are_left_to_adamw(fields, left):
    assert left_to_adamw(models.build(Recipe(batch_size=4, train_size=64, **fields))) == left


def test_an_output_layer_of_its_own_and_stacked_experts_are_left_to_adamw():
    """Muon is for matrices, and experts of one layer are one tensor of three dimensions."""
    config = configured(MixtralConfig, 16, 1, 2, 32, 64, num_key_value_heads=2, num_local_experts=4)
    left = left_to_adamw(MixtralForCausalLM(config))
    experts = "model.layers.0.mlp.experts."
    assert left == {
        "lm_head.weight",
        "model.embed_tokens.weight",
        f"{experts}gate_up_proj",
        f"{experts}down_proj",
    }


def test_a_model_without_hidden_matrices_is_adamws_alone():
    net = nn.Embedding(8, 4)
    wanted = Recipe("vit", batch_size=4, train_size=64, optimizer="muon")
    optimizer = make_optimizer(net, wanted)
    assert [type(part) for part in optimizer.parts] == [torch.optim.AdamW]
