"""What this machine lacks for `make record`, and what is left out because of it.

Nothing is imported to find out.
"""

from __future__ import annotations

from importlib.util import find_spec

JUPYTER = ("nbclient", "nbformat", "jupyter_client", "ipykernel", "IPython", "zmq", "traitlets")
# {modules: what is left out without them}
PARTS = {
    JUPYTER: "no lesson is run",
    ("bitsandbytes",): "steps in 8 bits and steps of Lion are left out",
    ("peft",): "steps with LoRA are left out",
    ("accelerate",): "its estimates are not shown beside the steps",
}


def missing(modules: tuple[str, ...]) -> list[str]:
    """Those of the modules that are not installed here."""
    return [name for name in modules if find_spec(name) is None]


def line() -> str:
    """One line that names what is missing and what becomes of it; "" where nothing is."""
    lacking = [(missing(modules), without) for modules, without in PARTS.items()]
    said = [f"{', '.join(names)} (so {without})" for names, without in lacking if names]
    return f"Not installed here: {'; '.join(said)}." if said else ""


def no_lessons() -> str:
    """Why no lesson can be run here, in a sentence; "" where they can."""
    names = missing(JUPYTER)
    return f"no lesson is run, as {', '.join(names)} is not installed here" if names else ""
