"""Layouts of any model: against real ranks, against the whole trace, against formulas."""

import pytest
import torch
from transformers import DebertaV2Config, LlamaConfig, MistralConfig

from tests.layouts.few_layers import few_and_every
from tests.layouts.on_ranks import on_ranks
from tests.night import few_by_day
from tests.small import configured
from tight_fit import gpus
from tight_fit.gpus import find
from tight_fit.gpus.specs import find_gpu
from tight_fit.layouts.clocks import events_of
from tight_fit.layouts.context import cut, places
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.plan import fullest_context_ranks, plan_layout, plan_step
from tight_fit.layouts.seconds import Link
from tight_fit.layouts.trace import STREAMS
from tight_fit.models.config import CannotPlan
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model
from tight_fit.trace import cuda_kernels
from tight_fit.units import MIB

BF16 = {"batch_size": 8, "length": 12, "weights": "fp32", "precision": "bf16"}
FP32 = BF16 | {"precision": "fp32"}
TWICE = {"accumulation": 2}
FOUR = {"length": 16}
FP16 = BF16 | {"precision": "fp16"}
LORA, ALL_LINEAR = {"lora_rank": 4}, {"lora_targets": "all-linear"}
QLORA = LORA | {"base": "nf4", "weights": None}
CHUNKED = {"loss": "chunked"}
# {(ranks, which): (fields of the step, layout, model, selective recomputation)}. Context ranks have
# processes of their own: DTensor would take the equal mesh of another case for theirs.
CASES = {
    (2, "all"): [
        (BF16, Layout(2), "llama", False), (FP32 | TWICE, Layout(2), "qwen3", False),
        (BF16, Layout(2, reshard_root=True), "llama", True),
        (BF16, Layout(2, wrap="layers+embeddings"), "llama", False),
        (BF16 | TWICE, Layout(2, "zero1"), "llama", False),
        (BF16 | TWICE, Layout(2, "zero2"), "llama", False),
        (BF16 | {"checkpointing": True}, Layout(2, prefetch=1), "qwen3", False),
        (BF16, Layout(2), "bert", False), (FP32 | TWICE, Layout(2, "ddp"), "llama", False),
        (BF16, Layout(2, "ddp"), "qwen3", False),
        (BF16 | TWICE, Layout(2, "ddp", gradient_as_bucket_view=True), "qwen3", False),
        (FP32 | TWICE | CHUNKED, Layout(2, "ddp"), "llama", False),
        (BF16 | CHUNKED, Layout(2, "ddp", gradient_as_bucket_view=True), "llama", False),
        (FP16 | TWICE, Layout(2, "ddp"), "llama", False), (FP16, Layout(2), "qwen3", False),
        (FP16 | TWICE, Layout(2, "zero2"), "llama", True),
        (BF16 | LORA, Layout(2, "ddp"), "llama", False), (BF16 | LORA, Layout(2), "llama", False),
        (FP16 | LORA | TWICE, Layout(2), "qwen3", False),
        (BF16 | LORA | {"base": "bf16", "weights": None}, Layout(2), "qwen3", True),
        (FP32 | LORA | {"base": "bf16", "weights": None}, Layout(2, "zero2"), "llama", False),
        (FP32 | LORA | ALL_LINEAR | TWICE, Layout(2, "zero1"), "llama", False),
        (BF16 | QLORA, Layout(2), "llama", False), (BF16 | QLORA, Layout(2, "ddp"), "llama", False),
        (FP16 | QLORA | TWICE, Layout(2), "qwen3", False), (FP32 | QLORA, Layout(2), "llama", True),
        (BF16 | QLORA | ALL_LINEAR | {"checkpointing": True}, Layout(2, "zero2"), "qwen3", False),
        (BF16 | LORA | {"task": "sequence-classification"}, Layout(2), "llama", False),
        (BF16 | {"frozen": 2}, Layout(2), "qwen3", False),
        (FP32 | {"frozen": 1, "checkpointing": True}, Layout(2), "bert", False),
        (FP32, Layout(1, tensor=2), "qwen3", False), (FP16, Layout(1, tensor=2), "llama", False),
        (FP32 | TWICE, Layout(1, tensor=2), "tied", False),
        (BF16 | TWICE, Layout(1, tensor=2), "llama", True),
    ],
    (2, "context"): [
        (FP32, Layout(1, context=2), "llama", False), (BF16, Layout(1, context=2), "qwen3", False),
        (BF16, Layout(1, context=2), "llama", True),
        (BF16 | TWICE | {"checkpointing": True}, Layout(1, context=2), "llama", False),
        (FP32 | {"task": "masked-lm"}, Layout(1, context=2), "bert", False),
    ],
    (4, "context"): [
        (BF16, Layout(2, context=2), "llama", False),
        (FP32, Layout(2, replicate=2, context=2), "llama", False),
        (FP16, Layout(2, context=2), "llama", False),
        (BF16, Layout(1, context=2, tensor=2), "llama", False),
    ],
    (4, "context alone"): [
        (FP32 | FOUR, Layout(1, context=4), "llama", False),
        (BF16 | FOUR, Layout(1, context=4), "qwen3", True),
    ],
    (4, "all"): [
        (BF16 | TWICE, Layout(4, replicate=2), "llama", False),
        (FP32, Layout(4, replicate=2), "qwen3", False),
        (BF16 | QLORA, Layout(4, replicate=2), "llama", False), (BF16, Layout(4), "qwen3", True),
        (FP16, Layout(4, replicate=2), "llama", False),
        (FP32 | TWICE, Layout(2, tensor=2), "llama", False),
        (BF16 | {"checkpointing": True}, Layout(2, tensor=2), "qwen3", False),
        (BF16, Layout(2, tensor=2), "tied", False),
    ],
}  # fmt: skip


