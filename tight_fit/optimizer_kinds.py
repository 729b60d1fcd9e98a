"""The optimizers that a step may name: one row says what each keeps, where, and how it computes.

What is here is asked by the recipe's checks, the command, the calculator, searches and benchmarks.
`tight_fit.techniques.optimizers` makes them.
"""

from __future__ import annotations

from typing import NamedTuple

FUSED, FOREACH, FOR_LOOP = "fused", "foreach", "for-loop"


class OptimizerKind(NamedTuple):
    """One optimizer.

    name        as a step names it
    label       as people call it
    states      numbers that it keeps of each weight
    dtype       theirs: "fp32", "bf16", "8 bits", or "rows and columns" of second moments
    by          how the update runs: "fused" (one kernel), "foreach" (a kernel for many tensors,
                with a copy of all of them), "for-loop" (tensor by tensor), "" where a library
                decides
    package     that has to be installed: "" for PyTorch alone
    on_host     whether a CPU computes it well, so that it may wait in the host's memory
    paged       whether its states lie in memory that the driver moves between GPU and host
    counts_on_host  whether PyTorch keeps its counters of steps in the host's memory
    base        dtype that the weights must have; "" for any
    arithmetic  in which it multiplies matrices; "" where it multiplies none
    trainer     what `optim` of transformers' Trainer is called for it; "" where it has none
    """

    name: str
    label: str
    states: int
    dtype: str
    by: str = ""
    package: str = ""
    on_host: bool = False
    paged: bool = False
    counts_on_host: bool = False
    base: str = ""
    arithmetic: str = ""
    trainer: str = ""


BITSANDBYTES = "bitsandbytes"
_TABLE = (
    OptimizerKind(
        "adamw", "fused AdamW", 2, "fp32", FUSED, on_host=True, trainer="adamw_torch_fused"
    ),
    OptimizerKind(
        "adamw8bit", "8-bit AdamW", 2, "8 bits", package=BITSANDBYTES, trainer="adamw_bnb_8bit"
    ),
    OptimizerKind(
        "adamw8bit_embed32",
        "8-bit AdamW with embeddings in 32 bits",
        2,
        "8 bits",
        package=BITSANDBYTES,
    ),
    OptimizerKind("sgd", "fused SGD", 1, "fp32", FUSED, on_host=True),
    OptimizerKind("adafactor", "Adafactor", 0, "rows and columns", FOR_LOOP, on_host=True),
    OptimizerKind("lion", "Lion", 1, "fp32", package=BITSANDBYTES, trainer="lion_32bit"),
    OptimizerKind("lion8bit", "8-bit Lion", 1, "8 bits", package=BITSANDBYTES, trainer="lion_8bit"),
    OptimizerKind(
        "paged_adamw8bit",
        "paged 8-bit AdamW",
        2,
        "8 bits",
        package=BITSANDBYTES,
        paged=True,
        trainer="paged_adamw_8bit",
    ),
    OptimizerKind(
        "adamw_stochastic",
        "AdamW with stochastic rounding",
        2,
        "bf16",
        FOR_LOOP,
        on_host=True,
        base="bf16",
    ),
    OptimizerKind(
        "adamw_foreach",
        "foreach AdamW",
        2,
        "fp32",
        FOREACH,
        counts_on_host=True,
        trainer="adamw_torch",
    ),
    OptimizerKind("adamw_forloop", "AdamW in a for-loop", 2, "fp32", FOR_LOOP, counts_on_host=True),
    OptimizerKind(
        "muon",
        "Muon for hidden matrices with fused AdamW for the rest",
        1,
        "fp32",
        FOR_LOOP,
        arithmetic="bf16",
    ),
)
KINDS = {kind.name: kind for kind in _TABLE}
OPTIMIZERS = tuple(KINDS)
ON_HOST = tuple(kind.name for kind in _TABLE if kind.on_host)
ADAMW = ("adamw", "adamw_foreach", "adamw_forloop")  # the same update of the same states
# Other names of the same: as PyTorch's argument and Trainer's `optim` call them.
ALSO = {"adamw_fused": "adamw"} | {kind.trainer: kind.name for kind in _TABLE if kind.trainer}
