"""make soak, on small notebooks: what it does to them, what it finds, and that it goes on."""

import nbformat
import pytest

from tests.small import notebook
from tools.course import NOTEBOOKS, ROOT, opening, stress
from tools.course.execute import execute

CUT = """
import socket, subprocess, sys
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
print(tried(socket.socket().connect_ex, ('192.0.2.1', 80)),
      tried(socket.create_connection, ('192.0.2.1', 80)),
      tried(udp.sendto, b'x', ('192.0.2.1', 53)),
      tried(socket.getaddrinfo, 'example.com', 80), tried(socket.gethostbyname, 'example.com'),
      tried(socket.socket(socket.AF_INET6).connect, ('2001:db8::1', 80)))
"""
CHILD = (
    f"child = subprocess.run([sys.executable, '-c', {CUT!r}], capture_output=True, text=True)\n"
    "print(child.stdout)"
)
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
def test_offline_the_course_starts_and_says_what_is_left_out(folder):
    needing = "from helpers.setup import needs\nneeds('peft')\nimport peft\nx = peft"
    data = (
        "from helpers import data\n"
        "print(len(data.load('r8')['train']), 'rows')\n"
        "import by_hand.frameworks, helpers.record, helpers.parallel, helpers.plan"
    )
    path = notebook(folder, opening.first_cell(), needing, "print(x)", data, CUT, CHILD)
    done, _ = execute(path, stress.environment("offline"), ROOT / "notebooks")
    said = ["".join(output.get("text", "") for output in cell.outputs) for cell in done.cells[1:]]
    assert "No network answers, so" in said[0] and "attach a bundle" in said[0]
    assert "cells that need it are left out" in said[0]
    assert said[1].startswith("This cell is left out: it needs peft")
    assert said[2].startswith("This cell is left out: it uses `x` of a cell that needs peft")
    assert said[3] == "5485 rows\n"
    for text in said[4:]:
        assert text.split() == ["through"] * 3 + ["cut"] * 6


@pytest.mark.night
def test_what_needs_the_network_fails_and_the_others_have_their_turn(folder, capfd):
    paths = [
        notebook(folder, "import urllib.request\nurllib.request.urlopen('http://example.com')"),
        notebook(folder, "1 + 1", name="01_b"),
    ]
    assert stress.soak(paths, only="offline") == 1
    said = capfd.readouterr().out
    assert "The soak has cut the network: example.com" in said and "1/1 cells" in said
    assert "Failed: 00_small (offline)." in said


@pytest.mark.night
def test_a_gpu_without_kernels_ends_in_advice_and_the_rest_runs_on_the_cpu(folder):
    real = nbformat.read(next(NOTEBOOKS.glob("00_*.ipynb")), 4)
    sources = [cell.source for cell in real.cells if cell.cell_type == "code"]
    said = stress.advised(notebook(folder, *sources[:2], AFTERWARDS), NOTEBOOKS)
    assert said.startswith(
        "Profile mini: the small bundled models (there is a GPU, but it cannot run this PyTorch "
        "(CUDA error: no kernel image"
    )
    assert "on Kaggle choose the T4 accelerator" in said
