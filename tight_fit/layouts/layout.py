"""How a training step of any Hugging Face model is laid out over ranks, and how that is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tight_fit.checks import clipped, of_type, one_of, true_or_false, whole
from tight_fit.layouts.schedules import SCHEDULES

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
WRAPPINGS = ("layers", "layers+embeddings")
# Of the grid; tensor ranks are neighbours, and stages of a pipeline the farthest apart.
AXES = ("pipeline", "replicate", "data", "context", "tensor")
MOST_RANKS = 100_000  # along one axis
SHORT = {"dp": "ddp", "tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}
BESIDE = ("pipeline", "tensor", "context", "expert")  # beside the axis of the data ranks, or in it
EXAMPLE = (
    "write ddp=8, zero1=8, zero2=8, fsdp=8, hsdp=2x4, fsdp=4,tensor=2, fsdp=4,context=2, "
    "fsdp=8,expert=4 or pipeline=2,fsdp=4"
)


@dataclass(frozen=True)
class Layout:
    """A grid of pipeline × data × context × tensor ranks. Each rank is one process on one GPU.

    >>> from tight_fit import Layout
    >>> layout = Layout(data=8, replicate=2, tensor=2)
    >>> print(layout, layout.ranks)
    hsdp=2x4,tensor=2 16

    data       ranks that divide the examples of a step, those of all replicas together
    strategy   what the data ranks shard of the model.
               "ddp": nothing, each rank holds a copy (DistributedDataParallel).
               "fsdp": weights, gradients and optimizer states (FSDP2, `fully_shard`).
               "zero2": FSDP2 that keeps the weights gathered from the forward to the backward pass
               and sends what stage 2 of ZeRO sends. "zero1": the same, with gradients that stay
               whole until the last micro-batch, so that they are sent once per optimizer step
               (Rajbhandari et al. 2020)
    replicate  copies of the sharded model (HSDP): each is sharded over data / replicate ranks, and
               gradients are summed over the copies
    tensor     ranks that divide every layer (Megatron), with sequence parallelism between the
               divided matrices and a loss over a divided vocabulary, as torchtitan does
    context    ranks that divide the tokens of each example; the attention is PyTorch's ring
               (`layouts.context`), and FSDP2 shards the model over these ranks as well
    expert     data ranks that divide the experts of every layer between them: it is no axis of its
               own, and is taken from `data`, whose ranks it must divide (torchtitan's expert
               parallelism). Each token goes to the ranks of its experts and comes back
               (`layouts.experts`). FSDP2 shards the experts of a rank over data / expert ranks, and
               all other weights over all data ranks
    pipeline   stages that the layers of a decoder are cut into; the micro-batches are the step's
               `accumulation`. Data ranks hold the same stage: copies of it (DDP), or shards
               (FSDP2), whose weights stay gathered from the first micro-batch to the last and whose
               gradients are summed once, as torchtitan has it
    schedule   of the pipeline, by torch.distributed.pipelining: "gpipe", "1f1b", "interleaved"
               (1F1B with two stages on a rank) or "zero-bubble" (ZB1P, which takes the gradients
               of the weights out of the backward passes; Qi et al. 2023)
    reshard    drop a layer's gathered weights after its forward pass (`reshard_after_forward`) and
               gather them again for the backward pass; of "fsdp" only. The last layer keeps its
               weights, as it needs them again at once
    reshard_root  the same for what is in no layer; PyTorch's default is False
    wrap       the groups of FSDP2: "layers" makes one of each transformer layer and one of all
               that remains; "layers+embeddings" makes groups of embeddings and head as well
    prefetch   layers whose weights are gathered ahead of time in the forward pass
               (`set_modules_to_forward_prefetch`); with 0 a layer is gathered while the layer
               before it computes, as far as the CPU runs ahead of the GPU
    gradient_as_bucket_view  of "ddp" only: gradients lie in the buckets that DDP sends. PyTorch's
               default is False: they are copied there, and each is held twice
    Raises TypeError where a number is no int, ValueError for values that are not known or do not go
    together; the message says what to do.
    """

    data: int = 1
    strategy: str = "fsdp"
    replicate: int = 1
    tensor: int = 1
    context: int = 1
    reshard: bool = True
    reshard_root: bool = False
    wrap: str = "layers"
    prefetch: int = 0
    pipeline: int = 1
    schedule: str = "1f1b"
    expert: int = 1
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        for axis in (*AXES, "expert"):
            if whole(axis, getattr(self, axis), 1) > MOST_RANKS:
                raise ValueError(
                    f"{axis} is above {MOST_RANKS:,} ranks, more than any cluster has: give fewer."
                )
        whole("prefetch", self.prefetch, 0)
        for flag in ("reshard", "reshard_root", "gradient_as_bucket_view"):
            true_or_false(flag, getattr(self, flag))
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("wrap", self.wrap, WRAPPINGS)
        one_of("schedule", self.schedule, SCHEDULES)
        if self.data % self.replicate:
            raise ValueError(
                f"data={self.data} ranks cannot be divided into {self.replicate} replicas: use a "
                f"multiple of {self.replicate}."
            )
        if self.expert > 1:
            self._check_expert()
        if self.pipeline > 1:
            self._check_pipeline()
        if self.strategy == "ddp":
            self._check_ddp()
        elif self.gradient_as_bucket_view:
            raise ValueError(
                "gradient_as_bucket_view says how DDP works: leave it out, or use strategy='ddp'."
            )

    def _check_expert(self) -> None:
        alone = self.pipeline == self.replicate == self.context == self.tensor == 1
        if not alone or self.strategy not in ("fsdp", "zero2"):
            raise ValueError(
                f"expert={self.expert} is planned with fsdp or zero2 alone, without replicas and "
                f"without pipeline, context and tensor ranks: write fsdp={self.data},"
                f"expert={self.expert}."
            )
        if self.prefetch:
            raise ValueError(
                f"prefetch={self.prefetch} is not planned with expert ranks: leave prefetch out."
            )
        if self.data % self.expert:
            raise ValueError(
                f"expert={self.expert} ranks are taken from the data ranks, and data={self.data} "
                f"cannot be divided by {self.expert}: let expert be a divisor of the data ranks."
            )

    def _check_pipeline(self) -> None:
        for name in ("context", "tensor"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"pipeline={self.pipeline} is planned with data ranks only: leave {name} out."
                )
        if self.strategy in ("zero1", "zero2"):
            raise ValueError(
                f"In a pipeline FSDP2 keeps weights gathered and sums gradients once, whatever the "
                f"stage of ZeRO: write fsdp in place of {self.strategy}."
            )
        if self.strategy == "ddp" and self.data > 1 and self.schedule == "zero-bubble":
            raise ValueError(
                "DDP does not sum gradients that zero-bubble takes out of the backward pass: use "
                "fsdp, or the schedule 1f1b."
            )
        if self.prefetch or not self.reshard or self.reshard_root:
            raise ValueError(
                "In a pipeline weights stay gathered from the first micro-batch to the last: leave "
                "reshard, reshard_root and prefetch out."
            )

    def _check_ddp(self) -> None:
        for name in ("replicate", "tensor", "context"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} is planned with FSDP2 only: use strategy='fsdp' "
                    "in place of 'ddp'."
                )
        if self.prefetch or self.wrap != "layers" or not self.reshard:
            raise ValueError(
                "reshard, wrap and prefetch say how FSDP2 works: leave them out with 'ddp'."
            )

    @property
    def shard(self) -> int:
        """Ranks that each hold a part of every tensor, tensor ranks not counted."""
        return 1 if self.strategy == "ddp" else self.data // self.replicate * self.context

    @property
    def ranks(self) -> int:
        """How many ranks the grid has in all."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def reshards(self) -> bool:
        """Whether weights are dropped between the forward and the backward pass."""
        return self.strategy == "fsdp" and self.reshard and self.pipeline == 1

    @property
    def chunks(self) -> int:
        """Stages of the pipeline on each of its ranks."""
        return 2 if self.schedule == "interleaved" and self.pipeline > 1 else 1

    @property
    def axes(self) -> dict[str, tuple[int, int]]:
        """{axis: (ranks between two neighbours on it, ranks that a whole group covers)}."""
        inner = self.context * self.tensor
        shard = self.data // self.replicate
        stage = self.data * inner
        of_experts = {"expert": (1, self.expert), "expert_data": (self.expert, self.data)}
        return {
            "tensor": (1, self.tensor),
            "context": (self.tensor, inner),
            "data": (self.tensor, shard * inner),
            "replicate": (shard * inner, stage),
            "pipeline": (stage, self.ranks),
        } | (of_experts if self.expert > 1 else {})

    def __str__(self) -> str:
        shard = self.data // self.replicate
        parts = [f"pipeline={self.pipeline}" if self.pipeline > 1 else ""]
        alone = self.ranks == 1 or (self.pipeline > 1 and self.strategy != "ddp")
        if self.replicate > 1:
            parts.append(f"hsdp={self.replicate}x{shard}")
        elif self.data > 1 or alone:
            parts.append(f"{self.strategy}={self.data}")
        parts += [f"context={self.context}" if self.context > 1 else ""]
        parts += [f"tensor={self.tensor}" if self.tensor > 1 else ""]
        parts += [f"expert={self.expert}" if self.expert > 1 else ""]
        return ",".join(filter(None, parts))


