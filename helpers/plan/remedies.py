"""What would fit: the smallest changes of a step that a card holds, and the largest batch."""

from __future__ import annotations

import copy
from dataclasses import replace

from helpers.gpus import GPU
from helpers.memory.timeline import Plan
from helpers.plan.hf_config import CannotPlan
from helpers.plan.hf_model import ModelStep
from helpers.plan.hf_plan import plan_model_step

MOST_ROWS = 2**20  # nobody asks for more
SHALLOW = 2, 3  # layers of the models that are planned first


class Remedies:
    """Plans around one step for one card, each made once.

    target is "cuda", but for a card without CUDA (this machine's own memory, capability 0.0).
    """

    def __init__(self, model_step: ModelStep, gpu: GPU):
        self.model_step, self.gpu = model_step, gpu
        self.target = "cpu" if gpu.capability == (0, 0) else "cuda"
        self._plans: dict[tuple, Plan] = {}
        self._deep = self._depth()

    def plan(self, depth: int | None = None, **change) -> Plan:
        """The plan with a change, or of the same model with fewer layers. Raises CannotPlan where the model does not take
        the change."""
        change = {
            name: value for name, value in change.items() if value != getattr(self.model_step, name)
        }
        key = depth, *sorted(change.items())
        if key not in self._plans:
            asked = replace(self.model_step, **change)
            if depth is not None:
                config = copy.deepcopy(asked.config)
                config.num_hidden_layers = depth
                asked = replace(asked, config=config)
            self._plans[key] = plan_model_step(asked, self.target)
        return self._plans[key]

    def fits(self, **change) -> bool:
        """Whether the card holds the step with a change; False where the model does not take the change."""
        try:
            return self._over(change, SHALLOW) <= 0 and self._over(change) <= 0
        except (CannotPlan, ModuleNotFoundError):
            return False

    def _over(self, change: dict, depths: tuple[int, int] | None = None) -> float:
        """Bytes over the card, negative where there is room; with `depths` from the line through the plans of two models
        that deep. The peak is the largest of several lines in the depth, so such a line never asks for more than the
        whole model's plan (which is what decides), and shallow models plan in no time. The allocator's part is no line in
        anything: it counts where the rest leaves room for it."""
        if depths is None or not self._deep:
            made = self.plan(**change)
            least = self._least(made)
            return least if least > 0 else made.fits(self.gpu).over
        low, high = (self._least(self.plan(depth=depth, **change)) for depth in depths)
        return low + (high - low) / (depths[1] - depths[0]) * (self._deep - depths[0])

    def _least(self, made: Plan) -> int:
        """Bytes over the card before the allocator takes its part."""
        return made.fits(self.gpu, allocator=False).over

    def _depth(self) -> int | None:
        """Number of layers, where all are alike and can be left out; else None."""
        config = self.model_step.config
        layers = getattr(config, "num_hidden_layers", None)
        lists = [
            value
            for value in config.to_dict().values()
            if isinstance(value, (list, dict)) and len(value) == layers
        ]
        if (
            self.model_step.reads == "texts"
            or self.model_step.frozen is not None
            or not isinstance(layers, int)
            or lists
        ):
            return None
        return layers if layers > 2 * SHALLOW[1] else None

    def remedies(self) -> list[dict]:
        """Changes that fit, [] if none does or none is needed: single ones; where none suffices alone, the fewest of them
        taken in the order of what they ask of the training, the cheapest first."""
        if self.fits():
            return []
        singles = [change for change in self._singles() if self.fits(**change)]
        if singles:
            return singles
        together: dict = {}
        for change in self._steps():
            if self._taken({**together, **change}):
                together |= change
                if self.fits(**together):
                    break
        else:
            return []
        for name in list(together):  # what came early may no longer be needed
            fewer = {key: value for key, value in together.items() if key != name}
            if self.fits(**fewer):
                together = fewer
        if "accumulation" in together:
            rest = {key: value for key, value in together.items() if key != "accumulation"}
            together |= self._accumulation(rest) or {}
        return [together]

    def largest_batch(self) -> int | None:
        """Rows a step of the largest batch that fits with all else as it is, the number of micro-batches included; None
        where not even one row a micro-batch does. The next larger one was planned, too, and does not fit."""
        parts = self.model_step.accumulation
        guess = (
            self._most_rows(self.model_step.micro_batch, SHALLOW)
            if self._deep
            else self.model_step.micro_batch
        )
        rows = self._most_rows(max(1, guess))
        return rows * parts or None

    def _most_rows(self, rows: int, depths: tuple[int, int] | None = None) -> int:
        """Most rows a micro-batch, 0 for none, searched from `rows` on: bytes are nearly a line in rows. Where the allocator's
        large segments make them anything but one, halving what is left (or doubling) takes turns with the line."""
        fits: dict[int, float] = {}  # rows -> bytes over the card
        over: dict[int, float] = {}
        guess = rows
        while True:
            found = self._over({"batch_size": guess * self.model_step.accumulation}, depths)
            (fits if found <= 0 else over)[guess] = found
            low, high = max(fits, default=0), min(over, default=MOST_ROWS)
            if high - low <= 1:
                return low
            tries = len(fits) + len(over)
            if tries == 1:
                guess = (
                    guess + 1 if fits else max(1, guess - 1)
                )  # a good first guess needs no third
            elif tries > 4 and tries % 2:
                guess = (low + high) // 2 if over else 2 * low
            else:
                near = (
                    [max(fits), min(over)]
                    if fits and over
                    else sorted(fits)[-2:] or sorted(over)[:2]
                )
                (a, at_a), (b, at_b) = ((place, (fits | over)[place]) for place in near)
                guess = int(a - at_a * (b - a) / (at_b - at_a)) if at_b > at_a else 2 * low
                guess += guess in fits  # where the line ends fits: the next one?
            guess = min(max(guess, low + 1), high - 1)

    def _accumulation(self, rest: dict) -> dict | None:
        """The fewest micro-batches that fit."""
        for parts in _divisors(self.model_step):
            if self.fits(**rest, accumulation=parts):
                return {"accumulation": parts}
        return None

    def _singles(self) -> list[dict]:
        fewest = self._accumulation({})
        return ([fewest] if fewest else []) + [
            change for change in self._steps() if "accumulation" not in change
        ]

    def _steps(self) -> list[dict]:
        """Every change there is: accumulation as far as it goes, half precision, 8-bit states, checkpointing, adapters."""
        asked, steps = self.model_step, []
        steps += [{"accumulation": parts} for parts in _divisors(asked)[-1:]]
        if asked.precision in ("fp32", "tf32") and self.target == "cuda":
            steps.append({"precision": "bf16" if self.gpu.bf16 else "fp16"})
        if asked.optimizer == "adamw":
            steps.append({"optimizer": "adamw8bit"})
        if not asked.checkpointing:
            steps.append({"checkpointing": True})
        if asked.lora_rank is None:
            steps.append({"lora_rank": 8})
        return steps

    def _taken(self, change: dict) -> bool:
        try:
            self.plan(**change)
        except (CannotPlan, ModuleNotFoundError):
            return False
        return True


def _divisors(model_step: ModelStep) -> list[int]:
    return [
        parts
        for parts in range(model_step.accumulation + 1, model_step.batch_size + 1)
        if model_step.batch_size % parts == 0
    ]
