"""Measured steps beside their plans, as they are kept in results/steps/ and shown as a table."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from helpers import record
from helpers.recipe import Recipe, difference
from helpers.tables import Table
from tight_fit.files import replace_all
from tight_fit.units import MIB, size

FOLDER = record.RESULTS / "steps"
OLD = ("resident", "preflight", "accelerate")


@dataclass(frozen=True)
class Step:
    """One measured step. Memory is in bytes, None where there is no such figure.

    model, technique   as in the table
    planned            peak of the tensors by plan
    allocated          peak measured by PyTorch's allocator
    reserved           on a GPU: most that the caching allocator held
    planned_allocated, planned_reserved   on a GPU: `allocated` and `reserved` by plan
    seconds, planned_seconds   on a GPU: of a step, measured and by plan; the plan's is None for a
                       GPU whose speed is not known
    link               between two GPUs, measured: "bytes_per_second" and "latency" in seconds
    """

    model: str
    technique: str
    recipe: Recipe
    planned: int
    allocated: int
    reserved: int | None = None
    planned_allocated: int | None = None
    planned_reserved: int | None = None
    seconds: float | None = None
    planned_seconds: float | None = None
    link: dict[str, float] | None = None

    @property
    def miss(self) -> float:
        """(planned - measured) / measured of the allocated peak."""
        return (self.planned_allocated or self.planned) / self.allocated - 1

    @property
    def off(self) -> str:
        """Planned less measured, in words: bytes where they are few, else a fraction."""
        bytes_off = (self.planned_allocated or self.planned) - self.allocated
        if abs(bytes_off) < MIB:
            return f"{bytes_off:+,} bytes"
        return f"{self.miss:+.2%}"

    @property
    def inside_bitsandbytes(self) -> bool:
        """Whether bitsandbytes' CPU kernel for 32-bit states takes memory that no plan sees.

        See `benchmarks.measure_step`.
        """
        return self.reserved is None and self.recipe.optimizer == "adamw8bit_embed32"

    def to_dict(self) -> dict:
        """As kept in JSON: of the recipe the fields that are not the default."""
        return vars(self) | {
            "recipe": {name: new for name, (_, new) in difference(Recipe(), self.recipe).items()}
        }

    @classmethod
    def from_dict(cls, values: dict) -> Step:
        """The reverse of `to_dict`; figures that are no longer measured (`OLD`) are left out."""
        known = {name: value for name, value in values.items() if name not in OLD}
        return cls(**known | {"recipe": Recipe.from_dict(values["recipe"])})


@dataclass(frozen=True)
class Proof:
    """The measured steps of one machine.

    environment  the machine (`profile.environment`)
    date         when they were measured, UTC
    command      by which they were measured
    large        names of the steps that its memory does not hold, by plan
    failed       {name of a step: why}
    """

    environment: dict
    date: str
    command: str
    steps: list[Step]
    large: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return (
            json.dumps(
                vars(self) | {"steps": [step.to_dict() for step in self.steps]},
                indent=1,
                allow_nan=False,
            )
            + "\n"
        )

    @classmethod
    def from_json(cls, text: str) -> Proof:
        """The reverse of `to_json`. Raises ValueError for text that is no such file."""
        try:
            values = json.loads(text)
            return cls(**values | {"steps": [Step.from_dict(step) for step in values["steps"]]})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"This is no file of measured steps ({error}): make it again with `make proof`."
            ) from error


def machine(environment: dict) -> str:
    """In words, what has to be the same for results to be of one machine.

    It is the GPU, its driver, and the versions of PyTorch, CUDA and transformers. How many threads
    the CPU gave, and which Python it was, changes nothing that is measured on a GPU.
    """
    named = {
        "PyTorch": "torch",
        "CUDA": "cuda",
        "driver": "driver",
        "transformers": "transformers",
        "rehearsal": "rehearsal",
    }
    known = [f"{word} {environment[key]}" for word, key in named.items() if environment.get(key)]
    return ", ".join([environment["name"], *known])


def write(proof: Proof, folder: Path, finished: bool = True) -> Path:
    """Write one file per machine, whole or not at all, and return its path.

    What is not `finished` goes into a file of its own, beside what was kept earlier. A file of the
    same GPU with other versions is never overwritten: it gets a name with its versions. Raises
    ValueError for a rehearsal on a pretended GPU, where the folder is that of the records.
    """
    refuse_rehearsal(proof, folder)
    path, unfinished = _files(folder, proof.environment)
    if not finished:
        replace_all(folder, {unfinished.name: proof.to_json()})
        return unfinished
    texts = {path.name: proof.to_json()}
    here = machine(proof.environment)
    if path.exists() and proof.environment["device"] == "cuda":
        other = Proof.from_json(path.read_text(encoding="utf8"))
        if machine(other.environment) != here:
            aside = _files(folder, other.environment)[1].with_suffix(".json")
            texts[aside.name] = other.to_json()
    replace_all(
        folder,
        texts,
        [old for old in (unfinished, unfinished.with_suffix(".json")) if old.exists()],
    )
    return path


def _files(folder: Path, environment: dict) -> tuple[Path, Path]:
    """Where a machine's steps are kept when all are there, and before."""
    name = _slug(environment["name"] if environment["device"] == "cuda" else "cpu")
    versions = _slug(machine(environment).removeprefix(environment["name"]))
    whole = f"{name}.{versions}" if versions else name
    return folder / f"{name}.json", folder / f"{whole}.unfinished"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def read_one(folder: Path, environment: dict) -> Proof | None:
    """What this machine (`machine`) has kept there, finished or not; else None.

    Raises ValueError for a file of this GPU that cannot be read.
    """
    name = _files(folder, environment)[0].stem
    paths = [*folder.glob(f"{name}.*unfinished"), *folder.glob(f"{name}.*json")]
    for path in paths:  # what is unfinished holds all that was finished before, and more
        proof = Proof.from_json(path.read_text(encoding="utf8"))
        if machine(proof.environment) == machine(environment):
            return proof
    return None


def refuse_rehearsal(proof: Proof, folder: Path) -> None:
    """Raises ValueError where what a pretended GPU has measured would be kept as a record."""
    if proof.environment.get("rehearsal") and folder.resolve().is_relative_to(record.RESULTS):
        raise ValueError(
            "These steps ran in a rehearsal on a pretended GPU: they are no record; name another "
            "folder than results/ with --out."
        )


def read(folder: Path | None = None) -> list[Proof]:
    """What was kept, one `Proof` per machine. Raises ValueError for a file that is none."""
    return [
        Proof.from_json(path.read_text(encoding="utf8"))
        for path in sorted((folder or FOLDER).glob("*.json"))
    ]


def table(proof: Proof) -> Table:
    """A row per step: planned and measured peaks, and on a GPU seconds."""
    rows = []
    several = any(step.link for step in proof.steps)
    for step in proof.steps:
        row = {
            "model": step.model,
            "technique": step.technique,
            "planned": size(step.planned_allocated or step.planned),
            "allocated": size(step.allocated),
            "off": step.off,
        }
        if step.reserved is not None:
            row["reserved, planned"] = size(step.planned_reserved)
            row["reserved"] = size(step.reserved)
        if step.seconds is not None:
            told = step.planned_seconds
            row["seconds, planned"] = "-" if told is None else f"{told:.4f}"
            row["seconds"] = f"{step.seconds:.4f}"
        if several:
            row["link"] = f"{step.link['bytes_per_second'] / 1e9:.1f} GB/s" if step.link else "-"
        rows.append(row)
    return Table(rows)