# Ranks begin once for many cases: by day for every third one.
for (ranks, which), cases in [*CASES.items()]:
    rest = [case for number, case in enumerate(cases) if number % 3]
    CASES[ranks, which], CASES[ranks, f"{which}, the rest"] = cases[::3], rest


@pytest.mark.parametrize(
    "ranks, which", few_by_day(CASES, lambda case: "rest" not in case[1]), ids=str
)
def test_a_planned_rank_is_a_real_one(ranks, which):
    """Weights of the single process after two steps; peak, messages and FLOPs as planned.

    Where computation waits for messages gloo's thread may free a message's buffer a moment after
    the computation went on: then the real peak is higher, by no more than that message.
    """
    for case, _, planned, real, at in on_ranks(CASES[ranks, which], ranks):
        assert real["skipped"] in (None, True), at
        over = real["peak"] - planned.peak
        largest = max(message.payload for message in planned.sent)
        late = case[1].strategy != "ddp" and 0 < over <= largest
        assert over == 0 or late, f"{at}: {over} bytes over the plan"
        assert late or real["at_peak"] == planned.at_peak, at


def deep(layers: int = 7) -> LlamaConfig:
    return configured(LlamaConfig, 64, layers, 4, 176, 512, num_key_value_heads=2)


@pytest.mark.parametrize(
    "layout, selective, fields",
    few_by_day(
        [
            (Layout(4), False, {}),
            (Layout(4, reshard=False), True, {"accumulation": 2}),
            (Layout(8, replicate=2, prefetch=2), False, {"checkpointing": True}),
            (Layout(4, tensor=2), True, {}),
            (Layout(4), False, {"lora_rank": 4, "base": "bf16"}),
            (Layout(4), False, {"lora_rank": 4, "base": "nf4"}),
            (Layout(8, replicate=2), False, {"lora_rank": 4, "base": "nf4", "checkpointing": True}),
            (Layout(4), False, {"precision": "fp16"}),
        ]
    ),
    ids=str,
)
def test_a_few_layers_stand_for_all(monkeypatch, layout, selective, fields):
    """Events, operations, messages and seconds are those of the trace of every layer."""
    few, every = few_and_every(
        monkeypatch, deep(), layout, selective=selective, batch_size=32, **fields
    )
    assert few.step_seconds("H100", "NVLink 4") == every.step_seconds("H100", "NVLink 4")


