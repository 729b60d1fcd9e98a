"""A fixed sample of mutants, drawn part by part so that every part of the engine is in it."""

from __future__ import annotations

import random
from pathlib import Path

from tools.mutants.operators import Mutant, compiles, mutants

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
