"""The tree of files as an isolated process sees it: everything that is here, written to in memory.

Each file system gets an overlay whose upper layer is memory. Linux gives no overlay of a folder
below which something else is mounted, so such a folder is made anew, with an overlay for each
folder in it. Devices that hold something are left out; /proc and /sys can only be read.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tight_fit.isolation import system
from tight_fit.isolation.landlock import DEVICES

LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
TOLD = ("cpuinfo", "meminfo", "stat", "version", "loadavg", "uptime")  # of /proc
HIDDEN = ("/run",)  # sockets by which services of this machine would act for the process


@dataclass(frozen=True)
class IsolatedFiles:
    """What an isolated process finds.

    memory  bytes that it may write, /dev/shm included
    reached folders that it finds as they are, with sockets on which somebody listens; read-only
    hidden  folders that it finds empty, where nothing that it needs lies below
    """

    memory: int
    reached: tuple[str, ...]
    hidden: tuple[str, ...]

    def lay_out(self) -> None:
        """Make them the whole tree of this process, in mount and process namespaces of its own.

        Raises OSError where the system allows no such tree.
        """
        here = os.getcwd()
        system.mount("none", "/", flags=system.RECURSIVE | system.PRIVATE)
        _Tree(self, _mount_points()).build()
        os.chdir(here)


class _Tree:
    def __init__(self, places: IsolatedFiles, mounts: dict[str, str]):
        self.places, self.mounts = places, mounts
        self.stage = os.path.realpath(tempfile.gettempdir())
        self.hidden = {path for path in map(os.path.realpath, places.hidden) if _spare(path)}
        self.reached = {os.path.realpath(path) for path in places.reached}
        self.overlays: dict[str, int] = {}  # the number of the layers of each
        self.refused: OSError | None = None

    def build(self) -> None:
        # The stage hides the folder for temporary files: what is covered is opened before.
        self.under = os.open(self.stage, os.O_PATH)
        reached = {path: os.open(path, os.O_PATH) for path in self.reached}
        options = f"mode=755,size={self.places.memory}"
        system.mount("tmpfs", self.stage, "tmpfs", system.NOSUID | system.NODEV, options)
        self.root = f"{self.stage}/root"
        for name in ("root", "layers"):
            os.mkdir(f"{self.stage}/{name}")
        system.mount(self.root, self.root, flags=system.BIND)
        self._devices()
        self._cover("/")
        if self.refused is not None and not self.overlays:
            raise self.refused
        if os.geteuid():
            for path in (os.getcwd(), os.path.expanduser("~"), self.stage):
                self._own(os.path.realpath(path))
        for path in self.hidden:
            if os.path.isdir(self.root + path):
                system.mount("tmpfs", self.root + path, "tmpfs", system.NOSUID, "mode=755,size=4k")
        for path, handle in reached.items():  # an overlay of a socket is another socket
            system.mount(f"/proc/self/fd/{handle}", self.root + path, flags=system.BIND)
            system.make_read_only(self.root + path)
        self._system()
        system.make_root(self.root)
        for handle in (self.under, *reached.values()):
            os.close(handle)

    def _cover(self, path: str) -> None:
        """Let `path` be in the new tree what it is here, in layers of its own."""
        target = self.root + path
        if path in ("/proc", "/sys", "/dev"):
            return
        os.makedirs(target, exist_ok=True)
        if path in self.hidden:
            return
        if not self._below(path):
            self._overlay(path, target)
            return
        try:
            found, entries = os.stat(self._real(path)), list(os.scandir(self._real(path)))
        except OSError:
            return  # not ours to read: it stays empty
        os.chmod(target, stat.S_IMODE(found.st_mode))
        for entry in entries:
            inner = os.path.join(path, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), self.root + inner)
            elif entry.is_dir():
                self._cover(inner)
            elif entry.is_file():
                Path(self.root + inner).touch()
                system.mount(entry.path, self.root + inner, flags=system.BIND)
                system.make_read_only(self.root + inner)

    def _own(self, path: str) -> None:
        """Give a folder layers of its own where folders above it are another user's.

        To write below them, the system would have to make them anew, which only root may.
        """
        owned = []
        for place in (path, *map(str, Path(path).parents)):
            try:
                if os.stat(self._real(place)).st_uid == os.geteuid():
                    owned.append(place)
            except OSError:
                continue  # not ours to look at
        top = owned[-1] if owned else path
        if top not in self.overlays and not self._below(top):
            self._overlay(top, self.root + top)

    def _below(self, path: str) -> list[str]:
        return [place for place in self.mounts if place.startswith(path.rstrip("/") + "/")]

    def _real(self, path: str) -> str:
        """A path by which a folder is found although the stage lies over its parent."""
        if path == self.stage or path.startswith(self.stage + "/"):
            return f"/proc/self/fd/{self.under}{path[len(self.stage) :]}"
        return path

    def _overlay(self, path: str, target: str) -> None:
        number = len(self.overlays)
        upper, work = (f"{self.stage}/layers/{number}{end}" for end in ("u", "w"))
        os.makedirs(upper, exist_ok=True)  # of one that was refused
        os.makedirs(work, exist_ok=True)
        try:
            lower = os.open(self._real(path), os.O_PATH | os.O_DIRECTORY)
        except OSError:
            return  # not ours to read: it stays empty
        try:  # by its descriptor, as a name may hold what ends an option
            found = os.fstat(lower)
            os.chmod(upper, stat.S_IMODE(found.st_mode))
            layers = f"lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={work},userxattr"
            system.mount("overlay", target, "overlay", system.NOSUID | system.NODEV, layers)
            self.overlays[path] = number
        except OSError as error:  # one that takes no overlay can be read
            self.refused = self.refused or error
            if _is_mounted(f"/proc/self/fd/{lower}", target):
                system.make_read_only(target)
        finally:
            os.close(lower)

    def _devices(self) -> None:
        folder = f"{self.root}/dev"
        os.makedirs(f"{folder}/shm", mode=0o1777)
        os.chmod(f"{folder}/shm", 0o1777)
        for name in DEVICES:
            Path(folder, name).touch()
            system.mount(f"/dev/{name}", f"{folder}/{name}", flags=system.BIND)
            system.make_read_only(f"{folder}/{name}")  # its mode and times; a device is written to
        for name, to in LINKS.items():
            os.symlink(to, f"{folder}/{name}")

    def _system(self) -> None:
        """/proc and /sys, which nobody writes to.

        /proc is that of the own processes where the system gives it, else the one that is here,
        else files with what it says of the machine.
        """
        proc, sys_ = f"{self.root}/proc", f"{self.root}/sys"
        os.makedirs(proc, exist_ok=True)
        os.makedirs(sys_, exist_ok=True)
        flags = system.NOSUID | system.NODEV | system.NOEXEC
        if _is_mounted("proc", proc, "proc", flags) or _is_mounted("/proc", proc):
            system.make_read_only(proc)
        else:
            for name in TOLD:
                Path(proc, name).write_bytes(Path("/proc", name).read_bytes())
        if _is_mounted("/sys", sys_):
            system.make_read_only(sys_)


def _is_mounted(
    source: str, target: str, kind: str = "", flags: int = system.BIND | system.RECURSIVE
) -> bool:
    """Whether it could be mounted: containers refuse /proc, or mask parts of it."""
    try:
        system.mount(source, target, kind, flags)
    except OSError:
        return False
    return True


def _mount_points() -> dict[str, str]:
    """{place: kind of the file system} of what is mounted in this process's tree."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        place = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        found[place] = fields[fields.index("-") + 1]
    return found


def _spare(folder: str) -> bool:
    """Whether a process can do without what lies in a folder."""
    needed = (os.getcwd(), sys.prefix, sys.base_prefix, __file__)
    return not any(os.path.realpath(path).startswith(folder + os.sep) for path in needed)