@pytest.mark.parametrize("layout", ["fsdp=2", "hsdp=2x2", "fsdp=2,tensor=2"])
def test_the_optimizer_updates_its_shards_as_dtensor_would(monkeypatch, layout):
    """Event by event, though nothing asks DTensor what becomes of each parameter."""
    seen = []
    shards = cuda_kernels._shards
    monkeypatch.setattr(
        cuda_kernels, "_shards", lambda lists: seen.append(shards(lists) is lists) or shards(lists)
    )
    local = plan_layout(deep(2), parse(layout), length=32, batch_size=4)
    assert seen and not any(seen), "parts were taken"
    monkeypatch.setattr(cuda_kernels, "_shards", lambda lists: lists)
    asked = plan_layout(deep(2), parse(layout), length=32, batch_size=4)
    assert (local.timeline == asked.timeline).all() and local.sent == asked.sent
    assert local.operations == asked.operations and (local.phases == asked.phases).all()
    assert (local.streams == asked.streams).all()
    assert local.allocator_peaks(find("H100")) == asked.allocator_peaks(find("H100"))


def test_messages_of_fsdp_are_zeros_formulas():
    """3Ψ with weights gathered twice, 2Ψ with once (Rajbhandari et al. 2020), in bytes of bf16 and
    fp32; of the last layer and of the root group weights are gathered once."""
    size = plan_model(deep(), weights="fp32", length=16, device="cpu").parameters
    layer = size_of_layer(deep())
    twice = 6 * layer
    for layout, gathered in ((Layout(4), size + twice), (Layout(4, "zero2"), size)):
        sent = plan_layout(deep(), layout, device="cpu", batch_size=4, length=16).bytes_by_axis[
            "data"
        ]
        assert sent["all_gather"] == gathered * 2 * 3 / 4
        assert sent["reduce_scatter"] == size * 4 * 3 / 4


def size_of_layer(config: LlamaConfig) -> int:
    wide, deep_ = config.hidden_size, config.intermediate_size
    keys = config.num_key_value_heads * wide // config.num_attention_heads
    return 2 * wide * wide + 2 * wide * keys + 3 * wide * deep_ + 2 * wide


def test_replicas_sum_their_shards():
    """HSDP sends as much within a replica as FSDP of that size, and its shards between replicas."""
    alone, copies = (
        plan_layout(deep(), layout, device="cpu", batch_size=16, length=16)
        for layout in (Layout(2), Layout(8, replicate=4))
    )
    assert {**copies.bytes_by_axis["data"], "all_reduce": 0} == {
        **alone.bytes_by_axis["data"],
        "all_reduce": 0,
    }
    shard = copies.bytes_by_axis["data"]["reduce_scatter"]  # half of the gradients, over 2 ranks
    assert copies.bytes_by_axis["replicate"]["all_reduce"] == shard * 2 * 3 / 4


def test_what_is_recomputed_is_what_was_asked_for():
    step = {"device": "cpu", "batch_size": 16, "length": 64}
    ways = ({}, {"selective": True}, {"checkpointing": True})
    nothing, a_part, all_of_it = (
        plan_layout(deep(), Layout(2), **step, **way).peak for way in ways
    )
    assert nothing > a_part > all_of_it


