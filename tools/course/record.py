"""`make record`: run the notebooks in the full profile on a GPU and keep their runs in results/.

The runs of a notebook are kept together, after all of it succeeded and each file was read back, or
not at all.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tight_fit.files import replace_all
from tight_fit.gpus import REHEARSAL
from tools.course import ROOT
from tools.course.notebooks import Failed

if TYPE_CHECKING:
    from helpers.record import Run

RESULTS = ROOT / "results"
LIMIT = 60  # seconds that a notebook's record may take on a data-centre GPU


def record(paths: list[Path], dry: bool, out: Path | None, command: str) -> None:
    """Record notebooks, one after the other.

    One that fails is reported at once, keeps nothing, and does not stop the others, because a GPU
    is rarely at hand. Failed is then raised at the end.

    dry  use the mini profile on any device, and a folder that is thrown away unless `out` names one
    Raises ValueError without a GPU, Failed where a notebook failed or wrote no complete run.
    """
    if not dry:
        prepare(out)
    elif out:
        _check_writable(out)
    profile = "mini" if dry else "full"
    with tempfile.TemporaryDirectory(prefix="dry-record-") as thrown_away:
        folder = out or (Path(thrown_away) if dry else RESULTS)
        seconds, failed = {}, {}
        for path in paths:
            try:
                device = None if dry else "cuda"
                seconds[path.stem] = one_notebook(path, folder, profile, device, command)
            except Failed as error:
                failed[path.stem] = str(error)
                print(f"\n{error}\n", flush=True)
        print(
            "\n"
            + "\n".join(
                f"{name:32}{spent:6.1f} s{'  over a minute' if spent > LIMIT else ''}"
                for name, spent in seconds.items()
            )
        )
        if failed:
            raise Failed(
                f"{len(failed)} of {len(paths)} notebooks left no record: "
                + "; ".join(failed.values())
            )
        if dry and not out:
            print("Every run was complete. This was a dry run: nothing was kept.")


def prepare(out: Path | None) -> Path:
    """The folder for records of this machine's GPU, `out` or results/, which can be written to.

    Raises ValueError without a GPU, and where a rehearsal on a pretended GPU would write to
    results/; OSError for a folder that cannot be written to.
    """
    _need_gpu()
    folder = out or RESULTS
    if os.environ.get(REHEARSAL) and folder.resolve().is_relative_to(RESULTS):
        raise ValueError(
            "This is a rehearsal on a pretended GPU, and nothing of it is a record: name another "
            "folder than results/ with --out."
        )
    _check_writable(folder)
    return folder


def _check_writable(folder: Path) -> None:
    """Raises OSError where runs could not be kept, before the first notebook takes its minutes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _need_gpu() -> None:
    from helpers.profile import usable_cuda

    works, why = usable_cuda()
    if not works:
        raise ValueError(
            f"A record is taken on a GPU, and here it cannot be ({why}): try `make record-dry`."
        )


def one_notebook(
    path: Path,
    folder: Path,
    profile: str,
    device: str | None,
    command: str,
    until: float = float("inf"),
) -> float:
    """Execute a notebook and keep its runs in a folder, in the place of this machine's older ones.

    Gives the seconds it took. Raises Failed, and OutOfTime at the moment `until` (time.monotonic).
    """
    from tools.course.execute import execute  # only now, as steps are measured without Jupyter

    with tempfile.TemporaryDirectory(prefix="staging-") as staging:
        _, seconds = execute(
            path,
            {"TIGHT_FIT_RUNS": staging, "TIGHT_FIT_COMMAND": command, "TIGHT_FIT_PROFILE": profile},
            until=until,
        )
        texts = checked(path.stem, Path(staging), profile, device)
    machines = {name.split(".")[2] for name in texts}
    old = [
        file for file in folder.glob(f"{path.stem}.*.json") if file.name.split(".")[2] in machines
    ]
    replace_all(folder, texts, old)
    kept = checked(path.stem, folder, profile, device, set(texts))
    for name, text in kept.items():
        small = profile == "full" and '"profile": "mini"' in text
        print(f"    {name}" + ("  (mini models: the full ones could not be had)" if small else ""))
    return seconds


def checked(
    notebook: str, folder: Path, profile: str, device: str | None, names: set[str] | None = None
) -> dict[str, str]:
    """{name in results/: text} of a notebook's runs in a folder.

    Raises Failed, in one sentence, where there is none, and where one is not complete or not what
    was asked for.
    """
    from tools.course.records import read_file

    texts = {}
    for file in sorted(folder.glob("*") if names is None else (folder / name for name in names)):
        try:
            run = read_file(file)
        except ValueError as error:
            raise Failed(f"{notebook}: nothing of it was kept, as {error}") from error
        wrong = _wrong(run, notebook, profile, device)
        if wrong:
            raise Failed(f"{notebook} wrote {file.name}, which {wrong}: nothing of it was kept.")
        texts[filename(run)] = run.to_json()
    if not texts:
        raise Failed(
            f"{notebook} wrote no run: give record.run(...) a name, as '{notebook}/before'."
        )
    return texts


def _wrong(run: Run, notebook: str, profile: str, device: str | None) -> str | None:
    if run.name.split("/")[0] != notebook:
        return f"is named {run.name!r}"
    # The full profile may fall back to mini models where there is no hub.
    if profile == "mini" and run.recipe.profile != profile:
        return f"ran in the {run.recipe.profile} profile, not the {profile} one"
    if device and run.environment["device"] != device:
        return f"ran on {run.environment['device']}, not on {device}"
    return None


def filename(run: Run) -> str:
    """The file of a run, `<notebook>.<label>.<device>.json`; device is the GPU's name, or "cpu"."""
    device = (
        run.environment["name"]
        if run.environment["device"] == "cuda"
        else run.environment["device"]
    )
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{run.name.replace('/', '.')}.{slug}.json"
