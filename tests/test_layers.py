"""The layers of the house: which room may import which. ``docs/architecture.md`` says what each of them is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import holdfast

SOURCES = Path(holdfast.__file__).parent

LAYERS = [
    ("holdfast", "__main__", "keep"),  # the public names
    ("_cli",),
    ("testing", "integrations", "dcp"),
    ("_tools",),
    ("_manager",),
    ("_save",),
    ("_load",),
    ("_dcp",),
    ("_background",),
    ("_state",),
    ("_layout",),
    ("_formats",),
    ("_ranks",),
    ("watching", "_watching"),
    ("stores", "_stores"),
    ("_compat",),
    ("_base",),
    ("_settings",),
    ("errors", "_version"),
]
"""From top to bottom. A module imports from its own layer and from those below it, inside of functions too."""

DOORS = {
    ("_load.checkpoint", "_tools.reporting.report"): "Checkpoint.report() makes what the layer of tools is for",
    ("_load.checkpoint", "_tools.inspecting.statistics"): "Checkpoint.statistics(), likewise",
    ("_load.checkpoint", "_tools.inspecting.verify"): "Checkpoint.verify() is holdfast.verify() of what is open",
    ("_load.checkpoint", "_tools.inspecting.damage"): "what Checkpoint.verify() returns, for its annotation",
}
"""The imports that point upwards, each with its reason. They are inside of functions."""

RULES = {
    "_formats": (("_layout", "_ranks", "_state"), "formats know no ranks and no live objects"),
    "_stores": (("_formats", "_layout", "_ranks"), "stores know no tensors"),
    "_ranks": (("_stores",), "how ranks agree has nothing to do with files"),
    "_layout": (("_stores",), "arithmetic knows no files"),
}


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in sorted(SOURCES.rglob("*.py"))}


def layer_of(module: str) -> int:
    room = module.partition(".")[0] or "holdfast"
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms)


@cache
def imports_of(module: str) -> list[tuple[str, bool]]:
    """What a module imports of Holdfast, and whether it does so when it is loaded."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    late = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.If)
        for inner in ast.walk(outer)
    }
    return [(imported, id(node) not in late) for node in ast.walk(tree) for imported in names_in(node)]


def names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return
    for name in names:
        package, _, rest = name.partition(".")
        if package == "holdfast":
            yield rest if rest in MODULES else rest.rpartition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module):
    upwards = {imported for imported, _ in imports_of(module) if layer_of(imported) < layer_of(module)}
    assert upwards <= {above for below, above in DOORS if below == module}


@pytest.mark.parametrize("door", DOORS, ids="->".join)
def test_a_door_is_used_and_opens_late(door):
    below, above = door
    assert (above, False) in imports_of(below)
    assert (above, True) not in imports_of(below)


@pytest.mark.parametrize("room", RULES)
def test_a_room_does_not_know_what_it_must_not(room):
    forbidden, why = RULES[room]
    for module in MODULES:
        if module.partition(".")[0] == room:
            met = {imported for imported, _ in imports_of(module) if imported.partition(".")[0] in forbidden}
            assert not met, why


def test_no_two_modules_need_each_other_to_be_loaded():
    needs = {module: {name for name, at_once in imports_of(module) if at_once} for module in MODULES}
    done: set[str] = set()

    def follow(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for needed in sorted(needs[module] - {""}):
                follow(needed, (*way, module))
            done.add(module)

    for module in MODULES:
        follow(module, ())


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/decisions.md", "CONTRIBUTING.md"])
def test_modules_that_a_page_names_are_there(page):
    text = (Path(__file__).parents[1] / page).read_text(encoding="utf-8")
    files = {file.relative_to(SOURCES).as_posix() for file in MODULES.values()}
    for named in re.findall(r"`((?!tests/|tools/)[\w/]+\.py)`", text):
        assert any(file == named or file.endswith(f"/{named}") for file in files), named


def test_every_room_is_in_the_table_of_the_architecture():
    text = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| (`[^|]*) \|", text, flags=re.MULTILINE)
    order = [room.strip("`/") for cell in named for room in cell.split(", ")]
    rooms = [room for layer in LAYERS for room in layer if (SOURCES / room / "__init__.py").exists()]
    assert order == rooms


@pytest.mark.parametrize("module", MODULES)
def test_a_module_defines_each_of_its_names_once(module):
    body = ast.parse(MODULES[module].read_text(encoding="utf-8")).body
    names = [target.id for node in body if isinstance(node, ast.Assign) for target in node.targets if _is_name(target)]
    names += [node.name for node in body if isinstance(node, ast.ClassDef)]
    assert sorted(names) == sorted(set(names))


def _is_name(target: ast.expr) -> bool:
    return isinstance(target, ast.Name)


TWICE = {"FsspecWriter"}
"""DCP has two modules with a class of this name."""


def test_a_class_name_stands_for_one_thing():
    places: dict[str, list[str]] = {}
    for module, file in MODULES.items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    assert {name for name, modules in places.items() if len(modules) > 1} == TWICE
