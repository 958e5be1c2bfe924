"""A golden checkpoint whose tensors are divided in every way that version 2 has. Never changed, as ``contents.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast._base.divisions import Cut, Division
from holdfast._formats.native.stored_parts import WHOLE, PartsByRule, StoredParts, listed_parts
from holdfast._stores.local_store import LocalStore
from tests.formats.native.divided import write_divided

WORLD_SIZE = 6
MOST_BYTES_IN_A_FILE = 90
EVENS = (0, 2, 4)

SHAPES = {
    "whole": (5, 3),
    "rows": (12, 2),
    "uneven rows": (7, 3),
    "few rows": (2, 4),
    "blocks": (5, 7),
    "strided": (13,),
    "on some ranks": (9, 2),
    "by no rule": (6, 5),
    "in one place": (),
    "nothing": (0, 4),
}


def arrays() -> dict[str, np.ndarray]:
    """What the tensors hold."""
    found = {}
    for number, (key, shape) in enumerate(SHAPES.items()):
        count = int(np.prod(shape, dtype=np.int64))
        found[key] = (np.arange(count, dtype=np.uint16) * 31 + number).astype(np.uint16).reshape(shape)
    return found


def parts() -> dict[str, StoredParts]:
    """Who has stored what of them."""
    rows = Division((Cut(0, WORLD_SIZE),), (1,))
    return {
        "whole": PartsByRule(WHOLE, 4),
        "rows": PartsByRule(rows),
        "uneven rows": PartsByRule(rows, 2),
        "few rows": PartsByRule(rows),
        "blocks": PartsByRule(Division((Cut(1, 3), Cut(0, 2)), (2, 1))),
        "strided": PartsByRule(Division((Cut(0, 2), Cut(0, 3)), (1, 2))),
        "on some ranks": PartsByRule(Division((Cut(0, 3),), (1,), ranks=EVENS), 1),
        "by no rule": listed_parts([((0, 0), (1, 5), 3), ((1, 0), (5, 2), 0), ((1, 2), (5, 3), 5)]),
        "in one place": PartsByRule(WHOLE, 5),
        "nothing": PartsByRule(WHOLE),
    }


def write(folder: Path) -> None:
    """As six ranks would."""
    write_divided(LocalStore(folder), arrays(), parts(), WORLD_SIZE, max_file_size=MOST_BYTES_IN_A_FILE)
