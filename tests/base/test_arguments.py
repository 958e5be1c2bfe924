"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast._base.arguments import parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096B", 4096),
        (" 5GB ", 5 * 10**9),
        ("5 gb", 5 * 10**9),
        ("2k", 2000),
        ("1.5GiB", 3 << 29),
        ("0.3KB", 300),
        ("1.9", 1),
        ("9007199254740993", 2**53 + 1),
        (7, 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "5 parsecs", "-5", "1e9", "5 GB!", "0", "0.4", 0, -3, True, 2.5, None])
def test_what_is_no_size_is_refused_and_named(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
