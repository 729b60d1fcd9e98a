"""Pipeline schedules: dependencies, formulas, and torch's own schedules action by action."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from by_hand.timeline import bubble, bubble_of_ideal, naive, pipedream, simulate
from tight_fit.layouts.schedules import (
    Action,
    Schedule,
    gpipe,
    interleaved,
    needs,
    one_f_one_b,
    zero_bubble,
)

RANKS, MICRO, TIME, FEW = (
    st.integers(1, 8),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 4),
)
PLAIN = [naive, gpipe, one_f_one_b, zero_bubble, pipedream]
often = settings(max_examples=60, deadline=None)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PLAIN + [interleaved]), RANKS, MICRO, FEW, TIME, TIME, st.integers(0, 3))
def test_every_action_is_done_once_in_its_place_and_after_what_it_needs(
    make, ranks, micro, chunks, forward, backward, transfer
):
    if make is interleaved:
        micro -= micro % max(1, micro // ranks)  # equal rounds
    schedule = make(ranks, micro, *([chunks] if make is interleaved else []))
    played = simulate(schedule, forward, backward, transfer=transfer)
    ends = {span.action._replace(version=None): span.end for own in played.spans for span in own}
    kinds = "FIW" if make is zero_bubble else "FB"
    stages = range(schedule.stages)
    assert set(ends) == {
        Action(k, m, stage) for k in kinds for m in range(micro) for stage in stages
    }
    assert sum(map(len, played.spans)) == len(ends), "nothing twice"
    for rank, own in enumerate(played.spans):
        for before, after in zip(own, own[1:]):
            assert before.end <= after.start, "one action at a time"
        for span in own:
            assert schedule.rank_of(span.action.stage) == rank
            for before in needs(span.action._replace(version=None), schedule.stages):
                away = schedule.rank_of(before.stage) != rank
                assert ends[before] + transfer * away <= span.start + 1e-9
    assert played.seconds * ranks * (1 - played.bubble) == pytest.approx(sum(played.busy))
    assert sum(played.busy) == pytest.approx(ranks * micro * (forward + backward))


def test_what_an_action_needs():
    assert needs(Action("F", 3, 0), 2) == [] and needs(Action("F", 3, 1), 2) == [Action("F", 3, 0)]
    assert needs(Action("B", 3, 1), 2) == [Action("F", 3, 1)]
    assert needs(Action("B", 3, 0), 2) == [Action("F", 3, 0), Action("B", 3, 1)]
    assert needs(Action("I", 3, 0), 2) == [Action("F", 3, 0), Action("I", 3, 1)]
    assert needs(Action("W", 3, 0), 2) == [Action("I", 3, 0)]


@often
@given(RANKS, MICRO, FEW, FEW, TIME, TIME)
def test_the_bubble_is_the_formulas_to_the_last_bit(
    ranks, micro, rounds, chunks, forward, backward
):
    both, turns = forward + backward, (ranks, ranks * rounds, chunks)
    for made, of in (
        (gpipe(ranks, micro), (ranks, micro)),
        (one_f_one_b(ranks, micro), (ranks, micro)),
        (interleaved(*turns), turns),
    ):
        played = simulate(made, made.chunks * forward, made.chunks * backward)
        assert played.seconds == (made.chunks * of[1] + ranks - 1) * both
        assert played.bubble == pytest.approx(bubble(*of), abs=1e-12)
        assert played.bubble_of_ideal == pytest.approx(bubble_of_ideal(*of), abs=1e-12)
    played = simulate(naive(ranks, micro), forward, backward)
    assert played.seconds == micro * ranks * both
    assert played.bubble == pytest.approx((ranks - 1) / ranks, abs=1e-12)


@often
@given(ranks=RANKS, more=st.integers(0, 12))
def test_zero_bubble_has_a_third_of_the_bubble_where_its_three_parts_are_alike(ranks, more):
    micro = ranks + more
    split, whole = (simulate(made(ranks, micro), 1, 2) for made in (zero_bubble, one_f_one_b))
    assert split.seconds == 3 * micro + ranks - 1
    assert split.bubble_of_ideal == pytest.approx(whole.bubble_of_ideal / 3, abs=1e-12)


@often
@given(ranks=RANKS, micro=MICRO)
def test_activations_held(ranks, micro):
    assert naive(ranks, micro).held == [1] * ranks
    assert gpipe(ranks, micro).held == [micro] * ranks
    one = one_f_one_b(ranks, micro)
    assert one.held == [min(micro, ranks - stage) for stage in range(ranks)] == one.held_by_rank
    assert pipedream(ranks, micro).held == one.held
    assert max(zero_bubble(ranks, micro).held) <= ranks
    assert gpipe(ranks, micro).versions == one.versions == [1] * ranks


@often
@given(ranks=RANKS, rounds=FEW, chunks=FEW)
def test_interleaving_holds_what_the_paper_says(ranks, rounds, chunks):
    """K + (K-1)/v on the first rank, in K-th parts of the model.

    Narayanan et al. 2021: 1 + (K-1)/(Kv) times that of 1F1B.
    """
    schedule = interleaved(ranks, ranks * rounds, chunks)
    if rounds > 1 and ranks > 1 and chunks > 1:
        assert schedule.held_by_rank[0] == pytest.approx(ranks + (ranks - 1) / chunks)
    assert max(schedule.held_by_rank) <= ranks + (ranks - 1) / chunks + 1e-9


@often
@given(ranks=RANKS, micro=MICRO, weights=st.sampled_from(["latest", "stash", "vertical"]))
def test_the_versions_of_pipedream(ranks, micro, weights):
    schedule = pipedream(ranks, micro, weights)
    entered = {}
    for rank, own in enumerate(schedule.actions):
        done, seen, steps = 0, {}, []
        for action in own:
            assert action.version <= done, "weights from the future"
            if action.kind == "F":
                entered.setdefault(action.micro_batch, action.version)
                expected = entered[action.micro_batch] if weights == "vertical" else done
                seen[action.micro_batch] = action.version
            else:
                expected = done if weights == "latest" else seen[action.micro_batch]
                done += 1
            assert action.version == expected
            steps.append((action.version, done))
        needed = [
            {now} | {version for version, _ in steps[place:] if version <= now}
            for place, (_, now) in enumerate(steps, 1)
        ]
        assert schedule.versions[rank] == max(map(len, needed))
    if weights == "vertical":
        versions = {(a.micro_batch, a.version) for own in schedule.actions for a in own}
        assert len(versions) == micro, "one for each micro-batch"
    if micro >= 2 * ranks:
        stashed = [ranks - stage for stage in range(ranks)]
        every = {"latest": [1] * ranks, "stash": stashed, "vertical": [ranks] * ranks}
        assert schedule.versions == every[weights]


# -- torch's own ----------------------------------------------------------------------------------


def theirs(kind, ranks: int, micro: int, chunks: int | None = None) -> list[list[str]]:
    """The order of actions in one of torch's schedules, which asks only for its stages' numbers."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * (chunks or 1), group_size=ranks, group_rank=0,
            stage_index=ranks * chunk, is_first=chunk == 0, is_last=False,
            submod=torch.nn.Identity(), has_backward=True,
        )
        for chunk in range(chunks or 1)
    ]  # fmt: skip
    order = kind(stages if chunks else stages[0], micro).pipeline_order
    acts = [[action for action in order[rank] if action is not None] for rank in range(ranks)]
    return [[str(one) for one in own if one.computation_type.value in "FBIW"] for own in acts]


