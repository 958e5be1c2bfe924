"""Warnings point at the line of the caller, not at one of ours."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import holdfast
from holdfast._base.notices import add_note, warn_caller

PACKAGE = Path(holdfast.__file__).parent


def load(source: str, filename: str) -> dict:
    """Run source code as if it stood in ``filename``; line numbers count from 1."""
    namespace: dict = {"warn_caller": warn_caller}
    exec(compile(source, filename, "exec"), namespace)  # noqa: S102 - made up here
    return namespace


def place_of_warning(function, *args) -> tuple[str, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    (warning,) = caught
    return warning.filename, warning.lineno


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_warning_names_the_innermost_line_outside_of_the_package(depth):
    source = "def inner(n):\n    warn_caller('careful') if n == 1 else inner(n - 1)\n"
    inner = load(source, str(PACKAGE / "deep" / "module.py"))["inner"]
    outer = load("def outer(function, n):\n    pass\n    function(n)\n", "/home/user/train.py")["outer"]
    assert place_of_warning(outer, inner, depth) == ("/home/user/train.py", 3)


def test_code_outside_of_the_package_is_named_itself():
    caller = load("def caller():\n    warn_caller('careful')\n", "/home/user/train.py")["caller"]
    assert place_of_warning(caller) == ("/home/user/train.py", 2)


def test_a_neighbour_whose_name_begins_like_the_package_is_not_part_of_it():
    neighbour = f"{PACKAGE}_at_work/train.py"
    caller = load("def caller():\n    warn_caller('careful')\n", neighbour)["caller"]
    assert place_of_warning(caller) == (neighbour, 2)


def test_a_warning_has_the_category_and_the_text_that_it_is_given():
    with pytest.warns(FutureWarning, match="^careful$"):
        warn_caller("careful", FutureWarning)
    with pytest.warns(UserWarning, match="^careful$"):
        warn_caller("careful")


def test_warnings_from_two_lines_of_a_program_are_both_shown_under_the_default_filter():
    helper = load("def helper():\n    warn_caller('careful')\n", str(PACKAGE / "module.py"))["helper"]
    program = load("def program(helper):\n    helper()\n    helper()\n", "/home/user/train.py")["program"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        program(helper)
    assert [warning.lineno for warning in caught] == [2, 3]


def test_remarks_on_an_error_are_kept_in_order():
    error = ValueError("gone")
    add_note(error, "first")
    add_note(error, "second")
    assert error.__notes__ == ["first", "second"]
