"""A training program planned in one call, as the command `tight-fit script` and Python ask it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tight_fit.checks import shown, whole
from tight_fit.gpus import GPU, as_gpu
from tight_fit.script import process, program_report, remedies
from tight_fit.script.given import SECONDS, check, load_what_is_mentioned, rank_of
from tight_fit.script.program import ToPlan, script_of
from tight_fit.script.remedies import Remedy


@dataclass(frozen=True)
class ProgramPlan:
    """What a program needs on a GPU; true in an `if` where it fits, and its text is the report.

    facts     plain values, sizes in bytes and times in seconds (`script.program_facts.facts_of`)
    remedies  the changes that were tried, those that fit first; None where none was looked for
    """

    facts: dict[str, Any]
    remedies: list[Remedy] | None = None

    def __bool__(self) -> bool:
        return bool(self.facts["fits"])

    def __str__(self) -> str:
        return "\n".join(program_report.lines(self.facts, self.remedies))


def with_remedies(
    plan: Callable[[dict[str, Any]], dict[str, Any]], gpu: GPU, quick: bool
) -> ProgramPlan:
    """What `plan` plans as it is, and, where that does not fit, the changes that were tried.

    plan   gives the facts with a change; {} changes nothing
    quick  whether no change is tried
    """
    facts = plan({})
    tried = None if facts["fits"] or quick else remedies.find(facts, gpu, plan)
    return ProgramPlan(facts, tried)


def plan_program(
    script: str | Path,
    gpu: str | GPU,
    arguments: Sequence[str] = (),
    *,
    ranks: int | None = None,
    quick: bool = False,
    seconds: int = SECONDS,
    trust: bool = False,
    output: bool = False,
    terminal: int | None = None,
) -> ProgramPlan:
    """Plan a training program, unchanged, in a copy of this process that the system isolates.

    >>> import os, tempfile
    >>> from tight_fit import plan_program
    >>> program = '''
    ... import torch
    ... model = torch.nn.Linear(4096, 4096).cuda()
    ... optimizer = torch.optim.AdamW(model.parameters())
    ... for _ in range(100):
    ...     loss = model(torch.zeros(512, 4096, device="cuda")).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ... '''
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     script = os.path.join(folder, "train.py")
    ...     with open(script, "w") as file:
    ...         _ = file.write(program)
    ...     planned = plan_program(script, "T4")
    >>> bool(planned)
    True
    >>> print(str(planned).splitlines()[2])
    YES, it fits on a T4: it needs 868.4 MiB of 14.56 GiB, 13.71 GiB to spare.

    arguments  of the program
    ranks      plan rank 0 of so many, of a program for torchrun; None takes RANK and WORLD_SIZE
               where they are set, and else one process
    quick      whether only the program as it is is planned, and no change of it
    seconds    of CPU time that one run of the program may take
    trust      whether it may run where nothing keeps apart what it writes
    output     whether what the program prints is shown
    terminal   open file that is told each second what runs; None for none
    Raises FileNotFoundError, ValueError or TypeError for what is no program, no GPU and no number,
    script.program.Refused, a ValueError, where the program cannot be planned, and
    script.program.ProgramFailed, a RuntimeError, where it fails itself: one sentence each.
    """
    script, gpu = str(script), as_gpu(gpu)
    check(script)
    if isinstance(arguments, str) or not all(isinstance(word, str) for word in arguments):
        raise TypeError(f"arguments={shown(arguments)} must be a list of words, each a text.")
    whole("seconds", seconds, 1)
    if ranks is not None:
        whole("ranks", ranks, 1)
    given = tuple(arguments)
    load_what_is_mentioned(script, given)
    work, rank = script_of(script, given), rank_of(ranks)

    def planned(change: dict[str, Any]) -> dict[str, Any]:
        wanted = ToPlan(script, given, gpu, change=change, rank=rank)
        return process.plan(wanted, work, seconds, output and not change, trust, terminal)

    return with_remedies(planned, gpu, quick)
