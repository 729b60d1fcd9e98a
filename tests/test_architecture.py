"""The house as docs/architecture.md draws it: which room may import which, no circle, a small core.

Every import counts: those inside functions and those for type checkers as well.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("helpers", "exercises", "benchmarks", "tools")
ROOMS = ("data", "memory", "plan", "parallel", "strategy", "kernels", "mini")

# Floors from the ground up. A module imports only from floors below its own, or from its own room.
FLOORS = (
    {"units", "values", "files", "torch_private"},
    {"gpus", "recipe", "hub"},
    {"data", "kernels"},
    {"model_changes"},
    {"models", "optimizers"},
    {"step", "profile"},
    {"memory", "checkpoint"},
    {"train", "plan"},
    {"record", "parallel", "frameworks"},
    {"tables", "plots", "panels"},
    {"strategy", "notebook_setup"},
    {"exercises", "benchmarks"},
    {"tools"},
)

# What a student reads to know how a fine-tune is made, measured and shown.
CORE = (
    "recipe",
    "models",
    "optimizers",
    "step",
    "train",
    "memory/measurement",
    "checkpoint",
    "record",
    "plots",
    "tables",
)


@cache
def sources() -> dict[str, Path]:
    """{dotted name: file} of every module of the project, tests left out."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """{module: the project's modules that it imports}, wherever in the file the import stands."""
    return {name: frozenset(_imports_of(name, path)) for name, path in sources().items()}


def _imports_of(name: str, path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relative to itself: write the whole name."
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in wanted:
            while target and target not in sources():
                target = target.rpartition(".")[0]
            if target and target != name:
                yield target


def room(module: str) -> str:
    """The room a module is in: a package of helpers, a flat module of it, or a top-level folder."""
    parts = module.split(".")
    return parts[1] if parts[0] == "helpers" and len(parts) > 1 else parts[0]


def floor(module: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(module) in rooms)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf8").splitlines())


def test_every_room_has_its_floor():
    rooms = {room(module) for module in sources()} - {"helpers", "mini"}
    assert rooms == set().union(*FLOORS)


@pytest.mark.parametrize("module", sorted(sources()))
def test_arrows_point_down(module):
    if module == "helpers":
        assert not imports()[module]
        return
    up = sorted(
        target
        for target in imports()[module]
        if room(target) != room(module) and floor(target) >= floor(module)
    )
    assert not up, f"{module} (floor {floor(module)}) reaches up or across to {', '.join(up)}"


def test_no_circle():
    """Of modules, not only of rooms; a package's `__init__` that names its parts is not counted as theirs."""
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


def test_helpers_is_small_at_the_top():
    flat = [path.stem for path in (ROOT / "helpers").glob("*.py") if path.stem != "__init__"]
    assert len(flat) <= 20, f"{len(flat)} modules lie flat in helpers/: {', '.join(sorted(flat))}"


def test_the_core_is_read_in_one_sitting():
    files = [ROOT / "helpers" / f"{name}.py" for name in CORE]
    assert len(files) <= 11 and sum(map(lines, files)) <= 1500, sum(map(lines, files))


@pytest.mark.parametrize("package", [*(f"helpers/{name}" for name in ROOMS), *PACKAGES])
def test_every_package_says_what_it_is_for(package):
    said = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf8")))
    assert said and len(said.splitlines()[0]) <= 120


def test_no_file_is_too_long_to_read():
    longest = {name: lines(path) for name, path in sources().items() if lines(path) > 420}
    assert not longest


def test_two_classes_never_share_a_name():
    homes: dict[str, str] = {}
    for module, path in sources().items():
        for node in ast.parse(path.read_text(encoding="utf8")).body:
            if isinstance(node, ast.ClassDef):
                other = homes.setdefault(node.name, module)
                assert other == module, f"{node.name} is a class in {other} and in {module}"
