"""Pipeline schedules: dependencies, formulas, and torch's own schedules action by action."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from tight_fit.layouts.schedules import (
    Action,
    Schedule,
    bubble,
    bubble_of_ideal,
    gpipe,
    interleaved,
    naive,
    needs,
    one_f_one_b,
    pipedream,
    simulate,
    zero_bubble,
)

RANKS, MICRO, TIME = st.integers(1, 8), st.integers(1, 20), st.integers(1, 9)
PLAIN = [naive, gpipe, one_f_one_b, zero_bubble, pipedream]


def any_schedule(make, ranks, micro, chunks):
    if make is not interleaved:
        return make(ranks, micro)
    assume(micro % max(1, micro // ranks) == 0)
    return interleaved(ranks, micro, chunks)


@settings(max_examples=150, deadline=None)
@given(
    make=st.sampled_from([*PLAIN, interleaved]),
    ranks=RANKS,
    micro=MICRO,
    chunks=st.integers(1, 4),
    forward=TIME,
    backward=TIME,
    transfer=st.integers(0, 3),
)
def test_every_action_is_done_once_in_its_place_and_after_what_it_needs(
    make, ranks, micro, chunks, forward, backward, transfer
):
    schedule = any_schedule(make, ranks, micro, chunks)
    played = simulate(schedule, forward, backward, transfer=transfer)
    ends = {span.action._replace(version=None): span.end for own in played.spans for span in own}
    kinds = "FIW" if make is zero_bubble else "FB"
    assert set(ends) == {
        Action(kind, m, stage)
        for kind in kinds
        for m in range(micro)
        for stage in range(schedule.stages)
    }
    assert sum(map(len, played.spans)) == len(ends), "nothing twice"
    for rank, own in enumerate(played.spans):
        assert all(before.end <= after.start for before, after in zip(own, own[1:])), (
            "one action at a time"
        )
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


@settings(max_examples=100, deadline=None)
@given(ranks=RANKS, micro=MICRO, forward=TIME, backward=TIME)
def test_the_bubble_is_the_formulas_to_the_last_bit(ranks, micro, forward, backward):
    for make in (gpipe, one_f_one_b):
        played = simulate(make(ranks, micro), forward, backward)
        assert played.seconds == (micro + ranks - 1) * (forward + backward)
        assert played.bubble == pytest.approx(bubble(ranks, micro), abs=1e-12)
        assert played.bubble_of_ideal == pytest.approx(bubble_of_ideal(ranks, micro), abs=1e-12)
    played = simulate(naive(ranks, micro), forward, backward)
    assert played.seconds == micro * ranks * (forward + backward)
    assert played.bubble == pytest.approx((ranks - 1) / ranks, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(ranks=RANKS, rounds=st.integers(1, 4), chunks=st.integers(1, 4), forward=TIME, backward=TIME)
def test_interleaving_divides_the_bubble_by_the_chunks(ranks, rounds, chunks, forward, backward):
    micro = ranks * rounds
    played = simulate(interleaved(ranks, micro, chunks), chunks * forward, chunks * backward)
    assert played.seconds == (chunks * micro + ranks - 1) * (forward + backward)
    assert played.bubble == pytest.approx(bubble(ranks, micro, chunks), abs=1e-12)
    assert played.bubble_of_ideal == pytest.approx(bubble_of_ideal(ranks, micro, chunks), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(ranks=RANKS, more=st.integers(0, 12))
def test_zero_bubble_has_a_third_of_the_bubble_where_its_three_parts_are_alike(ranks, more):
    micro = ranks + more
    split, whole = (
        simulate(zero_bubble(ranks, micro), 1, 2),
        simulate(one_f_one_b(ranks, micro), 1, 2),
    )
    assert split.seconds == 3 * micro + ranks - 1
    assert split.bubble_of_ideal == pytest.approx(whole.bubble_of_ideal / 3, abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(ranks=RANKS, micro=MICRO)
def test_activations_held(ranks, micro):
    assert naive(ranks, micro).held == [1] * ranks
    assert gpipe(ranks, micro).held == [micro] * ranks
    assert one_f_one_b(ranks, micro).held == [min(micro, ranks - stage) for stage in range(ranks)]
    assert one_f_one_b(ranks, micro).held_by_rank == one_f_one_b(ranks, micro).held
    assert pipedream(ranks, micro).held == one_f_one_b(ranks, micro).held
    assert max(zero_bubble(ranks, micro).held) <= ranks
    assert gpipe(ranks, micro).versions == one_f_one_b(ranks, micro).versions == [1] * ranks


@settings(max_examples=60, deadline=None)
@given(ranks=RANKS, rounds=st.integers(1, 4), chunks=st.integers(1, 4))
def test_interleaving_holds_what_the_paper_says(ranks, rounds, chunks):
    """K + (K-1)/v on the first rank, in K-th parts of the model.

    Narayanan et al. 2021: 1 + (K-1)/(Kv) times that of 1F1B.
    """
    schedule = interleaved(ranks, ranks * rounds, chunks)
    if rounds > 1 and ranks > 1 and chunks > 1:
        assert schedule.held_by_rank[0] == pytest.approx(ranks + (ranks - 1) / chunks)
    assert max(schedule.held_by_rank) <= ranks + (ranks - 1) / chunks + 1e-9


@settings(max_examples=80, deadline=None)
@given(ranks=RANKS, micro=MICRO, weights=st.sampled_from(["latest", "stash", "vertical"]))
def test_the_versions_of_pipedream(ranks, micro, weights):
    schedule = pipedream(ranks, micro, weights)
    entered = {}
    for rank, own in enumerate(schedule.actions):
        done, seen, most, steps = 0, {}, 1, []
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
        for place, (_, now) in enumerate(steps):
            most = max(
                most, len({version for version, _ in steps[place + 1 :] if version <= now} | {now})
            )
        assert schedule.versions[rank] == most
    if weights == "vertical":
        assert all(
            len({a.version for own in schedule.actions for a in own if a.micro_batch == m}) == 1
            for m in range(micro)
        )
    if micro >= 2 * ranks:
        assert (
            schedule.versions
            == {
                "latest": [1] * ranks,
                "stash": [ranks - stage for stage in range(ranks)],
                "vertical": [ranks] * ranks,
            }[weights]
        )


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
    return [
        [
            str(action)
            for action in order[rank]
            if action is not None and action.computation_type.value in "FBIW"
        ]
        for rank in range(ranks)
    ]


class Watched:
    """A stage that notes what one of torch's schedules does with it, and does nothing."""

    def __init__(self, rank: int, ranks: int):
        self.stage_index, self.num_stages, self.is_first, self.is_last, self.done = (
            rank, ranks, rank == 0, rank == ranks - 1, [],
        )  # fmt: skip

    def forward_one_chunk(self, micro_batch, *args, **settings):
        self.done.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch, **settings):
        self.done.append(f"{self.stage_index}B{micro_batch}")

    def __getattr__(self, name):
        if name.startswith("get_"):
            return lambda micro_batch: []
        return lambda *args: None


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


