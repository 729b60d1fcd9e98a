"""make soak, on small notebooks: what it does to them, what it finds, and that it goes on."""

import sys
import time

import nbformat
import psutil
import pytest

from tests.small import notebook
from tools.course import NOTEBOOKS, ROOT, interrupt, opening, stress
from tools.course.execute import execute
from tools.course.notebooks import Failed

CUT = """
import socket, subprocess, sys, time
begun = time.monotonic()
def tried(call, *given):
    try:
        call(*given)
        return 'through'
    except OSError as error:
        return 'cut' if 'The soak has cut the network' in str(error) else repr(error)
server = socket.create_server(('127.0.0.1', 0))
port = server.getsockname()[1]
one, other = socket.socketpair()
print(tried(socket.create_connection, ('127.0.0.1', port)),
      tried(socket.create_connection, ('localhost', port)), tried(one.sendall, b'x'))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print(tried(socket.socket().connect, ('192.0.2.1', 80)),
      tried(socket.socket().connect_ex, ('192.0.2.1', 80)),
      tried(socket.create_connection, ('192.0.2.1', 80)),
      tried(udp.sendto, b'x', ('192.0.2.1', 53)),
      tried(socket.getaddrinfo, 'example.com', 80), tried(socket.gethostbyname, 'example.com'),
      tried(socket.socket(socket.AF_INET6).connect, ('2001:db8::1', 80)))
print(time.monotonic() - begun < 5)
"""
AFTERWARDS = """
import subprocess, sys, torch
code = 'import torch; print(torch.cuda.is_available())'
child = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
assert child.stdout == 'False\\n'
try:
    torch.zeros(1, device='cuda')
except (RuntimeError, AssertionError) as error:  # torch's own, which its builds word differently
    assert 'no kernel image' not in str(error)
else:
    raise RuntimeError('a kernel ran')
"""


@pytest.mark.night
def test_order_runs_all_every_round_and_goes_on_after_a_failure(folder, capfd):
    paths = [
        notebook(folder, "1 + 1", name="00_a"),
        notebook(folder, "1 / 0", name="01_b"),
        notebook(folder, "2", name="02_c"),
    ]
    before = [path.read_bytes() for path in paths]
    assert stress.soak(paths, rounds=2, seed=1, only="order") == 1
    said = capfd.readouterr().out
    lines = said.splitlines()
    ran = [line[:4] for line in lines if " cells " in line]
    assert sorted(ran[:3]) == sorted(ran[3:]) == ["00_a", "01_b", "02_c"]
    assert said.count("ZeroDivisionError: division") == 2
    assert "Soak, order: 2 of 6 runs failed" in said
    table = {words[0]: words[1:] for words in map(str.split, lines[-3:])}
    assert [table[name][0] + table[name][-1] for name in ("00_a", "01_b", "02_c")] == [
        "20",
        "22",
        "20",
    ]
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.night
def test_offline_cuts_the_kernel_and_its_children_off_but_not_from_this_machine(folder):
    child = (
        f"child = subprocess.run([sys.executable, '-c', {CUT!r}], capture_output=True, text=True)\n"
        "print(child.stdout)"
    )
    done, _ = execute(notebook(folder, CUT, child), stress.environment("offline"))
    for cell in done.cells[1:]:
        assert cell.outputs[0].text.split() == ["through"] * 3 + ["cut"] * 7 + ["True"]


@pytest.mark.night
def test_offline_the_course_imports_and_its_first_cell_says_what_is_left_out(folder):
    first = opening.first_cell()
    needing = "from helpers.setup import needs\nneeds('peft')\nimport peft\nx = peft"
    data = (
        "from helpers import data\n"
        "print(len(data.load('r8')['train']), 'rows')\n"
        "import by_hand.frameworks, helpers.record, helpers.parallel, helpers.plan"
    )
    path = notebook(folder, first, needing, "print(x)", data)
    done, _ = execute(path, stress.environment("offline"), ROOT / "notebooks")
    said = ["".join(output.get("text", "") for output in cell.outputs) for cell in done.cells[1:]]
    assert "No network answers, so" in said[0] and "attach a bundle" in said[0]
    assert "cells that need it are left out" in said[0]
    assert said[1].startswith("This cell is left out: it needs peft")
    assert said[2].startswith("This cell is left out: it uses `x` of a cell that needs peft")
    assert said[3] == "5485 rows\n"


