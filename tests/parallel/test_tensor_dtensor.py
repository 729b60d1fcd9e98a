"""The course's models split by DTensor: logits, gradients, a step and the collectives.

On real ranks, and on none.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers import models
from helpers.parallel.tensor_dtensor import Collectives, regroup, split
from helpers.plan.planner import fake_batch
from helpers.recipe import Recipe
from tests.forked import forked
from tight_fit.layouts.clipping import clip_
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import loss_sum
from tight_fit.torch_private import FakeTensorMode

SCRIPT = Path(__file__).parents[1] / "ranks" / "split.py"
WAYS = [{}, {"sequence": True}]
VOCABULARY = [{"vocabulary": True}, {"sequence": True, "vocabulary": True}]
CASES = [("vit", "adamw", 1, ways) for ways in WAYS] + [
    ("deberta", "adamw", 1, ways) for ways in WAYS + VOCABULARY
]
CASES += [("vit", "sgd", 2, {"sequence": True}), ("deberta", "sgd", 2, VOCABULARY[1])]


@pytest.fixture(scope="module")
def ranks():
    return [json.loads(text) for text in forked(SCRIPT, json.dumps(CASES), ranks=2)]


@pytest.mark.parametrize("model, optimizer, accumulation, ways", CASES)
def test_logits_gradients_norm_and_a_step_are_the_whole_models(
    ranks, model, optimizer, accumulation, ways
):
    """fp32: logits within 1e-5, each gradient within 1e-5 of the largest.

    AdamW turns rounding of gradients near zero into a part of its learning rate, so weights after
    its step are within that; after SGD's within rounding.
    """
    for measured in (rank[f"{model} {optimizer} {accumulation} {sorted(ways)}"] for rank in ranks):
        assert (
            measured["logits"] < 1e-5 and measured["gradients"] < 1e-5 and measured["missing"] == []
        )
        assert measured["norm"] < 1e-4 and measured["placed"] and measured["bytes"]
        assert measured["weights"] < (
            1e-6 if optimizer == "sgd" else 2 * Recipe(model, profile="mini").peak_learning_rate
        )


def test_two_all_reduces_a_layer_each_way(ranks):
    measured = {name: value for name, value in ranks[0].items() if name != "masks"}
    for model, more in (
        ("vit", 0),
        ("deberta", 1),
    ):  # one more for the gradient of the relative embeddings
        plain = measured[f"{model} adamw 1 []"]
        assert plain["forward"] == {"all_reduce": 2 * plain["layers"]}
        assert plain["backward"] == {"all_reduce": 2 * plain["layers"] + more}
        cut = measured[f"{model} adamw 1 ['sequence']"]
        halves = {
            "all_gather_into_tensor": 2 * cut["layers"] + 1,
            "reduce_scatter_tensor": 2 * cut["layers"],
        }
        assert cut["forward"] == halves
        assert cut["backward"] == halves | {
            "all_reduce": 4 * cut["layers"] + more
        }  # small: LayerNorm's weight and bias
    assert measured["deberta adamw 1 ['vocabulary']"]["forward"] == {
        "all_reduce": 2 * plain["layers"] + 1
    }
    assert measured["deberta adamw 1 ['vocabulary']"]["backward"] == {
        "all_reduce": 2 * plain["layers"] + 1
    }


@pytest.mark.parametrize("ways", WAYS)
def test_dropout_is_alike_outside_the_pairs_and_apart_inside(ranks, ways):
    one, other = (rank["masks"][str(ways)] for rank in ranks)
    assert one["next"] == other["next"], "the ranks left the passes with one state"
    assert ways or one["loss"] == other["loss"]
    assert one["sums"] == other["sums"], "the relative embeddings' gradient is whole on both"
    assert ways or one["backward"] == {"all_reduce": 2 * 4 + 1}, "their dropout sends nothing"
    apart = [
        name
        for (name, _, zeros), (_, _, others) in zip(one["seen"], other["seen"])
        if zeros != others
    ]
    inside = ["deberta.encoder.layer.0.attention.self.dropout"]
    sliced = [f"deberta.encoder.layer.0.{part}.dropout" for part in ("attention.output", "output")]
    assert set(apart) == set(inside + (sliced if ways else []))
    fractions = [fraction for name, fraction, _ in one["seen"] if name in sliced]
    assert fractions and all(0.05 < fraction < 0.15 for fraction in fractions)


@pytest.fixture
def nobody():
    """Eight ranks of which only the first is there."""

    def mesh(n, shape=None):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
        return init_device_mesh("cpu", shape or (n,))

    yield mesh
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("n", [1, 4, 12])
@pytest.mark.parametrize(
    "model, ways",
    [("vit", {}), ("vit", {"sequence": True}), ("deberta", {}), ("deberta", VOCABULARY[1])],
)
def test_full_models_without_values_and_without_ranks(nobody, model, ways, n):
    mesh, recipe = nobody(n), Recipe(model, profile="full", batch_size=2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        cut = split(models.empty(recipe), mesh, **ways)
        optimizer = regroup(make_optimizer(cut, recipe))
        with Collectives() as seen:
            loss_sum(cut, fake_batch(cut, recipe), recipe).backward()
        clip_(cut.parameters(), 1.0)
        optimizer.step()
    layer = (cut.vit.layers if model == "vit" else cut.deberta.encoder.layer)[0]
    matrices = [
        p for name, p in layer.named_parameters() if name.endswith("weight") and p.ndim == 2
    ]
    assert len(matrices) == 6 and all(p.to_local().numel() * n == p.numel() for p in matrices)
    assert n == 1 or seen.counts("forward")["reduce_scatter_tensor" if ways else "all_reduce"] == 24
    if model == "deberta" and ways:
        assert cut.deberta.embeddings.word_embeddings.weight.to_local().shape[0] == -(-128100 // n)


def test_refusals(nobody):
    def mini(**fields):
        return models.build(
            Recipe(fields.pop("model", "vit"), profile="mini", batch_size=4, **fields)
        )

    with pytest.raises(ValueError, match="4 attention heads cannot be divided by 3 ranks"):
        split(mini(), nobody(3))
    mesh, model = nobody(2), mini()
    model.config.intermediate_size = 383
    with pytest.raises(ValueError, match="383 intermediate_size cannot be divided by 2 ranks"):
        split(model, mesh)
    with pytest.raises(
        ValueError, match="Adapters cannot be split: use a recipe with lora_rank=None"
    ):
        split(mini(lora_rank=2), mesh)
    with pytest.raises(
        ValueError, match="Only the course's ViT and DeBERTa classifiers can be split, not Linear"
    ):
        split(torch.nn.Linear(2, 2), mesh)
    with pytest.raises(ValueError, match="set attention_probs_dropout_prob=0"):
        model = mini()
        model.config.attention_probs_dropout_prob = 0.1
        split(model, mesh)
    with pytest.raises(ValueError, match="Only DeBERTa-v3's relative attention"):
        model = mini(model="deberta")
        model.config.share_att_key = False
        split(model, mesh)
    model = split(mini(), mesh)
    assert isinstance(model.vit.layers[0].mlp.fc1.weight, DTensor)
    with pytest.raises(ValueError, match="The model is split already"):
        split(model, mesh)
    with pytest.raises(
        ValueError, match="Adafactor cannot step a split model: use optimizer='adamw' or 'sgd'"
    ):
        regroup(torch.optim.Adafactor(model.parameters()))
    with pytest.raises(ValueError, match="A mesh of 2 dimensions was given"):
        split(mini(), nobody(4, (2, 2)))
