"""The names of the files of a checkpoint."""

from __future__ import annotations

import re
import secrets

RECORD = "holdfast.json"

_GENERATION = re.compile(r"[0-9a-f]{16}")
_OURS = re.compile(r"(?:index-([0-9a-f]{16})|data-([0-9a-f]{16})-([0-9]{1,9})-[0-9]{1,9})\.safetensors")


def new_generation() -> str:
    """An id that no save had before."""
    return secrets.token_hex(8)


def is_generation(text: str) -> bool:
    """Whether ``text`` could be such an id."""
    return _GENERATION.fullmatch(text) is not None


def data_file(generation: str, rank: int, number: int) -> str:
    """The name of a data file.

    >>> data_file("00112233aabbccdd", 3, 0)
    'data-00112233aabbccdd-3-0.safetensors'
    """
    return f"data-{generation}-{rank}-{number}.safetensors"


def index_file(generation: str) -> str:
    """The name of the file with the columns."""
    return f"index-{generation}.safetensors"


def generation_of(name: str) -> str | None:
    """The generation that a file belongs to; None if it is no data file or columns file.

    >>> generation_of("index-00112233aabbccdd.safetensors")
    '00112233aabbccdd'
    """
    found = _OURS.fullmatch(name)
    return None if found is None else found.group(1) or found.group(2)


def rank_of(name: str) -> int | None:
    """The rank that wrote a data file; None for other files.

    >>> rank_of("data-00112233aabbccdd-3-0.safetensors")
    3
    """
    found = _OURS.fullmatch(name)
    return None if found is None or found.group(3) is None else int(found.group(3))
