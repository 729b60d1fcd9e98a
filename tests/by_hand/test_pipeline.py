"""A model cut into stages: on any schedule its loss and gradients are the whole model's."""

import copy
import json
from pathlib import Path

import pytest
import torch

from by_hand.pipeline import clip_gradients, run
from by_hand.pipeline_stage import SHARED, cut
from by_hand.transport import threads
from helpers import models, train
from helpers.recipe import Recipe
from tests.forked import forked
from tests.small import without_dropout
from tight_fit.layouts.schedules import (
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    zero_bubble,
)
from tight_fit.techniques.step import loss_sum

ROWS = 6
SCRIPT = Path(__file__).parents[1] / "ranks" / "pipeline.py"


@pytest.fixture(scope="module", params=["vit", "deberta"])
def whole(request):
    """(model without gradients, batch, loss, {name: gradient})"""
    length = {"length": 16} if request.param == "deberta" else {}
    recipe = Recipe(request.param, batch_size=ROWS, **length)
    model = without_dropout(models.build(recipe))
    batch = train.encoded(recipe)["train"].batch(range(ROWS))
    loss = loss_sum(model, batch, recipe) / ROWS
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return model, batch, loss.item(), gradients


def parts(batch, sizes):
    return [
        dict(zip(batch, values))
        for values in zip(*(value.split(sizes) for value in batch.values()))
    ]


def played(model, schedule, batches, **settings):
    """(stages, results of the ranks, transports): the schedule, by threads on a model's copy."""
    stages = cut(copy.deepcopy(model), schedule.stages)
    steps, transports = threads(
        schedule.ranks,
        lambda transport: run(
            schedule, stages[transport.rank :: schedule.ranks], transport, batches, **settings
        ),
    )
    return stages, steps, transports


def check(stages, steps, loss, gradients):
    assert sum(steps[-1].losses).item() == pytest.approx(loss, abs=1e-5)
    assert {name for stage in stages for name, _ in stage.named_parameters()} == set(gradients)
    for stage in stages:
        for name, value in stage.named_parameters():
            assert torch.allclose(value.grad, gradients[name], rtol=1e-4, atol=1e-6), (
                f"{name} of stage {stage.index}"
            )


@pytest.mark.parametrize(
    "make, ranks, sizes",
    [(naive, 1, [6]), (naive, 3, [1, 2, 3]), (gpipe, 2, [1, 2, 3]), (gpipe, 4, [2, 1, 1, 2]),
     (one_f_one_b, 1, [1, 5]), (one_f_one_b, 2, [3, 3]), (one_f_one_b, 4, [2, 1, 1, 2]),
     (zero_bubble, 2, [1, 2, 3]), (zero_bubble, 3, [1, 2, 3]), (zero_bubble, 4, [6]),
     (interleaved, 1, [1, 5]), (interleaved, 2, [3, 3]), (interleaved, 2, [2, 1, 1, 2])],
)  # fmt: skip
def test_loss_and_gradients_are_the_whole_models(whole, make, ranks, sizes):
    model, batch, loss, gradients = whole
    stages, steps, _ = played(model, make(ranks, len(sizes)), parts(batch, sizes))
    check(stages, steps, loss, gradients)


def test_micro_batches_of_other_lengths_travel_too():
    recipe = Recipe("deberta", batch_size=ROWS, length=16)
    model = without_dropout(models.build(recipe))
    short, whole = parts(train.encoded(recipe)["train"].batch(range(ROWS)), [2, 4])
    short = {name: value[:, :9] if value.dim() == 2 else value for name, value in short.items()}
    loss = sum(loss_sum(model, one, recipe) for one in (short, whole)) / ROWS
    names = [name for name, _ in model.named_parameters()]
    gradients = dict(zip(names, torch.autograd.grad(loss, list(model.parameters()))))
    stages, steps, _ = played(model, one_f_one_b(2, 2), [short, whole])
    check(stages, steps, loss.item(), gradients)


def test_what_travels(whole):
    """Hidden states there and back in fp32, a byte per token for the mask, and shared gradients
    around a ring."""
    model, batch, _, _ = whole
    _, _, transports = played(model, one_f_one_b(2, 3), parts(batch, [2, 2, 2]))
    text = "input_ids" in batch
    tokens = ROWS * (16 if text else 17)
    hidden = 4 * tokens * model.config.hidden_size
    named = model.named_parameters()
    shared = 4 * sum(value.numel() for name, value in named if name.startswith(SHARED))
    assert (shared > 0) == text
    assert transports[1].bytes_sent == hidden + shared
    assert transports[0].bytes_sent == hidden + shared + text * tokens


