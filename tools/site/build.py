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

PICTURE = (
    "One training step of DeBERTa-v3-base, planned: memory by category, with and without "
    "gradient accumulation"
)
INDEX = """# Tight Fit

**Train transformers on the GPU you have.** A course of notebooks, one technique each, and a
command that says before anything runs whether a training step fits your GPU, how long it takes,
and what to change.

- **I am out of memory.** <a href="calculator/index.html">The calculator</a>: a model, a GPU, and
  what would make it fit.
- **I want to learn.** [The lessons](docs/lessons.md), 40 minutes each; begin with [00]({first}).
- **I teach.** [Ten weeks, exercises with checks, grading by machine](docs/teaching.md).

![{picture}](docs/plan.png)

How to install it, and what it can do: [README](README.md).

```{{toctree}}
:hidden:
:caption: Lessons

docs/lessons
{lessons}
```

```{{toctree}}
:hidden:
:caption: Labs

{labs}
```

```{{toctree}}
:hidden:
:caption: Pages

README
{docs}
CONTRIBUTING
CHANGELOG
```
"""


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
    return INDEX.format(
        picture=PICTURE,
        first=lessons[0].relative_to(ROOT).as_posix(),
        lessons=names(lessons),
        labs=names(labs),
        docs=names(docs),
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
