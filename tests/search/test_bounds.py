"""What bounds tell of a layout without a plan: never more than is planned, and not much less."""

from dataclasses import replace
from itertools import combinations

import pytest
from transformers import BertConfig, Qwen3MoeConfig

from tests.night import few_by_day
from tests.search import EIGHT, SLOW, TWO, job, llama, mixtral, olmoe, planned
from tests.small import configured
from tight_fit.gpus import NCCL
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import facts_of
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.plan import plan_layout
from tight_fit.memory.plan import fit_on_gpu
from tight_fit.search.experts import NO_EXPERTS, Experts
from tight_fit.search.layouts import search_layouts
from tight_fit.search.space import (
    Reference,
    Trial,
    accumulations,
    layouts_of,
    least_need,
    least_need_beside,
    least_peak,
    least_seconds,
    reference_layout,
)

QWEN = configured(
    Qwen3MoeConfig, 128, 3, 4, 512, 512, num_key_value_heads=2, head_dim=32, num_experts=16,
    moe_intermediate_size=64, num_experts_per_tok=4, mlp_only_layers=[0],
)  # fmt: skip
WIDE = llama(2048, heads=16, words=1024, num_key_value_heads=4)
BERT = configured(BertConfig, 64, 3, 4, 128, 512, max_position_embeddings=256)


def below(of, cluster, layouts, recompute="none", take=slice(None), reduce="fp32"):
    """{trial: planned seconds}; each needs and takes at least what its bounds say.

    take  of the numbers of micro-batches
    """
    reference = Trial(reference_layout(of, cluster.gpus), recompute)
    like = Reference.of(planned(reference, of), cluster.gpu, Experts.of(of))
    seconds = {}
    for layout in layouts:
        for number in accumulations(layout, of, cluster.gpus, None)[take]:
            trial = Trial(layout, recompute, number)
            plan = planned(trial, of, reduce)
            assert least_peak(trial, of, like, reduce) <= plan.peak, str(trial)
            seconds[trial] = facts_of(plan, cluster)["seconds"]
            assert least_seconds(trial, of, like, cluster, reduce) <= seconds[trial], str(trial)
    return seconds


