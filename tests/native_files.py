"""Places in the data files of our own format, by what their headers say: to spoil one thing and nothing else."""

from __future__ import annotations

import json
from pathlib import Path


def table_begin(content: bytes) -> int:
    """Where the table of a data file begins, which is where its data ends."""
    length = int.from_bytes(content[:8], "little")
    return 8 + length + json.loads(content[8 : 8 + length])["holdfast.table"]["data_offsets"][0]


def flip_last_data_bit(path: Path) -> None:
    """Change the last byte before the table."""
    content = bytearray(path.read_bytes())
    content[table_begin(content) - 1] ^= 1
    path.write_bytes(content)


def spoil_table(path: Path) -> None:
    """Change a byte of the table."""
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
