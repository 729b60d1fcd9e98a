"""A fixed sample of mutants, drawn part by part so that every part of the engine is in it."""

from __future__ import annotations

import random
from pathlib import Path

from tools.mutants.operators import Mutant, compiles, mutants

ROOT = Path(__file__).parents[2]
SEED = 0

# {part: (how many mutants, the files that they are drawn from)}
PARTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "step and loop": (16, ("helpers/step.py", "helpers/train.py")),
    "techniques": (14, ("helpers/techniques/*.py",)),
    "optimizers, adapters, loss": (
        12,
        (
            "helpers/optimizers.py",
            "helpers/model_changes.py",
            "helpers/language/chunked_loss.py",
        ),
    ),
    "tracker": (
        18,
        tuple(f"helpers/memory/{name}.py" for name in ("tracker", "trace", "flops", "cublas")),
    ),
    "allocator": (10, ("helpers/memory/allocator.py",)),
    "layers traced once": (12, ("helpers/memory/splice.py", "helpers/memory/repeated_layers.py")),
    "planner": (22, ("helpers/plan/*.py",)),
    "time": (12, ("helpers/timing/*.py",)),
    "layouts and search": (14, ("helpers/strategy/plan_layout.py", "helpers/strategy/search*.py")),
    "schedules": (6, ("helpers/parallel/schedules.py",)),
    "checks of answers": (6, ("exercises/check.py",)),
    "fields and values": (8, ("helpers/fields/*.py", "helpers/values.py")),
}


def draw(root: Path = ROOT, seed: int = SEED) -> list[tuple[str, Mutant]]:
    """(part, mutant) of the sample: at most one mutant per line, every operator alike likely.

    Parts take turns, so that the first of them are a fair sample as well.
    """
    drawn: list[tuple[float, str, Mutant]] = []
    for part, (wanted, patterns) in PARTS.items():
        chance = random.Random(f"{seed} {part}")
        files = sorted({path for pattern in patterns for path in root.glob(pattern)})
        pool: dict[str, list[Mutant]] = {}
        for path in files:
            for one in mutants(path.relative_to(root).as_posix(), path.read_bytes()):
                pool.setdefault(one.operator, []).append(one)
        lines: set[tuple[str, int]] = set()
        while len(lines) < wanted and pool:
            operator = chance.choice(sorted(pool))
            one = pool[operator].pop(chance.randrange(len(pool[operator])))
            if not pool[operator]:
                del pool[operator]
            changed = one.apply((root / one.file).read_bytes())
            if (one.file, one.line) not in lines and compiles(changed):
                lines.add((one.file, one.line))
                drawn.append((len(lines) / wanted, part, one))
    return [(part, one) for _, part, one in sorted(drawn, key=lambda row: row[0])]
