"""What a traced step did to the storages of its tensors, as data.

Nothing here imports PyTorch, so that a trace that is kept can be looked at without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tight_fit.kernels.traced_ops import TracedOps

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES = range(5)
CATEGORIES = ("parameters", "gradients", "optimizer states", "activations", "temporaries")
HOST = len(CATEGORIES)  # the category of what lies in the host's memory (`techniques.host`)
PHASES = ("forward", "backward", "optimizer", "generation")
BORN, DIES, MOVES, MARK = range(4)
Event = tuple[int, int, int, int]  # kind, storage, category, phase


@dataclass
class StorageTrace:
    """What happened to the storages of a step, in order.

    bytes    size of each storage
    made_by  name of the operation that made each storage
    events   (kind, storage, category, phase), where the kind is BORN (the storage appears in a
             category), DIES (it is freed) or MOVES (it changes its category, as a finished gradient
             does), and storage is an index into `bytes` and `made_by`. While layers are left out
             there is a fourth kind, MARK (`repeated_layers`), whose storage counts the marks
    begin    number of events before the step, which tell what existed already
    reached  positions of the parameters that had a gradient when the optimizer's phase began
    flops    {phase: floating-point operations}; "recompute" counts as a phase of its own
    operations  what a GPU would run, where the tracker had a recorder; None elsewhere
    """

    bytes: list[int] = field(default_factory=list)
    made_by: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    begin: int = 0
    reached: frozenset[int] = field(default=frozenset(), compare=False)
    flops: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("forward", "recompute", "backward"), 0)
    )
    operations: TracedOps | None = field(default=None, compare=False)


def deaths_sorted(events: list[Event]) -> list[Event]:
    """The events with deaths that follow one another sorted by storage.

    Autocast frees its cached casts in the order of their addresses, which differs between runs.
    """
    ordered: list[Event] = []
    deaths: list[Event] = []
    for event in events:
        if event[0] == DIES:
            deaths.append(event)
            continue
        ordered += sorted(deaths)
        deaths = []
        ordered.append(event)
    return ordered + sorted(deaths)
