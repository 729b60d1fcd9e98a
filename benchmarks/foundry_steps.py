"""MPT on eight H100s as MosaicML published it, planned here: bf16 on boards of 700 W.

MosaicML's team trained MPT of 760 million to 30 billion parameters with FSDP on machines of eight
H100s with 80 GB and NVLink and published tokens per second and GPU (benchmarks/data holds the
table, foundry_h100.csv). All rows on eight GPUs are planned, each in the micro-batch and with the
number of accumulations and the recomputation of its row: bf16 autocast, weights and messages of
weights as Composer's mixed precision "DEFAULT" has them, gradients summed in fp32.

Starcoder2 of transformers stands for MPT, which it resembles but for rotary positions, biases of
layer norms and their dtype; sizes are those of the yaml files of the time. What is not said is
planned as usual: FlashAttention-2's kernels, fused AdamW, boards of 700 W. No constant was fitted
to these times.
"""

from __future__ import annotations

from transformers import Starcoder2Config

from tight_fit.gpus import find
from tight_fit.gpus.specs import find_gpu
from tight_fit.gpus.table import FLASH_2_ATTENTION
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import Layout
from tight_fit.layouts.plan import LayoutPlan, plan_layout

GPU, GPUS, LINK = "H100", 8, "NVLink 4"
SIZES = {  # width, heads, layers
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
}


def config_of(size: str, length: int) -> Starcoder2Config:
    """A model of MPT's size, which a text of `length` tokens fits."""
    width, heads, layers = SIZES[size]
    return Starcoder2Config(
        vocab_size=50_368,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        use_bias=False,
        hidden_act="gelu",
        attention_dropout=0.0,
        residual_dropout=0.0,
        embedding_dropout=0.0,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        sliding_window=None,
    )


def plan(row: dict[str, str]) -> LayoutPlan:
    """The plan of a row of foundry_h100.csv; seconds of CPU."""
    length, accumulation = int(row["length"]), int(row["accumulation"])
    return plan_layout(
        config_of(row["model"], length),
        Layout(GPUS),
        batch_size=int(row["micro"]) * accumulation * GPUS,
        accumulation=accumulation,
        length=length,
        checkpointing=row["checkpointing"] == "yes",
    )


def planned(plan: LayoutPlan) -> float:
    """Seconds of the step."""
    links = Cluster(find(GPU), GPUS, inside=LINK).links_of_axes(plan.layout.axes)
    of_the_time = find_gpu(GPU)._replace(attention=FLASH_2_ATTENTION)
    return plan.step_seconds(of_the_time, links).total
