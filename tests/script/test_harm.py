"""A planned program that moves, removes and changes its user's files leaves them as they are."""

import hashlib
import os
import re
import stat
from pathlib import Path

import pytest

from helpers.script.program import Refused
from tests.script import LOOP, run

# What a program does before its training, beside best.pt, data/1.txt and data/2.txt.
# Each asserts that the program itself sees what it has done.
DEEDS = {
    "replaces": "os.replace('best.pt', 'best.prev.pt')\nassert not os.path.exists('best.pt')\n"
    "assert open('best.prev.pt').read() == 'weights'\nassert Path('best.prev.pt').is_file()\n",
    "renames": "os.rename('best.pt', 'old.pt')\nassert open('old.pt').read() == 'weights'\n",
    "moves": "shutil.move('best.pt', 'data')\nassert open('data/best.pt').read() == 'weights'\n",
    "moves by pathlib": "Path('best.pt').rename('a.pt')\nassert not Path('best.pt').exists()\n"
    "Path('a.pt').replace('b.pt')\nassert Path('b.pt').read_text() == 'weights'\n",
    "renames along a path": "os.renames('data/1.txt', 'a/b/1.txt')\n"
    "assert open('a/b/1.txt').read() == 'one' and os.path.exists('data/2.txt')\n",
    "moves a folder": "shutil.move('data', 'data.prev')\nassert not os.path.exists('data/1.txt')\n"
    "assert sorted(os.listdir('data.prev')) == ['1.txt', '2.txt']\n",
    "renames a folder": "os.rename('data', 'prev')\nassert open('prev/2.txt').read() == 'two'\n"
    "os.mkdir('data')\nassert os.listdir('data') == []\n",
    "renames by descriptors": "here = os.open('.', os.O_RDONLY)\n"
    "there = os.open('data', os.O_RDONLY)\n"
    "os.rename('best.pt', 'best.pt', src_dir_fd=here, dst_dir_fd=there)\n"
    "assert open('data/best.pt').read() == 'weights'\n"
    "os.unlink('2.txt', dir_fd=there)\nassert not os.path.exists('data/2.txt')\n",
    "removes": "os.remove('best.pt')\nassert not os.path.exists('best.pt')\n"
    "open('best.pt', 'w').write('new')\nassert open('best.pt').read() == 'new'\n",
    "removes a folder": "shutil.rmtree('data')\nassert not os.path.exists('data/1.txt')\n"
    "os.makedirs('data/a')\nassert os.listdir('data') == ['a']\n",
    "removes a full folder": "try:\n    os.rmdir('data')\nexcept OSError: pass\n"
    "else: assert False\nassert os.path.exists('data/1.txt')\n",
    "appends": "with open('best.pt', 'a') as file: file.write('!')\n"
    "assert open('best.pt').read() == 'weights!'\n",
    "writes by a descriptor": "file = os.open('best.pt', os.O_RDWR)\n"
    "assert os.read(file, 7) == b'weights'\n"
    "os.write(file, b'!')\nos.truncate('data/1.txt', 1)\nassert open('data/1.txt').read() == 'o'\n",
    "changes a mode": "os.chmod('best.pt', 0)\nos.utime('best.pt', (1, 1))\n",
    "links": "os.link('best.pt', 'twin.pt')\nopen('twin.pt', 'a').write('!')\n"
    "os.symlink('best.pt', 'name.pt')\nassert os.path.islink('name.pt')\n",
    # Its own files and folders go as they do without a plan.
    "has a temporary folder": "with tempfile.TemporaryDirectory() as folder:\n"
    "    os.mkdir(f'{folder}/a'); open(f'{folder}/a/x', 'w').write('x')\n"
    "assert not os.path.exists(folder)\n",
    "makes its folder anew": "for _ in range(3):\n    shutil.rmtree('out', ignore_errors=True)\n"
    "    os.makedirs('out/a'); open('out/a/x', 'w').write('x')\n"
    "shutil.rmtree('out')\nassert not os.path.exists('out')\nassert not os.path.lexists('out')\n",
}  # fmt: skip
IMPORTS = "import os, shutil, tempfile\nfrom pathlib import Path\n"