@settings(max_examples=80, deadline=None)
@given(ranks=RANKS, micro=MICRO)
def test_torchs_schedules_of_one_stage_a_rank(ranks, micro):
    assert (
        ours(gpipe(ranks, micro))
        == theirs(ScheduleGPipe, ranks, micro)
        == executed(ScheduleGPipe, ranks, micro)
    )
    if micro >= ranks:  # torch refuses fewer
        assert ours(one_f_one_b(ranks, micro)) == executed(Schedule1F1B, ranks, micro)
        # Its printed order agrees too, except for the last rank's forward passes: torch 2.13
        # counts them from 1.
        assert ours(one_f_one_b(ranks, micro))[:-1] == theirs(Schedule1F1B, ranks, micro)[:-1]


@settings(max_examples=80, deadline=None)
@given(ranks=RANKS, micro=MICRO, chunks=st.integers(1, 4))
def test_torchs_interleaved_schedule(ranks, micro, chunks):
    if micro % max(1, micro // ranks):
        with pytest.raises(ValueError, match="equal rounds"):
            interleaved(ranks, micro, chunks)
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            theirs(ScheduleInterleaved1F1B, ranks, micro, chunks)
    else:
        assert ours(interleaved(ranks, micro, chunks)) == theirs(
            ScheduleInterleaved1F1B, ranks, micro, chunks
        )


@settings(max_examples=80, deadline=None)
@given(ranks=RANKS, micro=MICRO)
def test_torchs_zero_bubble_schedule_with_one_stage_a_rank(ranks, micro):
    assume(micro % max(1, micro // ranks) == 0)
    assert ours(zero_bubble(ranks, micro)) == theirs(ScheduleInterleavedZeroBubble, ranks, micro, 1)


def test_uneven_stages_wait_for_the_slowest():
    even, uneven = (
        simulate(one_f_one_b(4, 8), [1] * 4, [2] * 4),
        simulate(one_f_one_b(4, 8), [1, 1, 2, 1], [2, 2, 4, 2]),
    )
    assert even.seconds == 33 and uneven.seconds >= 8 * 6 and uneven.bubble > even.bubble
    with pytest.raises(ValueError, match="forward lists 2 times for 4 stages"):
        simulate(gpipe(4, 1), [1, 1])


def test_ranks_that_wait_for_each_other_are_named():
    crossed = Schedule(
        "crossed",
        2,
        1,
        ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 0, 1), Action("B", 0, 1))),
        2,
    )
    with pytest.raises(ValueError, match="crossed .* for ever: rank 0 at 0B0, rank 1 at 1F0"):
        simulate(crossed)


@pytest.mark.parametrize("make", [*PLAIN, interleaved])
def test_bad_numbers_are_refused(make):
    for ranks, micro in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="=0 must be at least 1"):
            make(ranks, micro)
    for ranks, micro in ((True, 1), ("2", 2), (2, 1.5)):
        with pytest.raises(TypeError, match="must be a whole number"):
            make(ranks, micro)
    with pytest.raises(ValueError, match="chunks=0"):
        interleaved(2, 2, 0)
    with pytest.raises(ValueError, match="stash, vertical"):
        pipedream(2, 2, "none")
