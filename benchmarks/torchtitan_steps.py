"""Layouts against real clusters: torchtitan's published tables, planned here.

torchtitan's team trained Llama 3.1 on 8 to 512 H100s of 96 GB (HBM2e, 2.4 TB/s, limited to 500 W;
NVLink inside a machine of eight, 400 Gbit/s per GPU between machines) and published tokens per
second and GPU, and the reserved peak of the fullest GPU
(https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md of
December 2024, and asyncTP_llama3_h100_2025-06_torchtitan.md beside it of June 2025).
data/torchtitan_rows.csv has the rows without float8, those with float8 and FSDP alone, and one with
context parallelism.
They are set up as their configuration files and `parallelize_llama.py` of the time did: fp32
shards, bf16 messages of weights, gradients summed in fp32, FSDP2 around each layer and the whole
model, both dropping weights after the forward pass, fused AdamW. transformers' Llama stands for
torchtitan's. With data ranks only a step through torch.compile is planned with each layer compiled,
as torchtitan does it, and float8 in it; with others as the step without both. torchao's float8
gathers weights in bf16 unless asked; which was taken is not said, and bf16 is planned.

Nothing was fitted to these figures. The H100 of 700 W, with the peak of its data sheet, stands for
a GPU limited to 500 W, as in the source.

`python -m benchmarks.peaks torchtitan` plans all rows and writes them into docs/accuracy.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd

from benchmarks import comparison
from benchmarks.pages import config_of, records
from tight_fit.gpus import GPU
from tight_fit.gpus.specs import find_gpu
from tight_fit.gpus.table import FLASH_2_ATTENTION
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.plan import plan_layout
from tight_fit.models import config as hf_config
from tight_fit.units import GIB

SOURCE = "https://github.com/pytorch/torchtitan/blob/main/benchmarks"
CARD = GPU("H100 96 GB", 95 * GIB, (9, 0))
# PyTorch of the time had FlashAttention-2's kernels there.
SPECS = find_gpu("H100")._replace(name=CARD.name, bandwidth=2.4e12, attention=FLASH_2_ATTENTION)
MODELS = {
    "Llama-3.1-8B": hf_config.read("meta-llama/Llama-3.1-8B"),
    "Llama-3.1-70B": config_of("Llama-3.1-70B"),
}
KINDS = (
    "without torch.compile",
    "with torch.compile",
    "with torch.compile and tensor ranks (planned without it)",
    "with torch.compile and float8",
    "with both and context ranks (planned without them)",
)


@dataclass(frozen=True)
class TitanRow:
    """A published row.

    tokens  per second and GPU
    memory  GiB, the reserved peak; None where it was not published
    batch   examples of a data rank
    """

    name: str
    model: str
    layout: Layout
    tokens: int
    memory: float | None
    batch: int
    length: int
    selective: bool
    compiled: bool
    float8: bool
    source: str

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.float8:
            return KINDS[3 if self.compiles else 4]
        return KINDS[0 if not self.compiled else 1 if self.compiles else 2]

    @property
    def compiles(self) -> bool:
        """Whether the plan is that of compiled layers."""
        return self.compiled and self.layout.ranks == self.layout.data

    @property
    def key(self) -> str:
        """What its plan is kept under: rows that are planned alike have the same."""
        compiled = (", compiled, float8" if self.float8 else ", compiled") if self.compiles else ""
        return f"{self.model}, {self.layout}, {self.batch} x {self.length}{compiled}"

    def planned(self) -> dict[str, float]:
        """{"reserved": GiB, "tokens": per second and GPU} by plan."""
        layout = self.layout
        plan = plan_layout(
            MODELS[self.model],
            layout,
            selective=self.selective,
            checkpointing=True,
            compile=self.compiles,
            float8="tensorwise" if self.float8 and self.compiles else None,
            batch_size=self.batch * layout.data,
            length=self.length,
        )
        machines = layout.ranks // 8
        cluster = Cluster(CARD, 8, machines, "NVLink 4", "InfiniBand 400 Gbit", cards=8)
        took = plan.step_seconds(SPECS, cluster.links_of_axes(layout.axes))
        tokens = self.batch * layout.data * self.length / layout.ranks / took.total
        found = {"reserved": plan.allocator_peaks(CARD).reserved / GIB, "tokens": tokens}
        return {name: round(value, 3) for name, value in found.items()}

    def beside(self, reserved: float, tokens: float) -> dict[str, str]:
        """What was measured beside its plan, as `planned` gives it."""
        memory = self.memory
        return {
            "Llama 3.1": self.name,
            "layout": str(self.layout),
            "examples per data rank": f"{self.batch} × {self.length}",
            "recomputed": "selective" if self.selective else "full",
            "torch.compile": "with float8" if self.float8 else "yes" if self.compiled else "no",
            "GiB measured": f"{memory:.1f}" if memory else "not published",
            "GiB planned": f"{reserved:.1f}",
            "GiB off": f"{reserved / memory - 1:+.1%}" if memory else "",
            "tokens/s per GPU measured": f"{self.tokens:.0f}",
            "tokens/s per GPU planned": f"{tokens:.0f}",
            "tokens/s off": f"{tokens / self.tokens - 1:+.1%}",
            "source": self.source,
        }


def _row(kept: dict) -> TitanRow:
    fields = {name: kept[name] for name in ("name", "model", "tokens", "batch", "length")}
    return TitanRow(
        layout=replace(parse(kept["layout"]), reshard_root=True),
        memory=None if pd.isna(kept["memory"]) else kept["memory"],
        selective=kept["recomputed"] == "selective",
        compiled=kept["compiled"] != "no",
        float8=kept["compiled"] == "float8",
        source=f"{SOURCE}/{kept['source']}",
        **fields,
    )


ROWS = tuple(map(_row, records("torchtitan_rows.csv").to_dict("records")))


def read() -> dict[str, dict[str, float]]:
    """{key of a row: its plan}, as they were made last."""
    return comparison.read("torchtitan")


def errors() -> pd.DataFrame:
    """Each row's `kind`, and planned / measured - 1 of its "reserved" and "tokens"; none where
    nothing was published."""
    plans = read()
    found = [
        (row.kind, plans[row.key]["reserved"], row.memory, plans[row.key]["tokens"], row.tokens)
        for row in ROWS
    ]
    table = pd.DataFrame(found, columns=["kind", "planned", "memory", "rate", "published"])
    return pd.DataFrame(
        {
            "kind": table["kind"],
            "reserved": table["planned"] / table["memory"].astype(float) - 1,
            "tokens": table["rate"] / table["published"] - 1,
        }
    )


def sentence() -> str:
    """How far the plans are off in the mean."""
    parts, found = [], errors()
    for kind in KINDS:
        some = found[found["kind"] == kind]
        memory, tokens = some["reserved"].dropna(), some["tokens"]
        rows = f"{len(tokens)} row{'s' if len(tokens) > 1 else ''} {kind}"
        of_memory = f"memory by {memory.abs().mean():.1%} and " if len(memory) else ""
        parts.append(f"of {rows} {of_memory}tokens per second by {tokens.abs().mean():.1%}")
    return f"The plan misses, in the mean, {'; '.join(parts)}."


def table() -> pd.DataFrame:
    """A row per published row, measured beside planned."""
    plans = read()
    return pd.DataFrame(row.beside(**plans[row.key]) for row in ROWS)


def make() -> None:
    """Plan all rows and keep the results; some minutes."""
    plans = {row.key: row.planned for row in ROWS}
    comparison.make("torchtitan", plans, list(plans))
