"""Every example in a docstring of the library runs and shows what it says."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import holdfast


def modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.walk_packages(holdfast.__path__, "holdfast.")]
    return [importlib.import_module(name) for name in ["holdfast", *names] if not name.endswith("__main__")]


def examples_of(module: ModuleType) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(module)
    for name, value in vars(module).items():
        # doctest passes over functions behind a decorator, because the wrapper comes from another module.
        original = inspect.unwrap(value) if inspect.isfunction(value) else value
        if original is not value and original.__module__ == module.__name__:
            found += finder.find(original, f"{module.__name__}.{name}", module)
    return [test for test in found if test.examples]


EXAMPLES = [test for module in modules() for test in examples_of(module)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_an_example_shows_what_happens(
    example: doctest.DocTest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Examples make folders with tempfile; they go where pytest cleans up.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("example")))
    report: list[str] = []

    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)

    assert results.failed == 0, "".join(report)


def test_the_functions_that_everyone_calls_have_an_example() -> None:
    named = {example.name.removeprefix("holdfast.") for example in EXAMPLES}

    assert {"dcp", "dcp.state_dict_saver.save", "dcp.state_dict_loader.load", "_settings.override"} <= named


def test_no_example_is_skipped() -> None:
    skipping = [e.name for e in EXAMPLES for part in e.examples if part.options.get(doctest.SKIP)]

    assert skipping == []