def parse(text: str, **fields: Any) -> Layout:
    """The layout that a text such as "fsdp=8", "hsdp=2x4" or "fsdp=4,tensor=2" describes.

    Short names are understood as well: dp is ddp, tp is tensor, cp is context, pp is pipeline.
    A pipeline without data ranks has nothing that FSDP2 could shard, and computes as DDP does.

    fields  further ones of `Layout`
    Raises TypeError for what is no text, ValueError, in one sentence, for another one.
    """
    of_type("layout", text, str)
    given: dict[str, str] = {}
    for part in re.split(r"\s*,\s*|\s+(?=[a-z0-9]+\s*=)", text.strip().lower()):
        name, equals, number = (word.strip() for word in part.partition("="))
        name = SHORT.get(name, name)
        known = (*STRATEGIES, "hsdp", *BESIDE)
        if not equals or name not in known or name in given:
            near = get_close_matches(name, known, 1, 0.7) if name not in known else []
            question = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"--layout {clipped(text)} is not understood at {clipped(part)!r}{question}: "
                f"{EXAMPLE}."
            )
        given[name] = number
    data = [name for name in given if name in (*STRATEGIES, "hsdp")]
    if len(data) > 1:
        raise ValueError(f"--layout {text} names {' and '.join(data)}: choose one of them.")
    numbers: dict[str, Any] = {
        name: _number(text, value) for name, value in given.items() if name in BESIDE
    }
    if not data and numbers.get("pipeline", 1) > 1 and len(numbers) == 1:
        fields |= {"strategy": "ddp"}
    if data and data[0] == "hsdp":
        pair = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", given["hsdp"])
        if not pair:
            raise ValueError(f"--layout {text}: write replicas x shards, such as hsdp=2x4.")
        replicate, shard = map(int, pair.groups())
        numbers |= {"data": replicate * shard, "replicate": replicate}
    elif data:
        fields |= {"strategy": data[0]}
        numbers |= {"data": _number(text, given[data[0]])}
    return Layout(**numbers, **fields)


def _number(text: str, typed: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", typed) or int(typed) < 1:
        raise ValueError(
            f"--layout {clipped(text)}: {clipped(typed)!r} is no number of ranks: {EXAMPLE}."
        )
    return int(typed)
