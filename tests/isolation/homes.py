"""A user's home that is a checkout as well, and a process in it that is copied in isolation."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from tests.night import few_by_day

ROOT = Path(__file__).parents[2]
NOBODY = 12345  # a user that this machine does not know


def python_for(user: int | None) -> str | None:
    """A Python of this version that a user may start, None where there is none."""
    if user is None:
        return sys.executable
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        try:
            subprocess.run([path, "-c", ""], user=user, group=user, check=True, cwd="/")
        except (OSError, subprocess.SubprocessError):
            continue
        return path
    return None


def may_be_tried(user: int) -> bool:
    return os.name == "posix" and os.geteuid() == 0 and python_for(user) is not None


USERS = [None, NOBODY] if may_be_tried(NOBODY) else [None]


def each_by_one_user(deeds: Iterable[str]) -> list:
    """(name of a deed, user) as parameters: all of them, and by day each deed by one of the users,
    who take turns."""
    pairs = [(name, user) for name in deeds for user in USERS]
    places = {pair: divmod(number, len(USERS)) for number, pair in enumerate(pairs)}
    return few_by_day(pairs, lambda pair: places[pair][0] % len(USERS) == places[pair][1])


def started(
    user: int | None, home: Path, before: str, deed: str, mark: str, **options
) -> subprocess.Popen:
    """`tests.isolation.alone` in a home, as this user; `os` is imported before."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    paths = os.pathsep.join([str(ROOT), *packages])
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": paths}
    who = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    command = [python_for(user) or "", "-B", "-m", "tests.isolation.alone"]
    command += [f"import os\n{before}", deed, mark]
    return subprocess.Popen(
        command, cwd=home, env=environment, stderr=subprocess.PIPE, text=True, **who, **options
    )


def end_of(process: subprocess.Popen) -> tuple[int, str]:
    """(exit status, what it said as errors)."""
    _, said = process.communicate(timeout=120)
    return process.returncode, said


def holds(user: int | None, home: Path, before: str, deed: str, mark: str = "x", **options) -> None:
    """Assert that nothing fails in such a process, whose deed asserts what it finds."""
    status, said = end_of(started(user, home, before, deed, mark, **options))
    assert status == 0, said


@pytest.fixture(params=USERS)
def user(request) -> int | None:
    """Who runs a process: the user of the tests, and where that is root, an ordinary one too."""
    return request.param


@pytest.fixture
def home():
    """A function that makes a user's home, which is a checkout as well, where any user comes to."""
    made = []

    def make(user: int | None) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="home-"))
        made.append(folder)
        folder.chmod(0o755)
        (folder / "data").mkdir()
        for name, text in (("best.pt", "weights"), ("data/1.txt", "1"), ("data/2.txt", "2")):
            (folder / name).write_text(text)
        setup = (
            "git init -q && git config user.email a@b && git config user.name a && "
            "git add data && git commit -qm first && echo new > data/1.txt"
        )
        subprocess.run(setup, shell=True, cwd=folder, check=True)
        with closing(sqlite3.connect(folder / "runs.db")) as database:
            database.execute("create table runs (x)")
            database.execute("insert into runs values (1)")
            database.commit()
        if user is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, user, user, follow_symlinks=False)
        return folder

    yield make
    for folder in made:
        shutil.rmtree(folder)