@pytest.mark.night
def test_offline_reports_what_needs_the_network(folder, capfd):
    paths = [
        notebook(folder, "import urllib.request\nurllib.request.urlopen('http://example.com')"),
        notebook(folder, "1 + 1", name="01_b"),
    ]
    assert stress.soak(paths, only="offline") == 1
    said = capfd.readouterr().out
    assert "The soak has cut the network: example.com cannot be looked up" in said
    assert "1 of 2 runs failed" in said


@pytest.mark.night
def test_interrupted_runs_again_in_the_same_kernel(folder, tmp_path, capfd):
    seen = tmp_path / "seen"
    path = notebook(
        folder,
        f"import os, time\nfile = open({str(seen)!r}, 'a')\n"
        "print(os.getpid(), file=file, flush=True)",
        "x = 1",
        "quick = True",
        "first = 'again' not in globals()\nagain = True\ntime.sleep(60 if first else 0)",
        "print('end', file=file, flush=True)",
    )
    assert interrupt.run_interrupted(path, stress.environment(), folder) == 4
    one, two, end = seen.read_text().split()
    assert one == two and end == "end"
    assert "interrupted in cell 4, code cell 4 of 5" in capfd.readouterr().out


@pytest.mark.night
def test_interrupted_finds_a_process_left_behind_and_ends_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(interrupt, "GRACE", 2.0)
    seen = tmp_path / "seen"
    sleep = f"[{sys.executable!r}, '-c', 'import time; time.sleep(60)']"
    child = f"subprocess.Popen({sleep}, start_new_session=True)"
    path = notebook(
        folder,
        "import pathlib, subprocess, time",
        f"child = {child}\npathlib.Path({str(seen)!r}).write_text(str(child.pid))\ntime.sleep(60)",
    )
    with pytest.raises(
        Failed, match="left processes behind after the interrupt in cell 2; alive, the kernel among"
    ) as caught:
        interrupt.run_interrupted(path, stress.environment(), folder)
    assert f"    {seen.read_text()} {sys.executable} -c import time" in str(caught.value)
    end = time.monotonic() + 5
    while psutil.pid_exists(int(seen.read_text())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(seen.read_text()))


@pytest.mark.night
def test_interrupted_finds_what_an_interrupt_breaks_and_a_notebook_too_short(folder):
    held = notebook(
        folder,
        "import time",
        "if 'held' in globals(): raise RuntimeError('held')\nheld = 1\ntime.sleep(60)",
    )
    with pytest.raises(Failed, match="(?s)failed in cell 2 .*RuntimeError: held"):
        interrupt.run_interrupted(held, stress.environment(), folder)
    with pytest.raises(Failed, match="no cell in its second half that lasts long enough"):
        interrupt.run_interrupted(notebook(folder, "1", "2"), stress.environment(), folder)


@pytest.mark.night
def test_a_gpu_without_kernels_ends_in_advice_and_the_rest_runs_on_the_cpu(folder):
    real = nbformat.read(next(NOTEBOOKS.glob("00_*.ipynb")), 4)
    path = notebook(
        folder, *[cell.source for cell in real.cells if cell.cell_type == "code"][:2], AFTERWARDS
    )
    said = stress.advised(path, NOTEBOOKS)
    assert said.startswith(
        "Profile mini: the small bundled models (there is a GPU, but it cannot run this PyTorch "
        "(CUDA error: no kernel image"
    )
    assert "on Kaggle choose the T4 accelerator" in said
