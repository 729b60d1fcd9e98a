"""What a kernel of `make soak` and its child processes suffer. Python runs this as it starts: soak.py puts this folder
first on PYTHONPATH. TIGHT_FIT_SOAK is "offline", no network, or "no-kernels", a GPU that cannot run this PyTorch.

It sees what Python does: what a library's own machine code connects to (the kernel's zmq, gloo between ranks) goes on.
"""

import errno
import importlib.abc
import importlib.machinery
import ipaddress
import os
import sys
from types import SimpleNamespace

NO_KERNEL = (  # CUDA's own words
    "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be asynchronously "
    "reported at some other API call, so the stacktrace below might be incorrect."
)


def cut_the_network() -> None:
    """From here on a connection or a name of another machine raises OSError at once, in every thread, for good."""
    import socket

    names = {"", "localhost", "ip6-localhost", socket.gethostname()}

    def here(host: object) -> bool:
        host = host.decode(errors="replace") if isinstance(host, bytes) else host
        if host is None or host in names:
            return True
        try:
            address = ipaddress.ip_address(str(host).partition("%")[0])
        except ValueError:  # a name, which a server would have to look up
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or address.is_unspecified

    def watch(event: str, given: tuple) -> None:
        if not event.startswith("socket."):
            return
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            end, address = given[0], given[1]
            if (
                end.family in (socket.AF_INET, socket.AF_INET6)
                and address is not None
                and not here(address[0])
            ):
                raise OSError(
                    errno.ENETUNREACH,
                    f"The soak has cut the network: {address[0]} cannot be reached",
                )
        elif event in (
            "socket.getaddrinfo",
            "socket.gethostbyname",
            "socket.gethostbyaddr",
        ) and not here(given[0]):
            raise socket.gaierror(
                socket.EAI_NONAME, f"The soak has cut the network: {given[0]} cannot be looked up"
            )

    sys.addaudithook(watch)


def no_kernels(torch) -> None:
    """Make torch say that there is one GPU, of a kind that it was not built for. What uses it raises RuntimeError."""
    if (
        os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    ):  # hidden from this process: then torch sees none
        return

    def fails(*_, **__):
        raise RuntimeError(NO_KERNEL)

    gpu = SimpleNamespace(
        name="Tesla P100-PCIE-16GB", total_memory=17_059_545_088, major=6, minor=0
    )  # bytes
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
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    torch.cuda._lazy_init = fails  # which torch calls before it makes the first tensor on a GPU


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as Python does, and runs `no_kernels` on it once it is imported."""

    def find_spec(self, fullname, path=None, target=None):
        found = (
            importlib.machinery.PathFinder.find_spec(fullname, path)
            if fullname == "torch"
            else None
        )
        if found is not None:
            load = found.loader.exec_module

            def then(module):
                load(module)
                no_kernels(module)

            found.loader.exec_module = then
        return found


MODE = os.environ.get("TIGHT_FIT_SOAK", "")
if MODE == "offline":
    cut_the_network()
elif MODE == "no-kernels":
    sys.meta_path.insert(0, _AfterTorch())
