"""A fixed sample of mutants, drawn part by part so that every part of the engine is in it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tools.mutants.operators import NAME, Mutant, compiles, mutants

ROOT = Path(__file__).parents[2]
SEED = 0

# {part: (how many mutants, the files that they are drawn from)}
PARTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "step and loop": (16, ("tight_fit/techniques/step.py", "helpers/train.py")),
    "techniques": (
        14,
        tuple(
            f"tight_fit/techniques/{name}.py"
            for name in (
                *("activation_offload", "base_weights", "compiled", "host", "host_optimizer"),
                *("in_backward", "library_optimizers", "precision", "stochastic_rounding"),
            )
        ),
    ),
    "optimizers, adapters, loss": (
        12,
        (
            "tight_fit/techniques/optimizers.py",
            "tight_fit/techniques/model_changes.py",
            "tight_fit/techniques/chunked_loss.py",
        ),
    ),
    "tracker": (
        18,
        tuple(f"tight_fit/trace/{name}.py" for name in ("tracker", "steps", "flops", "cublas")),
    ),
    "allocator": (10, ("tight_fit/memory/allocator.py",)),
    "layers traced once": (12, ("tight_fit/trace/splice.py", "tight_fit/trace/repeated_layers.py")),
    "planner": (22, ("tight_fit/plans/*.py", "helpers/plan.py")),
    "time": (12, ("tight_fit/kernels/*.py",)),
    "layouts and search": (14, ("tight_fit/layouts/plan.py", "tight_fit/search/layouts*.py")),
    "schedules": (6, ("tight_fit/layouts/schedules.py",)),
    "checks of answers": (6, ("exercises/check.py",)),
    "fields and values": (
        8,
        (
            "tight_fit/techniques/rules.py",
            "tight_fit/techniques/settings.py",
            "tight_fit/checks.py",
        ),
    ),
}


def draw(
    kept: Sequence[dict] = (), root: Path = ROOT, seed: int = SEED
) -> list[tuple[str, Mutant]]:
    """(part, mutant) of the sample: at most one mutant per line, every operator alike likely.

    What was drawn before (`kept`: rows of results.jsonl) stays as long as it is in the source; what
    a part has lost since is drawn anew. Parts take turns, so that the first of them are a fair
    sample as well.
    """
    drawn: list[tuple[float, str, Mutant]] = []
    there = _still_there(kept, root)
    names = {one.name for _, one in there}
    for part, (wanted, patterns) in PARTS.items():
        stay = [one for name, one in there if name == part][:wanted]
        drawn += [((at + 1) / wanted, part, one) for at, one in enumerate(stay)]
        chance = random.Random(f"{seed} {part}")
        files = sorted({path for pattern in patterns for path in root.glob(pattern)})
        pool: dict[str, list[Mutant]] = {}
        for path in files:
            for one in mutants(path.relative_to(root).as_posix(), path.read_bytes()):
                pool.setdefault(one.operator, []).append(one)
        lines = {(one.file, one.line) for one in stay}
        while len(stay) < wanted and pool:
            operator = chance.choice(sorted(pool))
            one = pool[operator].pop(chance.randrange(len(pool[operator])))
            if not pool[operator]:
                del pool[operator]
            changed = one.apply((root / one.file).read_bytes())
            if one.name not in names and (one.file, one.line) not in lines and compiles(changed):
                lines.add((one.file, one.line))
                names.add(one.name)
                stay.append(one)
                drawn.append((len(stay) / wanted, part, one))
    return [(part, one) for _, part, one in sorted(drawn, key=lambda row: row[0])]


def _still_there(kept: Sequence[dict], root: Path) -> list[tuple[str, Mutant]]:
    """(part, mutant) of the rows whose change can still be made: of several places the nearest."""
    places = defaultdict(list)
    for file in sorted({row["file"] for row in kept}):
        if (root / file).is_file():
            for one in mutants(file, (root / file).read_bytes()):
                places[one.name].append(one)
    return [
        (row["part"], min(found, key=lambda one: abs(one.line - row["line"])))
        for row in kept
        if (found := places[NAME.format_map(row)])
    ]
