"""The public face: what is public says so and is documented, and whoever shows how to use the library uses no more."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast

ROOT = Path(__file__).parent.parent
SOURCES = Path(holdfast.__file__).parent

PUBLIC = ("dcp", "stores", "keep", "errors", "testing", "watching", "integrations")
"""The public modules below ``holdfast``."""
MODULES = ["holdfast", *(f"holdfast.{name}" for name in PUBLIC), "holdfast.integrations.torch_dcp"]

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = [
    *sorted((ROOT / "examples").rglob("*.py")),
    *sorted((ROOT / "demo").rglob("*.py")),
    # A contender is one library's way of saving and loading, as its users write it: the classes of this module, which
    # the benchmarks measure against each other. What measures them (the other modules) may look behind the face.
    ROOT / "benchmarks" / "contenders.py",
]
SHOWN = [*DOCUMENTS, *PROGRAMS]


def test_a_module_is_public_or_begins_with_an_underscore() -> None:
    found = {path.stem for path in SOURCES.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {name for name in found if not name.startswith("_")} == set(PUBLIC)


# Nothing private is used where the use of the library is shown.


def code_in(path: Path) -> list[str]:
    """The Python of a program, or of the examples in a document."""
    text = path.read_text(encoding="utf-8")
    return (
        [text] if path.suffix == ".py" else re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    )


def names_used(code: str) -> Iterator[str]:
    """The dotted names of Holdfast that are imported, and those that are reached through ``holdfast``."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def is_private(name: str) -> bool:
    """Whether a name leads behind the face. Below ``holdfast.dcp`` all names are those of torch, some with a ``_``.

    >>> is_private("holdfast._save.save"), is_private("holdfast.dcp._extension"), is_private("holdfast.__version__")
    (True, False, False)
    """
    first, *rest = name.split(".")
    if first != "holdfast" or rest[:1] == ["dcp"]:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in rest)


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_private_is_used_where_the_library_is_shown(path: Path) -> None:
    assert sorted({name for code in code_in(path) for name in names_used(code) if is_private(name)}) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from holdfast._stores.roots import LocalRoot", True),
        ("def f():\n    import holdfast._save", True),
        ("import holdfast\nholdfast._load.opening.open_source('x')", True),
        ("from holdfast import _version", True),
        ("from holdfast.stores import LocalRoot\nfrom holdfast import __version__", False),
        ("from holdfast.dcp._extension import ZStandard", False),
    ],
)
def test_private_names_are_found_however_they_are_reached(code: str, found: bool) -> None:
    assert any(map(is_private, names_used(code))) is found


# What is public is documented.


def exported(module: Any) -> list[str]:
    """``__all__``, or what a module without it defines."""
    return getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def has_docstring(value: Any) -> bool:
    if inspect.isclass(value):
        return bool(vars(value).get("__doc__"))  # its own, and not that of a base
    return bool(value.__doc__) if callable(value) or inspect.ismodule(value) else True


@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_docstrings(module: str) -> None:
    found = importlib.import_module(module)
    assert found.__doc__
    assert [name for name in exported(found) if not has_docstring(getattr(found, name))] == []


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_in_the_documents(module: str) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    in_code = " ".join(re.findall(r"```.*?```|`[^`\n]*`", text, re.DOTALL))
    words = set(re.findall(r"\w+", in_code))
    assert [name for name in exported(importlib.import_module(module)) if name not in words] == []


def test_the_page_about_the_api_names_nothing_that_is_not_there() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    public = {name for module in MODULES for name in exported(importlib.import_module(module))}
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row) if name not in public] == []


def keywords_of(name: str) -> set[str]:
    if name == "SaveOptions":
        return set(holdfast.SaveOptions.__annotations__)
    parameters = inspect.signature(getattr(holdfast, name)).parameters.values()
    return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}


def test_the_page_about_the_api_lists_the_keywords_of_calls_and_options() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed: dict[str, set[str]] = {}
    for name, says in re.findall(r"\*\*`(\w+)`\*\*:(.*?)(?=\*\*|\n- |\n\n)", text, re.DOTALL):
        listed[name] = set()
        for word in re.findall(r"`(\w+)`", says):
            listed[name] |= (
                keywords_of(word) if word in {"save", "SaveOptions", "verify"} - keywords_of(name) else {word}
            )
    assert len(listed) == 19
    assert listed == {name: keywords_of(name) for name in listed}


def test_all_public_names_of_the_package_can_be_had() -> None:
    assert sorted(holdfast.__all__) == dir(holdfast)
    assert [name for name in holdfast.__all__ if not hasattr(holdfast, name)] == []
    assert set(holdfast._LATE) <= set(holdfast.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'relaod'"):
        _ = holdfast.relaod
