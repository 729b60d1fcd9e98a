"""How a training step is laid out over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from helpers.recipe import Recipe
from tight_fit.checks import one_of, shown, whole
from tight_fit.techniques.rules import check_ordinary

SCHEDULES = ("gpipe", "1f1b")
MOST_RANKS = 100_000  # along one axis


@dataclass(frozen=True)
class Parallel:
    """A grid of data × pipeline × tensor ranks. Each rank is one process on one device.

    data        ranks that hold the same part of the model and divide the examples of a step
    zero_stage  stage of the Zero Redundancy Optimizer (ZeRO, Rajbhandari et al. 2020): what the
                data ranks shard, so that each holds one part of it in place of a full copy.
                0: nothing (DDP); 1: optimizer states (ZeroRedundancyOptimizer); 2: gradients too;
                3: parameters too (FSDP2). FSDP2 shards the parameters in stage 2 as well, but keeps
                them gathered from the forward to the backward pass
    pipeline    stages that the layers are cut into
    tensor      ranks that divide every layer (Megatron: its heads and hidden units)
    schedule    of the pipeline: "gpipe" or "1f1b"; its micro-batches are the recipe's
                `accumulation`
    Raises TypeError where a number is no int, ValueError for values that are not known or do not go
    together; the message says what to do.
    """

    data: int = 1
    zero_stage: int = 0
    pipeline: int = 1
    tensor: int = 1
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        for name in ("data", "pipeline", "tensor"):
            if whole(name, getattr(self, name), 1) > MOST_RANKS:
                raise ValueError(
                    f"{name} is above {MOST_RANKS:,} ranks, more than any machine has: give fewer."
                )
        if type(self.zero_stage) is not int or self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage={shown(self.zero_stage)} is not known: use 0, 1, 2 or 3.")
        if self.zero_stage and self.data == 1:
            raise ValueError(
                f"zero_stage={self.zero_stage} shards over the data ranks, and data=1: give data "
                "more ranks."
            )
        if self.zero_stage >= 2 and self.pipeline > 1:
            raise ValueError(
                f"zero_stage={self.zero_stage} would gather every stage again for each micro-batch "
                "of a pipeline: use zero_stage=0 or 1 with pipeline."
            )
        one_of("schedule", self.schedule, SCHEDULES)

    @property
    def ranks(self) -> int:
        """How many ranks the grid has in all."""
        return self.data * self.pipeline * self.tensor

    def __str__(self) -> str:
        axes = [(name, getattr(self, name)) for name in ("data", "pipeline", "tensor")]
        grid = " × ".join(f"{name} {ranks}" for name, ranks in axes if ranks > 1)
        return grid + (f", ZeRO-{self.zero_stage}" if self.zero_stage else "") or "one rank"

    def local(self, recipe: Recipe) -> Recipe:
        """The recipe as one data rank sees it: with its part of the examples of a step.

        Raises ValueError where recipe and layout do not go together.
        """
        if recipe.batch_size % (self.data * recipe.accumulation):
            raise ValueError(
                f"batch_size={recipe.batch_size} cannot be divided evenly by data={self.data} "
                f"ranks with accumulation={recipe.accumulation}: use a multiple of "
                f"{self.data * recipe.accumulation}."
            )
        if self.ranks > 1:
            check_ordinary(recipe, "Several ranks")
            one_of("base", recipe.base, ("fp32",))
        if recipe.precision == "fp16" and (self.zero_stage or self.tensor > 1 or self.pipeline > 1):
            raise ValueError(
                "precision='fp16' skips steps whose gradients overflow, and ranks that hold parts "
                "of the gradients would have to agree: use it with data ranks and zero_stage=0, or "
                "use bf16 or fp32."
            )
        if (self.zero_stage or self.tensor > 1) and recipe.optimizer != "adamw":
            raise ValueError(
                f"optimizer={recipe.optimizer!r} does not work on parts of tensors: use "
                "optimizer='adamw' with zero_stage or tensor."
            )
        divided = self.zero_stage >= 2 or self.tensor > 1 or self.pipeline > 1
        if divided and recipe.lora_rank is not None:
            raise ValueError(
                "lora_rank leaves little that could be divided: use it with data ranks and "
                "zero_stage=0 or 1 only."
            )
        if self.pipeline > 1 and recipe.frozen is not None:
            raise ValueError(
                "frozen may leave a stage of a pipeline with nothing to train: use it with "
                "pipeline=1."
            )
        if self.pipeline > recipe.layers:
            raise ValueError(
                f"pipeline={self.pipeline} stages need as many layers, and {recipe.model} has "
                f"{recipe.layers}: use at most pipeline={recipe.layers}."
            )
        return replace(recipe, batch_size=recipe.batch_size // self.data)
