"""ZeRO by hand, and torch's and DeepSpeed's: the unsharded run's weights, the formula's bytes."""

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from by_hand.transport import threads
from by_hand.zero import Zero, sent_bytes, states_bytes
from helpers.recipe import Recipe
from tests.forked import forked

RANKS, STAGES = st.integers(1, 8), st.sampled_from([0, 1, 2, 3])
SCRIPT = Path(__file__).parents[1] / "ranks" / "fsdp.py"


def model(width: int, dtype: torch.dtype) -> list[nn.Module]:
    """Three units: an embedding, a layer, a head; their sizes are seldom divided by the ranks."""
    torch.manual_seed(width)
    units = [
        nn.Embedding(7, width),
        nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
        nn.Linear(width, 3),
    ]
    return [unit.to(dtype) for unit in units]


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def steps_of(
    ranks: int, steps: int, micro: int, seed: int
) -> list[list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """[step][rank][micro-batch] of (tokens, labels), a row here and two there."""
    generator = torch.Generator().manual_seed(seed)

    def part(rank):
        examples = 1 + rank % 2
        return torch.randint(7, (examples,), generator=generator), torch.randint(
            3, (examples,), generator=generator
        )

    return [[[part(rank) for _ in range(micro)] for rank in range(ranks)] for _ in range(steps)]


def mean_over(examples: int):
    return lambda logits, labels: (
        nn.functional.cross_entropy(logits, labels, reduction="sum") / examples
    )


def examples_of(step) -> int:
    return sum(len(labels) for rank in step for _, labels in rank)


def alone(units: list[nn.Module], steps) -> torch.Tensor:
    """One process, one batch per step: the examples of all ranks together."""
    whole = nn.Sequential(*units)
    optimizer = adam(whole.parameters())
    for step in steps:
        tokens, labels = (
            torch.cat(part) for part in zip(*(batch for rank in step for batch in rank))
        )
        mean_over(len(labels))(whole(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(whole.parameters()).detach()


def sharded(units, steps, stage, ranks):
    """(weights, Zero) of each rank, and the bytes that each has sent in training."""

    def work(transport):
        zero = Zero(transport, copy.deepcopy(units), stage, adam)
        for step in steps:
            zero.step(step[transport.rank], mean_over(examples_of(step)))
        sent = transport.bytes_sent
        return zero.weights(), zero, sent

    return threads(ranks, work)[0]


@settings(max_examples=60, deadline=None)
@given(
    ranks=RANKS,
    stage=STAGES,
    width=st.integers(1, 6),
    micro=st.integers(1, 3),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_the_weights_are_those_of_the_unsharded_run(ranks, stage, width, micro, dtype, seed):
    """fp64 within 1e-9; fp32 within 1e-3, as Adam makes a step of a tiny gradient's rounding."""
    units, steps = model(width, dtype), steps_of(ranks, 3, micro, seed)
    truth = alone(copy.deepcopy(units), steps)
    trained = sharded(units, steps, stage, ranks)
    assert all(
        torch.equal(weights, trained[0][0]) and weights.dtype == dtype for weights, _, _ in trained
    ), "one model"
    gap = (trained[0][0] - truth).abs().max().item()
    assert gap < (1e-9 if dtype == torch.float64 else 1e-3)
    assert (
        truth - nn.utils.parameters_to_vector(nn.Sequential(*units).parameters())
    ).abs().max() > 1e-2, "it has trained"


@settings(max_examples=40, deadline=None)
@given(
    ranks=RANKS,
    stage=STAGES,
    width=st.integers(1, 6),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_a_rank_holds_what_the_formula_says(ranks, stage, width, dtype):
    """Within the odd number of each unit; over all ranks together exactly."""
    units, itemsize = model(width, dtype), dtype.itemsize
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in units]
    trained = [zero for _, zero, _ in sharded(units, steps_of(ranks, 1, 2, 0), stage, ranks)]
    formula = states_bytes(sum(sizes), ranks, stage, itemsize)
    for zero in trained:
        held, last = (
            zero.held(),
            [moment for moment in zero.moments if moment.event in ("reduce", "drop")][-1],
        )
        assert abs(last.gradients - formula["gradients"]) <= itemsize * len(units)
        assert held["gradients"] == 0, "after the update they are gone"
        for kind, numbers in (("parameters", 1), ("optimizer states", 2)):
            assert abs(held[kind] - formula[kind]) <= numbers * itemsize * len(units)
        most = max(moment.parameters for moment in zero.moments)
        assert most == held["parameters"] + (max(sizes) * itemsize if stage == 3 else 0), (
            "the largest unit whole, no more"
        )
    for kind, value in formula.items():
        if kind != "gradients":
            assert sum(zero.held()[kind] for zero in trained) == pytest.approx(value * ranks)


@settings(max_examples=40, deadline=None)
@given(ranks=RANKS, stage=STAGES, width=st.integers(1, 6), micro=st.integers(1, 3))
def test_a_rank_sends_what_the_formula_says(ranks, stage, width, micro):
    """2, 2 and 3 times the parameters, times (N-1)/N, for one micro-batch; exact over all."""
    units = model(width, torch.float32)
    length = sum(p.numel() for unit in units for p in unit.parameters())
    sent = [sent for _, _, sent in sharded(units, steps_of(ranks, 1, micro, 0), stage, ranks)]
    formula = sent_bytes(length, ranks, stage, micro)
    assert sum(sent) == round(ranks * formula)
    assert all(abs(one - formula) <= 4 * len(units) * 3 * micro for one in sent)
    if micro == 1:
        assert formula == {0: 2, 1: 2, 2: 2, 3: 3}[stage] * 4 * length * (ranks - 1) / ranks


def test_stage_3_gathers_each_layer_twice_and_drops_it():
    zero = sharded(model(4, torch.float32), steps_of(2, 1, 1, 0), 3, 2)[0][1]
    events = [(moment.event, moment.unit) for moment in zero.moments]
    forward = [(event, unit) for unit in (0, 1, 2) for event in ("gather", "forward", "drop")]
    backward = [
        (event, unit) for unit in (2, 1, 0) for event in ("gather", "backward", "reduce", "drop")
    ]
    assert events == [*forward, *backward, ("update", None)]
    rest = zero.held()["parameters"]
    assert all(
        (moment.parameters > rest) == (moment.event not in ("drop", "update"))
        for moment in zero.moments
    )


def test_bad_calls_are_refused():
    with pytest.raises(ValueError, match="stage=4 is not known"):
        threads(1, lambda transport: Zero(transport, model(2, torch.float32), 4))
    with pytest.raises(ValueError, match="join a layer without any"):
        threads(1, lambda transport: Zero(transport, [nn.Linear(2, 2), nn.GELU()], 3))


# -- torch's own, between processes ----------------------------------------------------------------

TEXT = Recipe(batch_size=16, accumulation=4, length=16, train_size=64, test_size=8, steps=3)
STAGE = {
    "zero-1": 1,
    "fsdp, kept": 3,
    "fsdp": 3,
    "fsdp, offload": 3,
}  # as to what is held from step to step
# Per parameter's bytes: DDP's all-reduce is no reduce-scatter, so ZeroRedundancyOptimizer adds a
# third.
SENT = {
    "zero-1": {"allreduce": 1, "broadcast": 1},
    "fsdp, kept": {"allgather_base": 1, "reduce_scatter_base": 1},
    "fsdp": {"allgather_base": 2, "reduce_scatter_base": 1},
}
SENT["fsdp, offload"] = SENT["fsdp"]


@pytest.mark.parametrize("ranks, model", [(2, "deberta"), (2, "vit")])
def test_torchs_own_give_the_unsharded_weights_and_the_formulas_bytes(ranks, model):
    recipe = (
        TEXT
        if model == "deberta"
        else Recipe("vit", batch_size=16, train_size=64, test_size=8, steps=3)
    )
    recipe = Recipe.from_dict(recipe.to_dict() | {"accumulation": ranks})
    texts = forked(SCRIPT, json.dumps(recipe.to_dict()), ranks=ranks)
    results = [json.loads(text.split("RESULT ")[1]) for text in texts]
    size = 4 * results[0]["parameters"]
    for name, stage in STAGE.items():
        each = [result["engines"][name] for result in results]
        formula = states_bytes(results[0]["parameters"], ranks, stage)
        for engine in each:
            assert engine["losses"] == pytest.approx(results[0]["expected"], rel=1e-5)
            assert engine["distance"] < 1e-5
            for operation, times in SENT[name].items():  # FSDP2 pads what the ranks do not divide
                assert engine["sent"][operation] == pytest.approx(times * size, rel=0.03)
            for kind in ("parameters", "gradients") if stage == 1 else formula:
                assert engine["held"][kind] == pytest.approx(formula[kind], rel=0.04)
        states = sum(engine["held"]["optimizer states"] for engine in each)
        assert states == pytest.approx(2 * size, rel=1e-3), "shared out, none twice"
        least = max(
            2 * size / ranks, 8 * results[0]["largest"] if stage == 1 else 0
        )  # it deals out whole tensors
        assert max(engine["held"]["optimizer states"] for engine in each) == pytest.approx(
            least, rel=0.04
        )
