"""What docs/architecture.md draws: which package may import which, no circle, few files.

Every import counts: those inside functions, those for type checkers, and modules that a string
names, as for `python -m` and `importlib.import_module`.
"""

import ast
import importlib
from functools import cache
from pathlib import Path

import pytest

import helpers
from tests import durations
from tight_fit.command import question

ROOT = Path(__file__).parents[1]
PACKAGES = ("tight_fit", "helpers", "by_hand", "exercises", "benchmarks", "tools")
ROOMS = (
    "isolation", "gpus", "techniques", "kernels", "trace", "memory", "models", "plans", "layouts",
    "search", "script", "command",
)  # fmt: skip
COURSE = {"helpers", "by_hand", "exercises", "benchmarks", "tools", "tests", "notebooks"}
LENGTH = 420  # of a file in lines
MODULES = 25  # of helpers/

# The folders of tests/ that mirror packages. The flat modules of helpers/ are tested in core, what
# starts ranks in parallel.
TESTED = {*ROOMS, *PACKAGES} - {"tight_fit", "helpers", "gpus"} | {"core", "plan", "parallel"}

# Layers from the lowest up. A module imports only from layers below its own, or its own package.
LAYERS = (
    {"tight_fit/optimizer_kinds"},
    {f"tight_fit/{name}" for name in ("units", "checks", "files", "torch_private", "old_torchao")}
    | {"tight_fit/isolation"},
    {"tight_fit/packages"},
    {"tight_fit/gpus", "tight_fit/techniques"},
    {"tight_fit/kernels"},
    {"tight_fit/trace"},
    {"tight_fit/memory", "tight_fit/models"},
    {"tight_fit/plans"},
    {"tight_fit/layouts"},
    {"tight_fit/search", "tight_fit/script"},
    {"tight_fit/command", "tight_fit/callback"},
    {"tight_fit/__main__", "helpers"},
    {"recipe", "keeper"},
    {"batching", "chat", "sets"},
    {"data"},
    {"models"},
    {"measure", "checkpoint", "profile"},
    {"train", "plan"},
    {"ladder", "record"},
    {"tables", "plots", "panels"},
    {"kept_layouts", "by_hand", "setup", "sweeps"},
    {"parallel"},
    {"show"},
    {"exercises", "benchmarks"},
    {"tools"},
)


