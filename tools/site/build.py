"""Writes build/site: sources, Sphinx and the calculator.

Raises RuntimeError where Sphinx fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from helpers.plots import DRAWINGS
from tools.calculator.page import write as write_calculator
from tools.course import BUILD, ROOT
from tools.site.sources import Sources

HERE = Path(__file__).parent


def build(folder: Path = BUILD) -> Path:
    """Write the site to `folder`/site, in the place of what was there, and return that."""
    work = folder / "site-work"
    shutil.rmtree(work, ignore_errors=True)
    source = work / "source"
    (source / "_static").mkdir(parents=True)
    for name in ("site.css", "site.js"):
        shutil.copy(HERE / name, source / "_static" / name)
    sources = Sources(source)
    sources.write()
    (source / "index.md").write_text(_index(sources), encoding="utf8")
    extra = work / "extra"
    write_calculator(extra / "calculator")
    shutil.copytree(DRAWINGS, extra / "docs" / "drawings")
    sources.copy_files(extra)
    _sphinx(work)
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    shutil.move(work / "html", site)
    return site


def _index(sources: Sources) -> str:
    def names(paths: list[Path]) -> str:
        return "\n".join(path.relative_to(ROOT).with_suffix("").as_posix() for path in paths)

    lessons = [path for path in sources.notebooks if path.parent.name == "notebooks"]
    labs = [path for path in sources.notebooks if path.parent.name == "labs"]
    docs = [path for path in sources.docs if path.stem != "lessons"]
    return (
        (HERE / "index.md")
        .read_text(encoding="utf8")
        .format(
            first=lessons[0].relative_to(ROOT).as_posix(),
            lessons=names(lessons),
            labs=names(labs),
            docs=names(docs),
        )
    )


def _sphinx(work: Path) -> None:
    source = work / "source"
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-j", "2", "-c", str(HERE)]
    settings = [f"html_static_path={source / '_static'}", f"html_extra_path={work / 'extra'}"]
    for setting in settings:
        command += ["-D", setting]
    done = subprocess.run(
        [*command, "-d", str(work / "doctrees"), str(source), str(work / "html")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    if done.returncode:
        raise RuntimeError("Sphinx could not build the site: its messages are above.")