@pytest.mark.parametrize("context", few_by_day([4, 2]))
def test_context_ranks_hold_a_part_of_the_tokens_and_attend_to_all(context):
    """Each layer gathers keys and values of all tokens in the forward pass and once more in the
    backward pass, and their gradients, in fp32, go once around the ring.

    Also where there are context ranks only, over which FSDP2 shards then.
    """
    config, length, data = deep(), 64, 4 // context
    alone, divided = (
        plan_layout(config, layout, batch_size=4, length=length)
        for layout in (Layout(4), Layout(data, context=context))
    )
    width = config.hidden_size // config.num_attention_heads
    rows = 4 // data  # examples that each context rank has a part of
    numbers = 2 * rows * length * config.num_key_value_heads * width  # keys and values
    sent = divided.bytes_by_axis["context"]
    gathered = 2 * numbers * (context - 1) / context  # bytes of bf16
    assert sent["all_gather"] == 2 * config.num_hidden_layers * gathered
    assert sent["send"] == config.num_hidden_layers * 4 * numbers
    assert divided.bytes_by_axis["data"] == alone.bytes_by_axis["data"]
    mine = length // context
    shapes = {op.shape for ops in divided.operations.ops for op in ops if op.kind == "attention"}
    heads = rows * config.num_attention_heads
    assert shapes == {
        (heads, mine, mine, width),  # its own tokens
        (heads, mine // 2, mine, width),  # a later rank's
        *([(heads, mine, mine // 2, width)] if context > 2 else []),  # an earlier rank's
    }
    whole, parts = (sum(plan.flops[name] for name in plan.flops) for plan in (alone, divided))
    assert parts < 1.01 * whole  # as much of the attention is left out as one process leaves out


@pytest.mark.parametrize("key_heads", [1, pytest.param(4, marks=pytest.mark.night)])
def test_the_fullest_context_rank_is_known(key_heads):
    config = deep()
    config.num_key_value_heads = key_heads
    step = ModelStep(config, batch_size=4, length=64, weights="fp32", precision="bf16")
    peaks = {
        ranks: [plan_step(step, Layout(1, context=ranks), rank=rank).peak for rank in range(ranks)]
        for ranks in (2, 4)
    }
    for ranks, every in peaks.items():
        assert max(every) == max(every[rank] for rank in fullest_context_ranks(ranks))


def test_the_ring_waits_for_each_of_its_messages_once():
    planned = plan_layout(deep(), Layout(2, context=4), batch_size=4, length=64)
    events = events_of(planned.operations, find_gpu("H100"))
    waits = sum(event.kind == "arrived" for event in events)
    assert waits == sum(bool(event.message) and event.message.axis == "context" for event in events)
    slow, slower = (
        planned.step_seconds("H100", {"data": "NVLink 4", "context": link})
        for link in (Link("slow", 1e6, 1e-6), Link("slower", 5e5, 1e-6))
    )
    assert slower.exposed["context"] > slow.exposed["context"] > 0


def test_padding_is_refused_by_context_ranks():
    batch = {"input_ids": torch.ones(1, 8), "attention_mask": torch.tensor([[1] * 7 + [0]])}
    with pytest.raises(ValueError, match="this batch has padding"):
        cut(batch, places(0, 2, 8, True), 8)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.night
def test_replicas_of_context_ranks_do_what_one_replica_does_and_sum_their_gradients(data):
    config = deep()
    one, copies = (
        plan_layout(config, layout, batch_size=4 * replicas, length=64)
        for replicas, layout in (
            (1, Layout(data, context=2)),
            (3, Layout(3 * data, replicate=3, context=2)),
        )
    )
    assert (one.timeline == copies.timeline).all() and one.peak == copies.peak
    sent = dict(copies.bytes_by_axis)
    (name, replicated) = next(iter(sent.pop("replicate").items()))
    assert sent == one.bytes_by_axis and name == "all_reduce"
    gradients = 4 * -(-one.parameters // (2 * data))  # bytes of a rank's shard
    assert replicated == pytest.approx(gradients * 2 * 2 / 3, rel=0.01)  # shards are padded


OWN_ATTENTION = configured(DebertaV2Config, 32, 2, 2, 64, 64, max_position_embeddings=16)


@pytest.mark.parametrize(
    "layout, fields, says",
    [
        (Layout(2, context=4), {"length": 12}, "use a multiple of 8"),
        (Layout(2, context=2), {"task": "sequence-classification"}, "one answer for all of them"),
        (
            Layout(2, context=2),
            {"config": OWN_ATTENTION, "task": "token-classification"},
            "context ranks would miss tokens",
        ),
        (Layout(1, tensor=3), {}, "attention heads cannot be divided by tensor=3"),
        (Layout(1, tensor=4), {}, "key and value heads cannot be divided by tensor=4"),
        (Layout(1, tensor=2), {"length": 15}, "15 tokens cannot be divided"),
        (Layout(1, tensor=2), {"task": "sequence-classification"}, "leave tensor out"),
    ],
)
def test_what_ranks_cannot_divide(layout, fields, says):
    fields = {"config": deep(), "batch_size": 8, "length": 16} | fields
    with pytest.raises(ValueError, match=says):
        plan_layout(fields.pop("config"), layout, device="cpu", **fields)


def test_a_window_of_attention_is_not_passed_over_by_context_ranks():
    config = configured(MistralConfig, 32, 2, 4, 64, 64, num_key_value_heads=2, sliding_window=16)
    layout, step = Layout(2, context=2), {"batch_size": 4}
    with pytest.raises(ValueError, match="Attention with sliding_window is not planned"):
        plan_layout(config, layout, device="cpu", **step, length=32)
    within = plan_layout(
        config, layout, device="cpu", **step, length=16
    )  # all tokens are in the window
    config.sliding_window = None
    assert within.peak == plan_layout(config, layout, device="cpu", **step, length=16).peak


def test_slower_links_wait_longer_and_work_the_same():
    planned = plan_layout(deep(), Layout(8, replicate=2), batch_size=8, length=64)
    fast, slow = (
        planned.step_seconds("A100-40GB", {"data": "NVLink 3", "replicate": link})
        for link in ("InfiniBand 200 Gbit", "Ethernet 1 Gbit")
    )
    assert fast.compute == slow.compute and slow.exposed["replicate"] > fast.exposed["replicate"]


def test_streams_of_their_own_reserve_by_themselves():
    planned = plan_layout(deep(), Layout(4), batch_size=4, length=16)
    alone = planned.allocation_trace
    assert planned.allocator_peaks("H100").reserved >= alone.least
    parts = [alone.only(planned.streams == stream) for stream in range(3)]
    assert sum(len(part.moves) for part in parts) == len(alone.moves)
    assert all(len(part.moves) for part in parts)
    scattered = alone.sizes[planned.streams == STREAMS.index("reduce_scatter")]
    assert scattered.sum() == 4 * planned.parameters / 4, "each rank's part of the fp32 gradients"
    nothing_of_cublas = gpus.GPU("none", 2**40, (0, 0))
    workspaces = [
        planned.allocator_peaks(gpu).reserved for gpu in ("H100", "A100-40GB", nothing_of_cublas)
    ]
    assert workspaces[0] - workspaces[2] == 2 * 32 * MIB, "of the forward and backward pass, once"


@pytest.mark.parametrize(
    "text, layout",
    [("fsdp=8", Layout(8)), ("ddp=2", Layout(2, "ddp")), (" FSDP=4 , TP=2", Layout(4, tensor=2)),
     ("fsdp = 4 tp=2", Layout(4, tensor=2)), ("hsdp=2x4", Layout(8, replicate=2)),
     ("zero1=4", Layout(4, "zero1")), ("fsdp=2,cp=4", Layout(2, context=4)),
     ("context=8", Layout(1, context=8))],
)  # fmt: skip
def test_layouts_are_read_and_written(text, layout):
    assert parse(text) == layout == parse(str(layout))


@pytest.mark.parametrize(
    "layout, fields, says",
    [
        (Layout(2, expert=2), {"precision": "fp16"}, "use bf16 or fp32"),
        (Layout(2, tensor=2), {"loss": "chunked"}, "words only: use loss='full'"),
        (Layout(2, tensor=2), {"lora_rank": 4}, "data ranks only: leave tensor out"),
        (Layout(2, tensor=2), QLORA, "data ranks only: leave tensor out"),
    ],
)
def test_layouts_and_steps_that_do_not_go_together(layout, fields, says):
    with pytest.raises((ValueError, CannotPlan), match=says):
        plan_layout(deep(), layout, device="cpu", **{"batch_size": 8, "length": 16} | fields)


def test_tied_embeddings_are_in_one_group():
    tied = deep()
    tied.tie_word_embeddings = True
    with pytest.raises(ValueError, match="one tensor for both: use wrap='layers'"):
        plan_layout(
            tied, Layout(2, wrap="layers+embeddings"), device="cpu", batch_size=2, length=16
        )
    assert plan_layout(tied, Layout(2), device="cpu", batch_size=2, length=16).peak
