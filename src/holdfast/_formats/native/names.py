"""The names of the files of a checkpoint, and whose the files in its folder are."""

from __future__ import annotations

import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable

from holdfast._formats.folder_files import FolderFiles, original_of

RECORD = "holdfast.json"
SET_ASIDE = "set-aside.json"
"""Beside a checkpoint that a run does not want to use again; says why."""

_GENERATION = re.compile(r"[0-9a-f]{16}")
_UNFINISHED = re.compile(rf"\.(?:{re.escape(RECORD)}|{re.escape(SET_ASIDE)})\.[0-9a-f]{{8}}\.tmp")
"""What a commit in a local folder leaves behind when it is killed."""
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
    """The name of the index; in version 1, of the file with the columns."""
    return f"index-{generation}.safetensors"


def generation_of(name: str) -> str | None:
    """The generation that a file belongs to; None if it is neither a data file nor an index.

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


def files_in(names: Iterable[str], needed: Collection[str] = ()) -> FolderFiles:
    """Whose the files in a folder are. ``needed`` are those that its record names.

    >>> found = files_in(["holdfast.json", "data-00112233aabbccdd-0-0.safetensors", "notes.txt"])
    >>> found.index, found.by_save
    (['holdfast.json'], {'00112233aabbccdd': ['data-00112233aabbccdd-0-0.safetensors']})
    """
    names = sorted(names)
    by_save: dict[str, list[str]] = defaultdict(list)
    for name in names:
        generation = generation_of(name)
        if generation is not None and name not in needed:
            by_save[generation].append(name)
    return FolderFiles(
        index=[name for name in names if name == RECORD],
        needed=[name for name in names if name in needed],
        by_save=dict(by_save),
        unfinished=[name for name in names if _UNFINISHED.fullmatch(name)],
        notes=[name for name in names if name == SET_ASIDE],
        copies=[name for name in names if original_of(name) == RECORD or generation_of(original_of(name)) is not None],
    )
