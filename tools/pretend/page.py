"""docs/rehearsal.md: which notebooks ran on which pretended GPUs, made from docs/rehearsal.json."""

from __future__ import annotations

from helpers.tables import Table
from tight_fit.files import replace_all
from tools.pretend.cards import CARDS
from tools.pretend.kept import FILE, Kept, Recorded, Rehearsed, read

PAGE = FILE.with_suffix(".md")
FOUND_BEGIN, FOUND_END = "<!-- found -->\n", "<!-- /found -->"
# (where, what a GPU would have met, how it was found, what is so now)
FOUND = (
    (
        "scripts/ddp.py, fsdp.py, pipeline.py, tensor_parallel.py (lessons 13 to 16)",
        "two ranks on a machine with one GPU: the second asked for a GPU that is not there",
        "lesson 13 on one T4",
        "GPUs are taken where there is one for every rank, CPUs elsewhere",
    ),
    (
        "lesson 14, the sharded toy",
        "FSDP would have taken the GPU for a toy whose group and examples are the CPU's",
        "lesson 14 on one T4",
        "the toy names the CPU",
    ),
    (
        "helpers/parallel/rank.py, pipelines over NCCL",
        "two stages that both send first waited for each other for ever",
        "reading, then two pretended ranks",
        "each direction between two ranks has a communicator of its own",
    ),
    (
        "helpers/plan/for_record.py (lesson 21)",
        "ValueError on every T4: NF4's products are in bf16 inside an fp32 step, and the record "
        "asked for the planned time of bf16",
        "lesson 21 on one T4",
        "a record has no planned time where the GPU has not the arithmetic",
    ),
    (
        "scripts/tensor_parallel.py (lesson 16)",
        "two CPU ranks on a machine with one GPU: the mesh connected them over NCCL as well",
        "lesson 16 on one T4",
        "the backend is named",
    ),
    (
        "scripts/fsdp.py, scripts/cluster.py (lessons 14, 25)",
        "two ranks on a machine with one GPU: FSDP takes a GPU for every rank, and the second rank "
        "has none",
        "lesson 14 on one T4",
        "the mesh is named",
    ),
    (
        "lab 20",
        "RuntimeError: trained weights on the GPU were compared with those of a model on the CPU",
        "lab 20 on one T4",
        "they are compared on the CPU",
    ),
    (
        "by_hand/transport.py, `make record` on two GPUs",
        "in a group with gloo for the host and NCCL for GPUs, which is what PyTorch makes by "
        "default, two stages that both send first waited for each other for ever",
        "`make record` on two T4s",
        "the group's backend for GPUs decides",
    ),
    (
        "lessons 19, 20, 21",
        "out of memory on every GPU of 15 GiB, in 20 on those of 24 too: the rehearsal's narrow "
        "models had room",
        "reading; now what has no room at its true size does not run narrow either",
        "both runs of a comparison accumulate over as many micro-batches as the GPU needs",
    ),
    (
        "lessons 00, 02 to 07, 17 to 21",
        "out of memory on every GPU of 8 GB",
        "reading",
        "a GPU with less than 10 GiB runs the mini models, and the first cell says why",
    ),
    (
        "lesson 11, lesson 24",
        "Fabric's refusal was another one, about two devices; PyTorch's own ring never ran, as the "
        "first cell hides the second GPU",
        "reading",
        "the input lies beside the layer; hidden GPUs are counted",
    ),
    (
        "lessons 13, 15, 16",
        "'the same losses: False' on one A100: one rank on the GPU used TF32 in convolutions, two "
        "ranks on CPUs did not",
        "reading",
        "the scripts compute convolutions in fp32",
    ),
    (
        "lab 07, with a GPU and without the hub",
        "AssertionError: the adapter was loaded on another base, with other random weights",
        "reading",
        "on the same base",
    ),
    (
        "the magic `%%plan`",
        "RuntimeError in a kernel that has used its GPU: CUDA and autograd work in no copy of it",
        "PyTorch's build for CUDA, then a cell on one T4",
        "a sentence says so, and what to do",
    ),
    (
        "PyTorch 2.11: plans of Llama, Qwen3, Mixtral; context ranks",
        "CannotPlan: its FLOP counter refuses fewer heads of keys than of queries; a function of "
        "the ring has another name",
        "the tests with PyTorch 2.11 built for CUDA 13",
        "the course counts attention itself; both names are known",
    ),
    (
        "by_hand/transport.py, pipelines of three GPUs or more",
        "ranks named their communicators differently and waited for each other for ever",
        "reading, then six pretended ranks",
        "every rank makes all communicators, in one order",
    ),
    (
        "benchmarks/measure_step.py, `make record`",
        "the seconds of a step held the making of its batch on the CPU, up to 30 ms; the next step "
        "began before the GPU's memory was given back",
        "reading",
        "batches are there before the step; memory is given back inside the step's turn",
    ),
    (
        "`make record`",
        "a hang took every call's time, an unreadable answer or a missing wheel ended the session, "
        "another machine's session.json skipped all lessons",
        "reading",
        "a step has a limit and fails alone; what is kept is of one machine",
    ),
    (
        "lab 13",
        "the times of buckets were those at which Python queued the work",
        "reading",
        "events in the GPU's queue give the moments",
    ),
    (
        "lab 19",
        "KeyError where LoRA, or no rung at all, fits the GPU",
        "reading",
        "the cells end with what fitted",
    ),
    (
        "lab 00",
        "a claim of 25 % on mini models, of whose peak cuBLAS's workspaces are half",
        "reading",
        "the workspaces are given room",
    ),
    (
        "lesson 20, the script to copy",
        "RuntimeError on every GPU: the noise of its rounding was made on the CPU, and nothing "
        "moved its model to a GPU",
        "a newcomer's reading",
        "everything is made where the weights are, and the script takes the GPU that is there",
    ),
    (
        "`make record` without bitsandbytes or peft",
        "steps that need them were failures",
        "reading",
        "they wait for a later call",
    ),
    (
        "results/, README",
        "nothing told a record from a rehearsal",
        "building this",
        "what a pretended GPU writes is marked, and refused wherever records are kept or shown",
    ),
)
BEGIN, END = "<!-- rehearsed -->\n", "<!-- /rehearsed -->"
RECORD_BEGIN, RECORD_END = "<!-- recorded -->\n", "<!-- /recorded -->"


