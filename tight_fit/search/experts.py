"""What a search of layouts knows of a mixture of experts, and the expert ranks that it tries."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tight_fit.kernels.step_seconds import Seconds
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.experts import check_experts, experts_of
from tight_fit.layouts.layout import Layout
from tight_fit.models.made import on_meta
from tight_fit.models.step import ModelStep

PRODUCT = "_grouped_mm"  # of the experts of a layer, two in its forward pass
ALL_TO_ALLS = 4  # of rows, in a layer that has experts: there and back, forward and backward


@dataclass(frozen=True)
class Experts:
    """The experts of a model; the default is a model without any (`NO_EXPERTS`).

    number      of a layer; of layers with unlike many what divides all of their numbers
    parameters  of all experts of all layers
    width       numbers in the row of a token that goes to an expert
    """

    number: int = 1
    parameters: int = 0
    width: int = 0

    @classmethod
    def of(cls, job: ModelStep) -> Experts:
        """Those of a step's model. A model that cannot be made has none here: its plan says why.

        Raises ValueError, in one sentence, for experts that are not planned with expert ranks.
        """
        try:
            model = on_meta(job)
        except ValueError:
            return NO_EXPERTS
        found = experts_of(model)
        if not found:
            return NO_EXPERTS
        check_experts(model, found, 1)
        return cls(
            gcd(*(experts.num_experts for experts in found)),
            sum(weight.numel() for experts in found for weight in experts.parameters()),
            min(experts.down_proj.shape[-1 if experts.is_transposed else -2] for experts in found),
        )

    def dispatched(self, alone: Seconds) -> float:
        """Numbers that go to experts in the forward pass of a rank whose work takes `alone`."""
        rows = 0.0
        for kernel in alone.kernels:
            op = kernel.op
            if op.name == PRODUCT and kernel.phase == "forward":
                _, _, columns, terms = op.shape
                rows += kernel.times * op.flops / (2 * columns * terms)
        return rows / 2 * self.width


NO_EXPERTS = Experts()


def expert_layouts(cluster: Cluster, experts: int) -> list[Layout]:
    """FSDP2 over all GPUs, whose ranks inside a machine divide the experts, and those of all
    machines: every number of ranks that divides the experts of a layer."""
    inside = cluster.per_machine
    counts = [number for number in range(2, inside + 1) if inside % number == 0]
    counts += [cluster.gpus] if cluster.machines > 1 else []
    return [Layout(cluster.gpus, expert=count) for count in counts if experts % count == 0]