def test_bytes_of_activations_held(whole):
    model, batch, _, _ = whole
    batches = parts(batch, [1] * ROWS)
    held = {}
    for make in (naive, gpipe, one_f_one_b):
        _, steps, _ = played(model, make(2, ROWS), batches, weigh=True)
        held[make] = [step.held[rank] for rank, step in enumerate(steps)]
    each = held[naive]
    assert min(each) > 0
    assert held[gpipe] == [ROWS * one for one in each]
    assert held[one_f_one_b] == [2 * each[0], each[1]]


def test_the_norm_is_that_of_the_whole_model(whole):
    model, batch, _, gradients = whole
    norm = torch.stack([value.norm() for value in gradients.values()]).norm().item()
    schedule, stages = gpipe(3, 2), cut(copy.deepcopy(model), 3)

    def work(transport):
        run(schedule, [stages[transport.rank]], transport, parts(batch, [3, 3]))
        return clip_gradients([stages[transport.rank]], transport, norm / 2)

    norms, _ = threads(3, work)
    assert norms == pytest.approx([norm] * 3, rel=1e-4)
    for stage in stages:
        for name, value in stage.named_parameters():
            assert torch.allclose(value.grad, gradients[name] / 2, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("schedule", [one_f_one_b(2, 2), zero_bubble(2, 2)])
@pytest.mark.parametrize(
    "name, fields",
    [("vit", {"frozen": 2}), ("deberta", {"frozen": 0}), ("deberta", {"lora_rank": 2}),
     ("vit", {"checkpointing": True}), ("deberta", {"precision": "bf16"})],
)  # fmt: skip
def test_other_recipes(name, fields, schedule):
    length = {"length": 16} if name == "deberta" else {}
    recipe = Recipe(name, batch_size=ROWS, **fields, **length)
    model = without_dropout(models.build(recipe))
    batch = train.encoded(recipe)["train"].batch(range(ROWS))
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    loss = sum(loss_sum(model, one, recipe) for one in parts(batch, [3, 3])) / ROWS
    gradients = dict(zip(trained, torch.autograd.grad(loss, list(trained.values()))))
    stages, steps, _ = played(model, schedule, parts(batch, [3, 3]), recipe=recipe)
    assert sum(steps[-1].losses).item() == pytest.approx(loss.item(), abs=1e-5)
    near = 2e-2 if recipe.precision == "bf16" else 1e-4  # roundings of three digits
    for stage in stages:
        for key, value in stage.named_parameters():
            assert (value.grad is not None) == (key in trained), key
            if value.grad is not None:
                gap = (value.grad - gradients[key]).norm()
                assert gap < near * gradients[key].norm() + 1e-6, key


def test_stages_are_balanced_and_keep_the_models_names():
    model = models.build(Recipe("deberta"))
    names = {name for name, _ in model.named_parameters()}
    shared = sum(name.startswith(SHARED) for name in names)
    for count, layers in ((1, [4]), (2, [2, 2]), (3, [1, 1, 2]), (4, [1, 1, 1, 1])):
        stages = cut(model, count)
        assert [len(stage.layers) for stage in stages] == layers
        assert [stage.first for stage in stages] == [True] + [False] * (count - 1)
        kept = [name for stage in stages for name, _ in stage.named_parameters()]
        assert set(kept) == names and len(kept) == len(names) + (count - 1) * shared
        words = stages[0].get_parameter("deberta.embeddings.word_embeddings.weight")
        assert words is model.deberta.embeddings.word_embeddings.weight
        assert hasattr(stages[-1], "classifier") and stages[0].training


def test_what_does_not_fit_is_refused():
    recipe = Recipe("vit", batch_size=4)
    model, batch = models.build(recipe), train.encoded(recipe)["train"].batch(range(4))
    for stages, error, message in (
        (0, ValueError, "stages=0 must be at least 1"),
        (5, ValueError, "stages=5 is more than the 4 layers"),
        (True, TypeError, "whole number"),
        ("2", TypeError, "whole number"),
    ):
        with pytest.raises(error, match=message):
            cut(model, stages)
    with pytest.raises(ValueError, match="only DeBERTa and ViT"):
        cut(torch.nn.Linear(2, 2), 1)
    with pytest.raises(ValueError, match="for 2 ranks and 2 micro-batches, not for 2 and 4"):
        played(model, gpipe(2, 2), parts(batch, [1, 1, 1, 1]))
    with pytest.raises(ValueError, match="changes weights on the way"):
        played(model, pipedream(2, 2), parts(batch, [2, 2]))
    with pytest.raises(ValueError, match="Rank [01] needs the stages .[01]. of 2"):
        threads(2, lambda transport: run(gpipe(2, 1), cut(model, 4)[:1], transport, [batch]))


def test_on_real_processes_the_gradients_are_the_whole_models_by_hand_and_by_torch():
    for text in forked(SCRIPT, ranks=2):
        for name, (gradients, loss) in json.loads(text).items():
            assert gradients < 1e-5 and loss < 1e-5, name
