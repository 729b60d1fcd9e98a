"""The files that say what to install say the same, and what is imported is among it."""

import ast
import functools
import importlib.metadata
import json
import re
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import setup
from tests.small import ROOT
from tools.course.notebooks import every_notebook

# These may import only what requirements.txt names, the others what requirements-dev.txt does.
PACKAGED = ("tight_fit", "helpers", "by_hand", "exercises")
REPOSITORY = ("benchmarks", "scripts", "tools", "tests")
OWN = {*PACKAGED, *REPOSITORY, *(path.stem for path in (ROOT / "tests").glob("*.py"))}
# Packages that the code looks for first, and does without or says that they are missing.
OPTIONAL = ("deepspeed", "disentangled_flash", "timm", "torchvision")
OPTIONAL += ("litgpt", "torchao", "trl")
ASKED = ('find_spec("{}")', 'needs("{}")', 'needs("peft", "{}")')
FILES = ("requirements.txt", "requirements-dev.txt")
NO_DEPENDENCIES = "--no-deps -r requirements-data.txt -c constraints.txt"
REGISTRY = re.compile(
    r"--(extra-)?index-url|--find-links|pypi\.|pythonhosted|download\.pytorch|anaconda\.", re.I
)


def lines(text):
    return [line.strip() for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]


def read(name):
    return (ROOT / name).read_text(encoding="utf8")


def requirements(*names):
    found = [Requirement(line) for name in names for line in lines(read(name))]
    named = {canonicalize_name(one.name): one for one in found}
    assert len(named) == len(found), "a package is named twice"
    return named


EVERYTHING, PINS = requirements(*FILES), requirements("constraints.txt")
NOTEBOOKS = {canonicalize_name(one.name): one for one in setup.requirements()}
installed = functools.cache(importlib.metadata.packages_distributions)  # {module: packages}


def missing(source, wanted):
    """Modules that Python source imports, neither Python's, nor ours, nor of a package wanted."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.add(node.module.split(".")[0])
    looked_for = {name for name in OPTIONAL if any(way.format(name) in source for way in ASKED)}
    return {
        module
        for module in modules - set(sys.stdlib_module_names) - OWN - looked_for
        if not {canonicalize_name(name) for name in installed().get(module, [module])} & set(wanted)
    }


def test_what_is_imported_is_required():
    for folder in (*PACKAGED, *REPOSITORY):
        wanted = NOTEBOOKS if folder in PACKAGED else EVERYTHING
        for path in (ROOT / folder).rglob("*.py"):
            assert not missing(path.read_text(encoding="utf8"), wanted), path
    for path in every_notebook():
        cells = json.loads(path.read_text(encoding="utf8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        no_python = re.compile(r"%%writefile .*\.(ya?ml|json)")
        code = "\n".join(text for text in sources if not no_python.match(text))
        written = set(re.findall(r"%%writefile (\w+)\.py", code))  # by the notebook itself
        plain = re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE)
        assert not missing(plain, NOTEBOOKS) - written, path.name


def test_conda_says_the_same_and_data_come_without_dependencies():
    section = lines(read("environment.yml").split("- pip:\n", 1)[1])
    said = [line.removeprefix("- ").strip() for line in section]
    assert said == ["-c constraints.txt", *(line for name in FILES for line in lines(read(name)))]
    for name in ("environment.yml", "requirements-data.txt"):
        assert f"pip install {NO_DEPENDENCIES}" in read(name), name
    assert f"$(PIP) {NO_DEPENDENCIES}" in read("Makefile")


def test_releases_that_lack_what_a_lesson_uses_are_not_allowed():
    """Fabric.load's weights_only (lesson 11), torch_autocast of zero2_offload.json (lesson 12)."""
    assert not EVERYTHING["lightning-fabric"].specifier.contains("2.6.0")
    assert not EVERYTHING["deepspeed"].specifier.contains("0.17.1")


def test_ranges_admit_the_exact_pins_and_what_is_installed():
    for name, pin in PINS.items():
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), f"{name}: {pin}"
    for name, wanted in (EVERYTHING | requirements("requirements-data.txt")).items():
        pinned = str(PINS[name].specifier).removeprefix("==")
        assert wanted.specifier.contains(pinned), f"{wanted} does not admit {pinned}"
        assert wanted.specifier.contains(importlib.metadata.version(name), prereleases=True), name


def test_constraints_pin_all_that_is_brought():
    seen, ahead = set(), [(name, frozenset(one.extras)) for name, one in EVERYTHING.items()]
    while ahead:
        name, extras = ahead.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for line in importlib.metadata.requires(name) or ():
            one = Requirement(line)
            if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in ("", *extras)):
                ahead.append((canonicalize_name(one.name), frozenset(one.extras)))
    cuda = re.compile(r"nvidia-|cuda-|triton")  # torch pins these, on the systems that have them
    assert not {name for name, _ in seen if name not in PINS and not cuda.match(name)}


def test_a_notebook_asks_for_no_server_and_no_test_runner():
    """Colab and Kaggle have a Jupyter of their own, which must stay as it is."""
    assert {"torch", "ipywidgets"} <= set(NOTEBOOKS) < set(EVERYTHING)
    assert not set(NOTEBOOKS) & {"jupyterlab", "nbval", "pytest", "nbclient"}


def test_no_registry_is_named():
    named = [*FILES, "requirements-data.txt", "constraints.txt", "environment.yml", "Makefile"]
    named += ["pyproject.toml", ".pre-commit-config.yaml"]
    for name in (*named, *(ROOT / ".github").rglob("*.yml")):
        assert not REGISTRY.search(read(name)), name
