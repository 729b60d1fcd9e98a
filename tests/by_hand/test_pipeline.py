"""A model cut into stages: on any schedule its loss and gradients are the whole model's."""

import copy
import json

import pytest
import torch

from by_hand.pipeline import clip_gradients, run
from by_hand.pipeline_stage import SHARED, cut
from by_hand.timeline import naive, pipedream
from by_hand.transport import threads
from helpers import models, train
from helpers.recipe import Recipe
from tests.forked import forked
from tests.small import without_dropout
from tight_fit.layouts.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from tight_fit.techniques.step import loss_sum

ROWS = 6


def made(name, **fields):
    """(recipe, model, batch)"""
    length = {"length": 16} if name == "deberta" else {}
    recipe = Recipe(name, batch_size=ROWS, **length, **fields)
    model = without_dropout(models.build(recipe))
    return recipe, model, train.encoded(recipe)["train"].batch(range(ROWS))


@pytest.fixture(scope="module", params=["vit", "deberta"])
def whole(request):
    return made(request.param)


def parts(batch, sizes):
    values = zip(*(value.split(sizes) for value in batch.values()))
    return [dict(zip(batch, part)) for part in values]


def of_the_whole(recipe, model, batches):
    """(loss, {name: gradient} of what trains)"""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    loss = sum(loss_sum(model, batch, recipe) for batch in batches) / ROWS
    return loss.item(), dict(zip(trained, torch.autograd.grad(loss, list(trained.values()))))


def played(model, schedule, batches, **settings):
    """(stages, results of the ranks, transports): the schedule, by threads on a model's copy."""
    stages = cut(copy.deepcopy(model), schedule.stages)

    def work(transport):
        own = stages[transport.rank :: schedule.ranks]
        return run(schedule, own, transport, batches, **settings)

    return stages, *threads(schedule.ranks, work)


def check(stages, gradients, near=1e-4):
    names = {name for stage in stages for name, _ in stage.named_parameters()}
    assert names >= gradients.keys()
    for stage in stages:
        for name, value in stage.named_parameters():
            assert (value.grad is not None) == (name in gradients), name
            if name in gradients:
                gap = (value.grad - gradients[name]).norm()
                assert gap < near * gradients[name].norm() + 1e-6, f"{name} of {stage.index}"


@pytest.mark.parametrize(
    "schedule, sizes",
    [(naive(1, 1), [6]), (naive(3, 3), [1, 2, 3]), (gpipe(4, 4), [2, 1, 1, 2]),
     (one_f_one_b(1, 2), [1, 5]), (one_f_one_b(4, 4), [2, 1, 1, 2]),
     (zero_bubble(3, 3), [1, 2, 3]), (interleaved(1, 2), [1, 5]),
     (interleaved(2, 4), [2, 1, 1, 2])],
)  # fmt: skip
def test_loss_and_gradients_are_the_whole_models(whole, schedule, sizes):
    recipe, model, batch = whole
    loss, gradients = of_the_whole(recipe, model, [batch])
    stages, steps, _ = played(model, schedule, parts(batch, sizes))
    assert sum(steps[-1].losses).item() == pytest.approx(loss, abs=1e-5)
    check(stages, gradients)


@pytest.mark.parametrize(
    "name, fields, make",
    [("vit", {"frozen": 2}, one_f_one_b), ("vit", {"frozen": 2}, zero_bubble),
     ("deberta", {"frozen": 0}, zero_bubble), ("deberta", {"lora_rank": 2}, one_f_one_b),
     ("vit", {"checkpointing": True}, zero_bubble), ("deberta", {"precision": "bf16"}, one_f_one_b),
     ("deberta", {}, one_f_one_b)],
)  # fmt: skip
def test_so_they_are_of_other_recipes_and_of_micro_batches_of_other_lengths(name, fields, make):
    recipe, model, batch = made(name, **fields)
    short, rest = parts(batch, [2, 4])
    short = {name: value[:, :9] if value.dim() == 2 else value for name, value in short.items()}
    loss, gradients = of_the_whole(recipe, model, [short, rest])
    stages, steps, _ = played(model, make(2, 2), [short, rest], recipe=recipe)
    assert sum(steps[-1].losses).item() == pytest.approx(loss, abs=1e-5)
    check(stages, gradients, 2e-2 if recipe.precision == "bf16" else 1e-4)  # of three digits


def test_what_travels(whole):
    """Hidden states there and back in fp32, a byte per token for the mask, and shared gradients
    around a ring."""
    _, model, batch = whole
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
    _, model, batch = whole
    held = {}
    for make in (naive, gpipe, one_f_one_b):
        _, steps, _ = played(model, make(2, ROWS), parts(batch, [1] * ROWS), weigh=True)
        held[make] = [step.held[rank] for rank, step in enumerate(steps)]
    first, second = held[naive]
    assert min(first, second) > 0
    assert held[gpipe] == [ROWS * first, ROWS * second]
    assert held[one_f_one_b] == [2 * first, second]


def test_the_norm_is_that_of_the_whole_model(whole):
    recipe, model, batch = whole
    _, gradients = of_the_whole(recipe, model, [batch])
    norm = torch.stack([value.norm() for value in gradients.values()]).norm().item()
    schedule, stages = gpipe(3, 2), cut(copy.deepcopy(model), 3)

    def work(transport):
        run(schedule, [stages[transport.rank]], transport, parts(batch, [3, 3]))
        return clip_gradients([stages[transport.rank]], transport, norm / 2)

    assert threads(3, work)[0] == pytest.approx([norm] * 3, rel=1e-4)
    check(stages, {name: value / 2 for name, value in gradients.items()}, 1e-3)


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
        assert words is model.deberta.embeddings.word_embeddings.weight, "no copy"


def test_what_does_not_fit_is_refused():
    _, model, batch = made("vit")
    other, twos = torch.nn.Linear(2, 2), parts(batch, [3, 3])
    for call, error, message in (
        (lambda: cut(model, 0), ValueError, "stages=0 must be at least 1"),
        (lambda: cut(model, 5), ValueError, "stages=5 is more than the 4 layers"),
        (lambda: cut(model, True), TypeError, "whole number"),
        (lambda: cut(other, 1), ValueError, "only DeBERTa and ViT"),
        (lambda: played(model, gpipe(2, 3), twos), ValueError, "3 micro-batches, not for 2 and 2"),
        (lambda: played(model, pipedream(2, 2), twos), ValueError, "changes weights on the way"),
        (lambda: threads(2, lambda one: run(gpipe(2, 2), cut(model, 4)[:1], one, twos)),
         ValueError, "Rank [01] needs the stages .[01]. of 2"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_on_real_processes_the_gradients_are_the_whole_models_by_hand_and_by_torch():
    for text in forked("tests/ranks/pipeline.py", ranks=2):
        for name, (gradients, loss) in json.loads(text).items():
            assert gradients < 1e-5 and loss < 1e-5, name