@cache
def sources() -> dict[str, Path]:
    """{dotted name: file} of every module of the project, tests left out."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf8"))


@cache
def imports() -> dict[str, frozenset[str]]:
    """{module: the project's modules that it imports}, wherever in the file the import stands."""
    return {name: frozenset(_imports_of(name, path)) for name, path in sources().items()}


def _imports_of(name: str, path: Path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and node.value in _dotted_names():
            wanted = [node.value]
        else:
            continue
        for target in wanted:
            while target and target not in sources():
                target = target.rpartition(".")[0]
            if target and target != name:
                yield target


@cache
def _dotted_names() -> frozenset[str]:
    return frozenset(name for name in sources() if "." in name)


def package_of(module: str) -> str:
    """A module of helpers, a room or module of tight_fit, or a top-level folder."""
    parts = module.split(".")
    if parts[0] == "tight_fit":
        return "/".join(parts[:2])
    return parts[1] if parts[0] == "helpers" and len(parts) > 1 else parts[0]


def layer_of(module: str) -> int:
    """The number of the layer that a module is in, counted from the lowest."""
    return next(number for number, packages in enumerate(LAYERS) if package_of(module) in packages)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf8").splitlines())


def test_every_package_has_its_layer():
    packages = {package_of(module) for module in sources()} - {"tight_fit"}
    assert packages == set().union(*LAYERS)


def test_arrows_point_down():
    up = [
        f"{module} (layer {layer_of(module)}) reaches up or across to {target}"
        for module in sources().keys() - {"helpers", "tight_fit"}  # of their parts
        for target in imports()[module]
        if package_of(target) != package_of(module) and layer_of(target) >= layer_of(module)
    ]
    assert not up


def test_no_circle():
    """Of modules, not only of packages; without `__init__` files, which may name their parts."""
    packages = {module for module in sources() if sources()[module].name == "__init__.py"}
    arrows = {
        module: imports()[module] - packages for module in sources() if module not in packages
    }
    done: set[str] = set()

    def walk(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a circle: {' -> '.join([*way[way.index(module) :], module])}"
        if module not in done:
            for target in sorted(arrows[module]):
                walk(target, (*way, module))
            done.add(module)

    for module in sorted(arrows):
        walk(module, ())


def test_no_file_is_too_long_to_read():
    """And helpers, what a student opens, is few modules that all lie flat."""
    assert not {name: lines(path) for name, path in sources().items() if lines(path) > LENGTH}
    modules = sorted((ROOT / "helpers").rglob("*.py"))
    assert {path.parent.name for path in modules} == {"helpers"}
    assert len(modules) <= MODULES, f"{len(modules)} modules: {[path.stem for path in modules]}"


def test_two_classes_never_share_a_name():
    """Classes inside functions and classes count as well."""
    homes: dict[str, str] = {}
    for module, path in sources().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                other = homes.setdefault(node.name, module)
                assert other == module, f"{node.name} is a class in {other} and in {module}"


def test_a_private_name_stays_in_its_module():
    used = {module: names for module in sources() if (names := sorted(_private_names(module)))}
    assert not used, "\n".join(f"{module} uses {', '.join(used[module])}" for module in used)


def _private_names(module: str):
    """Names with a leading underscore that a module takes from another module of the project."""
    modules = {}  # what a module of the project is called here
    for node in ast.walk(tree(sources()[module])):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if f"{node.module}.{alias.name}" in sources():
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                elif node.module in sources() and alias.name.startswith("_"):
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
    for node in ast.walk(tree(sources()[module])):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            target = modules.get(ast.unparse(node.value))
            if target in sources() and not node.attr.endswith("__"):
                yield f"{target}.{node.attr}"


def test_the_tests_have_the_same_packages():
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    # Bad inputs of every package; notebooks; the site and the calculator in a browser.
    assert folders == TESTED | {"attack", "lessons", "site"}
    at_the_top = {path.name for path in (ROOT / "tests").glob("test_*.py")}
    assert at_the_top == {"test_architecture.py", "test_torch_private.py"}


def _tests_in(path: Path) -> set[str]:
    return {
        node.name
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_what_is_said_to_be_slow_is_mostly_there():
    slow = {test.partition("[")[0] for test in durations.read().slow}
    there = {
        f"{path.relative_to(ROOT).as_posix()}::{name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in _tests_in(path)
    }
    assert len(slow - there) <= len(slow) / 20, "time the tests anew: make durations"


def test_every_package_has_fast_tests():
    """`make quick` leaves out what is marked slow, and must not leave out a package."""
    slow = {test.partition("[")[0] for test in durations.read().slow}
    for folder in TESTED:
        files = list((ROOT / "tests" / folder).glob("test_*.py"))
        tests = [
            f"tests/{folder}/{path.name}::{name}" for path in files for name in _tests_in(path)
        ]
        assert len(set(tests) - slow) >= 5, folder


def test_what_waits_is_chosen_by_what_tests_take():
    taken = {"a.py::t[1]": 0.6, "a.py::t[2]": 0.3, "a.py::t[3]": 0.2, "a.py::u": 1.2, "b.py::t": 1}
    assert durations.left_out(taken, 1.6) == {"a.py::t[1]": 0.6, "a.py::u": 1.2}
    assert durations.left_out(taken, 1.6, {"a.py::u"}) == {"a.py::t[1]": 0.6}
    seconds = {"a.py::t": 4.5, "a.py::u": 0.5, "b.py::t": 1.0}  # a fixture takes 4 of them
    alone = {"a.py::t": 4.5, "a.py::u": 4.5, "b.py::t": 1.0}
    assert durations.shares(seconds, alone) == {"a.py::t": 2.5, "a.py::u": 2.5, "b.py::t": 1.0}


def test_what_notices_a_mutant_does_not_wait_for_the_night():
    timed = durations.read()
    assert timed.night <= set(timed.slow)
    assert not timed.night & durations.killers()


def test_kept_answers_are_asked_anew_after_any_change_of_what_plans_them():
    """`question.CODE` names every room that `command.answer` reaches by imports."""
    waiting, reached = ["tight_fit.command.answer"], set()
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imports()[name]
    rooms = {name.split(".")[1] for name in reached if name.count(".") > 1}
    assert rooms - {"command"} <= {*question.CODE}


def test_the_planner_imports_nothing_of_the_course():
    """Also inside functions, for type checkers, and by a string that names a module."""
    planner = [name for name in sources() if name.startswith("tight_fit")]
    assert len(planner) > 100
    assert not [
        (module, name)
        for module in planner
        for name in imports()[module]
        if name.split(".")[0] in COURSE
    ]


def test_what_has_moved_is_named_where_it_was():
    """Each old name of a module is none today, and its new one is there."""
    assert len(helpers.PLACES) > 200 and not set(helpers.PLACES) & set(sources())
    assert {*helpers.PLACES.values()} - {"tight_fit.layouts.layout.Layout"} <= set(sources())
    names = ("gpus", "plan.remedies", "timing", "memory", "data.batching", "show.epoch")
    for name in (f"helpers.{name}" for name in names):
        with pytest.raises(ImportError, match=f"{name} is .* today: import it from there."):
            importlib.import_module(name)
    with pytest.raises(ImportError, match="Parallel is tight_fit.layouts.layout.Layout today"):
        from helpers.parallel import Parallel  # noqa: F401
    with pytest.raises(ImportError, match="helpers.strategy is in helpers.kept_layouts, .*"):
        importlib.import_module("helpers.strategy.choose")
    with pytest.raises(ImportError, match="helpers.units is tight_fit.units today"):
        importlib.import_module("helpers").units  # noqa: B018
