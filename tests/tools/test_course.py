"""The tooling behind make: executing, caching, cleaning, on small notebooks."""

import os
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.small import AFTER, BEFORE, FIGURE, files_in, notebook, writing
from tools.course import ROOT, build, clean
from tools.course.execute import Failed, execute
from tools.course.notebooks import chosen

# Choosing and executing


def test_chosen_takes_numbers_and_names(folder):
    paths = [notebook(folder, name=name) for name in ("02_b", "00_a", "11_c")]
    assert [path.stem for path in chosen([], folder)] == ["00_a", "02_b", "11_c"]
    assert chosen(["2", "11_c.ipynb"], folder) == [paths[0], paths[2]]
    with pytest.raises(ValueError, match="no notebook '7': choose from 00, 02, 11"):
        chosen(["7"], folder)


def test_execute_uses_this_python_with_the_environment_given(folder, capfd):
    path = notebook(
        folder,
        "import sys, os\nprint(sys.executable)\n"
        "print(os.environ['TIGHT_FIT_RUNS'])\nprint(os.getcwd())",
    )
    done, seconds = execute(path, {"TIGHT_FIT_RUNS": "somewhere"})
    assert done.cells[1].outputs[0].text.split() == [sys.executable, "somewhere", str(folder)]
    assert done.cells[1].execution_count == 1 and seconds > 0
    said = capfd.readouterr()
    assert "00_small" in said.out and "1/1 cells" in said.out and said.out.count("\n") == 1
    assert said.err == ""


def test_a_failing_cell_is_shown(folder):
    path = notebook(folder, "x = 1", "y = 2\ny / 0", "z = 3")
    with pytest.raises(Failed) as caught:
        execute(path, {})
    text = str(caught.value)
    assert "00_small.ipynb failed in cell 2 (code cell 2 of 3)" in text
    assert "    y = 2\n    y / 0" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "\x1b" not in text


# make run


def test_run_writes_pages_and_tables_and_then_nothing_twice(folder, tmp_path, capsys, monkeypatch):
    path, out = notebook(folder, writing(BEFORE, AFTER), FIGURE), tmp_path / "build"
    build.run([path], "make run", out)
    said = capsys.readouterr().out
    for words in (
        "2/2 cells",
        "before: accumulation=1",
        "after: accumulation=2",
        "html/index.html",
    ):
        assert words in said
    made = files_in(out)
    wanted = "html/index.html html/00_small.html done/00_small.json"
    wanted += " runs/00_small.before.json runs/00_small.after.json"
    assert set(made) == {*wanted.split()}
    page, index = (made[f"html/{name}.html"].decode() for name in ("00_small", "index"))
    assert "data:image/png;base64" in page and "<h1" in page
    assert '<a href="00_small.html">' in index and "after: accumulation=2" in index

    build.run([path], "make run", out)
    said = capsys.readouterr().out
    assert "up to date" in said and "cells" not in said and "after: accumulation=2" in said
    assert files_in(out) == made
    key = build.fingerprint(path)
    for place in ("html/00_small.html", "runs/00_small.before.json"):
        (out / place).unlink()
        assert build._done(path, out) is None, place
        (out / place).write_bytes(made[place])
    assert build._done(path, out) == key
    with monkeypatch.context() as other:
        other.setenv("TIGHT_FIT_PROFILE", "full")
        assert build.fingerprint(path) != key, "another profile"
    notebook(folder, writing(BEFORE), "1 + 1")  # which no longer makes the other run
    build.run([path], "make run", out)
    assert "cells" in capsys.readouterr().out
    assert [path.name for path in (out / "runs").iterdir()] == ["00_small.before.json"]


def test_a_failed_notebook_leaves_the_good_pages_and_runs(folder, tmp_path):
    out = tmp_path / "build"
    build.run([notebook(folder, writing(BEFORE))], "make run", out)
    good = files_in(out)
    with pytest.raises(Failed, match="(?s)os._exit.*DeadKernelError"):
        build.run([notebook(folder, writing(AFTER), "os._exit(1)")], "make run", out)
    assert files_in(out) == good and not list(out.glob("unfinished-*"))


# Cleaning


def test_clean_takes_what_only_lives_in_a_kernel():
    widget = {clean.WIDGET: {"model_id": "1", "version_major": 2, "version_minor": 0}}
    shown = [
        {"text/plain": "IntSlider(value=0)"},
        {"text/plain": "vit:   0%|          | 0/4 [00:00<?, ?it/s]"},
        {"text/plain": "VBox(children=())", "image/png": "iVBO"},
        {"text/plain": "batch 16: 9 GiB"},
    ]
    outputs = [new_output("display_data", widget | data) for data in shown]
    outputs.append(new_output("stream", name="stdout", text="kept"))
    facts = {"tags": ["a"], "execution": {"start": "now"}}
    cell = new_code_cell("x", outputs=outputs, execution_count=3, metadata=facts)
    own = {"widgets": {"s": 1}, "kernelspec": {"name": "mine", "display_name": "Mine"}}
    done = clean.clean(new_notebook(cells=[cell], metadata=own))
    assert done.metadata == {"kernelspec": clean.KERNEL, "language_info": {"name": "python"}}
    (cell,) = done.cells
    assert cell.metadata == {"tags": ["a"]} and cell.execution_count == 3
    assert [dict(one.get("data", {"text": one.get("text")})) for one in cell.outputs] == [
        {"image/png": "iVBO"},
        {"text/plain": "batch 16: 9 GiB"},
        {"text": "kept"},
    ]


@pytest.mark.parametrize("text", ["/".join(["", "home", "me", "x.py"]), str(ROOT), "C:\\Users\\me"])
def test_clean_refuses_a_path_and_leaves_the_file(tmp_path, text):
    path = tmp_path / "00_small.ipynb"
    path.write_text("as it was")
    cell = new_code_cell(
        "x", outputs=[new_output("stream", name="stdout", text=f"see {text} there")]
    )
    with pytest.raises(ValueError, match="00_small.ipynb names an absolute path .cell 0, output"):
        clean.write(new_notebook(cells=[cell]), path)
    assert path.read_text() == "as it was" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "text", ["and/or", "https://github.com/home/x", "a / b", "../home/x", "rows/s", "</home>"]
)
def test_clean_takes_no_text_for_a_path(text):
    assert clean.paths(new_notebook(cells=[new_markdown_cell(text)])) == []


def test_save_writes_in_place(folder, monkeypatch):
    path = notebook(folder, "import os\nprint(repr(os.environ['TIGHT_FIT_RUNS']))", FIGURE)
    build.save([path], "make notebooks")
    cells = nbformat.read(path, 4).cells
    assert cells[1].outputs[0].text == "''\n" and "image/png" in cells[2].outputs[0].data
    text = path.read_text()
    clean.rewrite(path)
    assert path.read_text() == text


def test_an_interrupted_run_keeps_nothing_and_leaves_no_kernel(folder, tmp_path):
    seen = tmp_path / "kernel"
    source = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(seen)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    program = (
        "from pathlib import Path\nfrom tools.course.execute import execute\n"
        f"try:\n    execute(Path({str(notebook(folder, source))!r}), {{}})\n"
        "except KeyboardInterrupt:\n    print('stopped')"
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **streams)
    while not (seen.is_file() and seen.read_text()):
        time.sleep(0.1)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0].endswith("stopped\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(seen.read_text()), 0)