class Watched:
    """A stage that notes what one of torch's schedules does with it, and does nothing."""

    def __init__(self, rank: int, ranks: int):
        self.stage_index, self.num_stages, self.done = rank, ranks, []
        self.is_first, self.is_last = rank == 0, rank == ranks - 1

    def forward_one_chunk(self, micro_batch, *args, **settings):
        self.done.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch, **settings):
        self.done.append(f"{self.stage_index}B{micro_batch}")

    def __getattr__(self, name):
        return lambda *args: [] if name.startswith("get_") else None


def executed(kind, ranks: int, micro: int) -> list[list[str]]:
    """What the ranks of one of torch's schedules of one stage a rank really do."""
    stages = [Watched(rank, ranks) for rank in range(ranks)]
    for stage in stages:
        schedule = kind(stage, micro)
        schedule._initialize_stage = lambda *args: None
        schedule._step_microbatches([()] * micro, [{}] * micro)
    return [stage.done for stage in stages]


def ours(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in own] for own in schedule.actions]


@often
@given(ranks=RANKS, micro=MICRO, chunks=FEW)
def test_schedules_are_torchs(ranks, micro, chunks):
    assert ours(gpipe(ranks, micro)) == executed(ScheduleGPipe, ranks, micro)
    if micro >= ranks:  # torch refuses fewer; of the last rank it prints others than it runs
        assert ours(one_f_one_b(ranks, micro)) == executed(Schedule1F1B, ranks, micro)
    if micro % max(1, micro // ranks):
        with pytest.raises(ValueError, match="equal rounds"):
            interleaved(ranks, micro, chunks)
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            theirs(ScheduleInterleaved1F1B, ranks, micro, chunks)
    else:
        turns = theirs(ScheduleInterleaved1F1B, ranks, micro, chunks)
        assert ours(interleaved(ranks, micro, chunks)) == turns
        split = theirs(ScheduleInterleavedZeroBubble, ranks, micro, 1)
        assert ours(zero_bubble(ranks, micro)) == split


# -- what goes wrong ------------------------------------------------------------------------------


def test_uneven_stages_wait_for_the_slowest():
    even, uneven = (
        simulate(one_f_one_b(4, 8), [1] * 4, [2] * 4),
        simulate(one_f_one_b(4, 8), [1, 1, 2, 1], [2, 2, 4, 2]),
    )
    assert even.seconds == 33 and uneven.seconds >= 8 * 6 and uneven.bubble > even.bubble
    with pytest.raises(ValueError, match="forward lists 2 times for 4 stages"):
        simulate(gpipe(4, 1), [1, 1])


def test_ranks_that_wait_for_each_other_are_named():
    first, second = ((Action("F", 0, stage), Action("B", 0, stage)) for stage in (0, 1))
    crossed = Schedule("crossed", 2, 1, (first[::-1], second), 2)
    with pytest.raises(ValueError, match="crossed .* for ever: rank 0 at 0B0, rank 1 at 1F0"):
        simulate(crossed)


def test_bad_numbers_are_refused():
    for make in (*PLAIN, interleaved):
        for ranks, micro in ((0, 1), (1, 0)):
            with pytest.raises(ValueError, match="=0 must be at least 1"):
                make(ranks, micro)
        with pytest.raises(TypeError, match="must be a whole number"):
            make(2, 1.5)
    with pytest.raises(ValueError, match="chunks=0"):
        interleaved(2, 2, 0)
    with pytest.raises(ValueError, match="stash, vertical"):
        pipedream(2, 2, "none")
