"""How a training step is laid over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from helpers.recipe import Recipe

SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Parallel:
    """A grid of data × pipeline × tensor ranks. One rank of each is one device.

    data      ranks that hold the same part of the model and share the rows of a step among them
    shard     what the data ranks share out instead of each holding all of it (ZeRO, Rajbhandari et al. 2020):
              0 nothing (DDP), 1 optimizer states (ZeroRedundancyOptimizer), 2 and gradients, 3 and parameters (FSDP2);
              FSDP2 shares the parameters out in 2 as well, but keeps them gathered from forward to backward
    pipeline  stages that the layers are cut into
    tensor    ranks that share every layer (Megatron: heads and hidden units)
    schedule  of the pipeline: "gpipe" or "1f1b"; its micro-batches are the recipe's `accumulation`
    Raises ValueError with what is wrong and what to do.
    """

    data: int = 1
    zero_stage: int = 0
    pipeline: int = 1
    tensor: int = 1
    schedule: str = "1f1b"

    def __post_init__(self):
        for name in ("data", "pipeline", "tensor"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of ranks from 1 on.")
        if self.zero_stage not in (0, 1, 2, 3) or isinstance(self.zero_stage, bool):
            raise ValueError(f"zero_stage={self.zero_stage!r} must be ZeRO's stage: 0, 1, 2 or 3.")
        if self.zero_stage and self.data == 1:
            raise ValueError(
                f"zero_stage={self.zero_stage} shares out among the data ranks, and data=1: give data more ranks."
            )
        if self.zero_stage >= 2 and self.pipeline > 1:
            raise ValueError(
                f"zero_stage={self.zero_stage} would gather every stage again for each micro-batch of a pipeline: "
                "use zero_stage=0 or 1 with pipeline."
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule={self.schedule!r} is not known: use one of {', '.join(SCHEDULES)}."
            )

    @property
    def ranks(self) -> int:
        return self.data * self.pipeline * self.tensor

    def __str__(self) -> str:
        parts = [
            f"{name} {getattr(self, name)}"
            for name in ("data", "pipeline", "tensor")
            if getattr(self, name) > 1
        ]
        return (
            " × ".join(parts) + (f", ZeRO-{self.zero_stage}" if self.zero_stage else "")
            or "one rank"
        )

    def local(self, recipe: Recipe) -> Recipe:
        """The recipe as one data rank sees it: its share of the rows. Raises ValueError where the two do not go
        together."""
        if recipe.batch_size % (self.data * recipe.accumulation):
            raise ValueError(
                f"batch_size={recipe.batch_size} cannot be shared evenly by data={self.data} ranks with "
                f"accumulation={recipe.accumulation}: use a multiple of {self.data * recipe.accumulation}."
            )
        if recipe.precision == "fp16" and (self.zero_stage or self.tensor > 1 or self.pipeline > 1):
            raise ValueError(
                "precision='fp16' skips steps whose gradients overflow, and ranks that hold parts of them would "
                "have to agree: use it with data ranks and zero_stage=0, or bf16 or fp32."
            )
        if (self.zero_stage or self.tensor > 1) and recipe.optimizer != "adamw":
            raise ValueError(
                f"optimizer={recipe.optimizer!r} does not know shared-out tensors: use optimizer='adamw' with "
                "shard or tensor."
            )
        if (
            self.zero_stage >= 2 or self.tensor > 1 or self.pipeline > 1
        ) and recipe.lora_rank is not None:
            raise ValueError(
                "lora_rank leaves little to share out: use it with data ranks and zero_stage=0 or 1 only."
            )
        if self.pipeline > 1 and recipe.frozen is not None:
            raise ValueError(
                "frozen may leave a stage of a pipeline with nothing to train: use it with pipeline=1."
            )
        if self.pipeline > recipe.layers:
            raise ValueError(
                f"pipeline={self.pipeline} stages need as many layers, and {recipe.model} has {recipe.layers}."
            )
        return replace(recipe, batch_size=recipe.batch_size // self.data)