CASES = {  # (step, cluster, layouts, recomputation)
    # Matrix products are most of a step, or weights and states are.
    "products": (
        job(WIDE, length=512), Cluster("A100-40GB", 4),
        "ddp=1 fsdp=4 fsdp=2,tensor=2 tensor=4", "none",
    ),
    "weights": (
        job(WIDE, length=32), Cluster("A100-40GB", 4), "ddp=1 fsdp=4 tensor=4", "none",
    ),
    "pipeline": (
        job(llama(512, 4), batch_size=8, length=512), Cluster("A100-40GB", 2, 2),
        "pipeline=4", "none",
    ),
    "pipelines": (
        job(llama(1024, 4), batch_size=8), Cluster("A100-40GB", 2, 2),
        "pipeline=2,ddp=2 pipeline=2,fsdp=2", "full",
    ),
    "experts": (
        job(mixtral(512), batch_size=8, length=1024), EIGHT,
        "fsdp=8,expert=2 fsdp=8,expert=8", "selective",
    ),
    "slow experts": (
        job(olmoe(256), batch_size=4, length=256), SLOW, "ddp=4 fsdp=4,expert=2 fsdp=4,expert=4",
        "full",
    ),
    "fp32 experts": (
        job(QWEN, batch_size=8, precision="fp32"), SLOW, "fsdp=4,expert=2 fsdp=4,expert=4", "none",
    ),
    # Nothing is held in place of the weights that FSDP2, from whose plan bounds are taken, gathers.
    "bf16 as it is": (
        job(llama(1024), batch_size=8, length=16, weights="bf16"), EIGHT, "ddp=8", "none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", few_by_day(CASES, lambda name: name in ("products", "pipeline")))
def test_bounds_are_below_what_is_planned(name):
    of, cluster, layouts, recompute = CASES[name]
    asked = [parse(layout) for layout in layouts.split()]
    found = below(of, cluster, asked, recompute, slice(0, None, 2))
    assert {trial.layout for trial in found} == set(asked)


def test_bounds_of_every_layout_are_below_and_more_work_takes_longer():
    of = job(length=256, batch_size=8)
    layouts = [layout for layout in layouts_of(TWO) if layout.pipeline == 1]
    seconds = below(of, TWO, layouts) | below(of, TWO, layouts[1:], "full", slice(-1, None))
    pairs = [(more, less) for more in seconds for less in seconds if more.adds_work_to(less)]
    assert len(pairs) > 20 and all(seconds[more] >= seconds[less] for more, less in pairs)


def test_what_fits_in_more_micro_batches_is_not_left_out():
    """What the allocator needs beside the tensors of fewer of them is no bound."""
    of = job(llama(256, words=8192), batch_size=32, length=256)
    trials = [Trial(Layout(1, "ddp"), "full", number) for number in (2, 4, 8)]
    facts = {trial: facts_of(planned(trial, of), TWO) for trial in trials}
    for few, many in combinations(trials, 2):
        bound = least_need_beside(facts[few]["at_peak"], few, many, TWO)
        assert 0.9 * facts[many]["need"] < bound <= facts[many]["need"], f"{many} from {few}"


def test_bounds_know_in_which_dtype_gradients_are_summed():
    """With stage 1 of ZeRO they are whole while micro-batches go on: most of this model."""
    of = job(llama(512, heads=8), batch_size=8, length=8, weights=None)
    layouts = [Layout(4, "zero1"), Layout(4, "zero2")]
    found = below(of, TWO, layouts, take=slice(-1, None), reduce="bf16")
    assert [trial.accumulation for trial in found] == [2, 2]


def test_bounds_say_something():
    """They lie below what is planned, and not far: else every layout would be planned."""
    of = job(BERT, length=256, batch_size=8)
    like = Reference.of(planned(Trial(reference_layout(of, 4)), of), TWO.gpu, Experts.of(of))
    shares = {Trial(Layout(4, "ddp"), "none", 2): 0.6, Trial(Layout(4), "none", 1): 0.9}
    for trial, share in shares.items():
        plan = planned(trial, of)
        assert share * plan.peak < least_peak(trial, of, like) <= plan.peak, str(trial)
        need = fit_on_gpu(TWO.gpu, int(least_peak(trial, of, like)), 0).need
        assert least_need(trial, of, like, TWO) == need + NCCL
    one = Trial(Layout(1, "ddp"))
    alone = fit_on_gpu(TWO.gpu, int(least_peak(one, of, like)), 0).need
    assert least_need(one, of, like, TWO) == alone


@pytest.mark.parametrize("config", few_by_day([olmoe(64), llama(64, 3)]), ids=["olmoe", "llama"])
def test_the_bound_of_messages_is_below_those_that_are_sent(config):
    """Their bytes alone, over links that take nearly all of the step."""
    of = job(config, batch_size=8, length=256)
    experts = Experts.of(of)
    like = Reference.of(planned(Trial(Layout(4)), of), SLOW.gpu, experts)
    waits = replace(like, work=0.0, growing=0.0, products=0.0)
    if experts != NO_EXPERTS:  # in each of two layers every token goes to its experts
        assert like.dispatched == 2 * config.num_experts_per_tok * 2 * 256 * config.hidden_size
    else:
        one = least_seconds(Trial(Layout(1, "ddp")), of, like, SLOW)
        assert one == pytest.approx(0.9 * 4 * like.growing)
    for layout in layouts_of(SLOW, experts.number)[1:]:
        if layout.pipeline == 1 and (experts == NO_EXPERTS) == (layout.expert == 1):
            most = accumulations(layout, of, 4, None)[-1]
            trial = Trial(layout, "none", most if experts == NO_EXPERTS else 1)
            seconds = facts_of(planned(trial, of), SLOW)["seconds"]
            least = 0 if experts == NO_EXPERTS else seconds / 3
            assert least < least_seconds(trial, of, waits, SLOW) < seconds, str(trial)


def test_bounds_never_hide_the_best():
    """Short texts over slow links: it takes less to send tokens than to gather experts."""
    of = job(mixtral(6144), length=32)  # 3.6 G parameters, too many for one GPU
    quick, every = (
        search_layouts(of, SLOW, ("none",), 1, bounds=bounds) for bounds in (True, False)
    )
    assert quick.best.trial == every.best.trial == Trial(Layout(4, expert=4))
    assert quick.best.facts == every.best.facts
    assert len(quick.planned) < len(every.planned)
    for one in every.planned:
        assert quick.slower.get(one.trial, 0) <= one.seconds


def test_zero_2_keeps_weights_as_fsdp_without_resharding_does():
    """Why there is one trial for both, and none of ZeRO-1 with one micro-batch."""
    plans = [
        plan_layout(llama(64), layout, batch_size=8, length=32)
        for layout in (Layout(4, "zero2"), Layout(4, reshard=False), Layout(4, "zero1"))
    ]
    for other in plans[1:]:
        assert (plans[0].timeline == other.timeline).all() and plans[0].sent == other.sent