def state(folder: Path) -> dict[str, tuple[int, int, str]]:
    """{path: (mode, time of the last change, digest)} of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        marks = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(marks.st_mode) else b""
        digest = hashlib.sha256(content).hexdigest()
        found[str(path.relative_to(folder))] = marks.st_mode, marks.st_mtime_ns, digest
    return found


def with_files(folder: Path) -> None:
    """What a user has."""
    (folder / "data").mkdir()
    for name, text in (("best.pt", "weights"), ("data/1.txt", "one"), ("data/2.txt", "two")):
        (folder / name).write_text(text)


@pytest.mark.parametrize("name", DEEDS)
def test_a_program_sees_what_it_did_and_its_user_s_files_stay(name, program, tmp_path):
    with_files(tmp_path)
    path = program(f"{IMPORTS}{DEEDS[name]}{LOOP}")
    before = state(tmp_path)
    assert run(path)["fits"]
    assert state(tmp_path) == before


def test_these_deeds_change_files_where_nothing_is_planned(tmp_path, monkeypatch):
    """Or the test above could not fail."""
    left = {"has a temporary folder", "makes its folder anew", "removes a full folder"}
    for name, deed in DEEDS.items():
        folder = tmp_path / re.sub(r"\W", "_", name)
        folder.mkdir()
        with_files(folder)
        monkeypatch.chdir(folder)
        before = state(folder)
        exec(IMPORTS + deed, {})
        assert (state(folder) != before) == (name not in left), name
        monkeypatch.chdir(os.path.dirname(folder))


# Ways to start another program, which would remove best.pt.
STARTS = {
    "a shell": "subprocess.run('git status; rm best.pt', shell=True)",
    "a list for a shell": "subprocess.run(['git status; rm best.pt'], shell=True)",
    "a program": "subprocess.check_call(['rm', 'best.pt'])",
    "a program by its path": "subprocess.run(b'/bin/rm best.pt'.split())",
    "under another name": "subprocess.Popen(['git', 'best.pt'], executable='/bin/rm').wait()",
    "git that removes": "subprocess.run(['git', '-C', '.', 'clean', '-fdx'])",
    "git that takes back": "subprocess.run(['git', 'checkout', '.'])",
    "git that writes": "subprocess.run(['git', 'log', '--output=best.pt'])",
    "git with a shell": "subprocess.run(['git', '-c', 'alias.x=!rm best.pt', 'x'])",
    "os.system": "os.system('rm best.pt')",
    "os.popen": "os.popen('rm best.pt').read()",
    "posix_spawn": "os.waitpid(os.posix_spawn('/bin/rm', ['rm', 'best.pt'], {}), 0)",
    "exec": "os.execvp('rm', ['rm', 'best.pt'])",
    "spawn": "os.spawnlp(os.P_WAIT, 'rm', 'rm', 'best.pt')",
    "a terminal": "import pty; pty.spawn(['rm', 'best.pt'])",
    "a thread": "import threading\n"
    "one = threading.Thread(target=subprocess.run, args=(['rm', 'best.pt'],))\n"
    "one.start(); one.join(); os.system('true')",
    "asyncio": "import asyncio\n"
    "asyncio.run(asyncio.create_subprocess_exec('rm', 'best.pt'))",
}  # fmt: skip


@pytest.mark.parametrize("name", STARTS)
def test_another_program_is_refused_in_one_sentence(name, program, tmp_path):
    with_files(tmp_path)
    path = program(f"{IMPORTS}import subprocess\n{STARTS[name]}\n{LOOP}")
    before = state(tmp_path)
    with pytest.raises(Refused) as error:
        run(path)
    said = str(error.value)
    assert re.match(r"train.py:\d+: the program starts (another program|processes)", said), said
    assert said.endswith(".") and "\n" not in said and len(said) < 250
    assert state(tmp_path) == before


def test_git_and_the_system_are_asked_as_ever(program, tmp_path):
    """What reads is started, and code that does without a program that is missing goes on."""
    text = (
        "import subprocess, platform\n"
        "said = subprocess.check_output(['git', '--version'], text=True)\n"
        "assert said.startswith('git version') and platform.processor() is not None\n"
        "try:\n    subprocess.run(['nvidia-smi'])\n"
        "except FileNotFoundError as error: assert error.errno == 2\n"
    )
    assert run(program(text + LOOP))["fits"]