def table(rows: list[Rehearsed]) -> str:
    """A row for each notebook, a column for each kind and number of GPUs, in Markdown."""
    there = {(row.card, row.count) for row in rows}
    columns = [(card, count) for count in (1, 2) for card in CARDS if (card, count) in there]
    lines = []
    for name in sorted({row.notebook for row in rows}):
        line = {"notebook": name}
        for card, count in columns:
            found = [r for r in rows if (r.notebook, r.card, r.count) == (name, card, count)]
            line[f"{count} × {card}"] = _cell(found[0]) if found else ""
        lines.append(line)
    return Table(lines).to_markdown() if lines else "Nothing has been rehearsed yet."


def _cell(row: Rehearsed) -> str:
    text = f"{row.ran} of {row.cells}"
    if row.excused:
        text += f", {len(row.excused)} excused"
    if row.failed:
        text += f", {len(row.failed)} FAILED"
    return f"{text}; {row.seconds:.0f} s"


def found() -> str:
    """The defects that rehearsals, and reading for them, have shown and that were mended."""
    names = ("where", "what a GPU would have met", "found by", "now")
    return Table([dict(zip(names, row)) for row in FOUND]).to_markdown()


def _replaced(text: str, begin: str, end: str, content: str) -> str:
    """The text with what stands between two marks made anew."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + content + end + after


def _first(error: str) -> str:
    return error.splitlines()[0].replace("`", "'")


def records(rows: list[Recorded]) -> str:
    """A row for each time that `make record` was rehearsed, in Markdown."""
    lines = [
        {
            "GPUs": f"{row.count} × {row.card}",
            "minutes given": row.minutes,
            "minutes taken": " + ".join(f"{seconds / 60:.0f}" for seconds in row.seconds),
            "steps measured": row.steps,
            "furthest from its plan": f"{row.off:.1%}",
            "lessons recorded": row.lessons,
            "failed": "; ".join(row.failed) or "none",
            "left": "some" if row.left else "none",
        }
        for row in rows
    ]
    if not lines:
        return "It has not been rehearsed yet."
    return Table(lines).to_markdown()


def written(text: str, kept: Kept) -> str:
    """The page with its tables made anew."""
    contents = {
        (FOUND_BEGIN, FOUND_END): f"{found()}\n",
        (RECORD_BEGIN, RECORD_END): f"{records(kept.records)}\n",
        (BEGIN, END): _notebooks(kept.notebooks),
    }
    for (begin, end), content in contents.items():
        if begin in text:
            text = _replaced(text, begin, end, content)
    return text


def _notebooks(rows: list[Rehearsed]) -> str:
    ran, cells = sum(row.ran for row in rows), sum(row.cells for row in rows)
    excused = {(r.notebook, reason) for r in rows for reason in r.excused.values()}
    notes = "".join(f"- {name}: {reason}\n" for name, reason in sorted(excused))
    failed = "".join(
        f"- {r.notebook}, {r.count} × {r.card}, code cell {number}: `{_first(error)}`\n"
        for r in rows
        for number, error in r.failed.items()
    )
    minutes = sum(row.seconds for row in rows) / 60
    parts = [
        f"{ran} of {cells} cells ran to their end in {len(rows)} rehearsals, which took "
        f"{minutes:.0f} minutes on a busy machine. An empty field has not been rehearsed.\n"
    ]
    parts.append(f"\n{table(rows)}\n")
    if notes:
        parts.append(f"\nExcused, as a rehearsal has not what the cell speaks of:\n\n{notes}")
    if failed:
        parts.append(f"\nFailed:\n\n{failed}")
    return "".join(parts)


def write() -> None:
    """Write the page."""
    replace_all(PAGE.parent, {PAGE.name: written(PAGE.read_text(encoding="utf8"), read())})
