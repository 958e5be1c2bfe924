"""The names of files in a DCP checkpoint, and which of them belong to whom.

A data file's name starts with the writing rank and a generation, an id that no other save has. So a save never opens
a file of an earlier one, and what is left of a save that died can be distinguished from everything else.
"""

from __future__ import annotations

import re
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import PurePath

from holdfast._formats.folder_files import FolderFiles

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"
FORMAT_VERSION = "1.0.0"

# `__3_0.distcp` is what other writers of the format use, `__3_1f00ba42_0.distcp` what we use.
_DATA_FILE = re.compile(r"__(?P<rank>\d+)_(?:(?P<generation>[0-9a-f]{8})_)?\d+\.distcp")
_RANK_METADATA = re.compile(r"__(?P<rank>\d+)\.metadata")
_TEMPORARY = re.compile(r"(?:__(?P<rank>\d+))?\.metadata(?P<id>\.[0-9a-f]{8})?\.tmp")


def new_generation() -> str:
    """An id that no other save has."""
    return uuid.uuid4().hex[:8]


def data_prefix(rank: int, generation: str) -> str:
    """How the names of a rank's data files start."""
    return f"__{rank}_{generation}_"


def metadata_name(rank: int | None) -> str:
    """The index of the whole checkpoint, or of one rank's part in a checkpoint that was saved rank by rank."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


def temporary_name(final_name: str, save_id: str) -> str:
    """Where the index of a save is written before it gets its name; a generation does for the id."""
    return f"{final_name}.{save_id[:8]}.tmp"


def rank_of_index(name: str) -> int | None:
    """The rank of a rank's own index; None for other files."""
    match = _RANK_METADATA.fullmatch(name)
    return int(match["rank"]) if match else None


def is_index(name: str) -> bool:
    """Whether a file is the index of a checkpoint, or of one rank's part."""
    return name == METADATA_NAME or rank_of_index(name) is not None


def rank_of_temporary_index(name: str) -> int | None:
    """The rank of a rank's own index that has not got its name yet; None for other files."""
    match = _TEMPORARY.fullmatch(name)
    return int(match["rank"]) if match and match["rank"] else None


def rank_of_data_file(name: str) -> int | None:
    """The rank that wrote a data file; None for other files.

    >>> rank_of_data_file("__3_0.distcp")
    3
    """
    match = _DATA_FILE.fullmatch(name)
    return int(match["rank"]) if match else None


def is_data_file(name: str) -> bool:
    """Whether a file holds data of a DCP checkpoint."""
    return _DATA_FILE.fullmatch(name) is not None


def files_in(names: Iterable[str], needed: Collection[str] = ()) -> FolderFiles:
    """Whose the files in a folder are. ``needed`` are the data files that its indexes name.

    >>> found = files_in([".metadata", "__0_1f00ba42_0.distcp", "__0_0.distcp", "notes.txt"], ["__0_0.distcp"])
    >>> found.index, found.needed, found.by_save
    (['.metadata'], ['__0_0.distcp'], {'1f00ba42': ['__0_1f00ba42_0.distcp']})
    """
    names = sorted(names)
    by_save: dict[str, list[str]] = defaultdict(list)
    unfinished = []
    for name in names:
        temporary = _TEMPORARY.fullmatch(name)
        if temporary and temporary["id"]:
            unfinished.append(name)
        elif temporary or (is_data_file(name) and name not in needed):
            by_save[_generation_of(name) or ""].append(name)
    return FolderFiles(
        index=[name for name in names if is_index(name)],
        needed=[name for name in names if name in needed],
        by_save=dict(by_save),
        unfinished=unfinished,
    )


def stale_names(present: Iterable[str], in_use: Collection[str]) -> list[str]:
    """Files of earlier saves that a new, committed one has made useless: data, rank indexes, unfinished indexes."""
    found = files_in((PurePath(path).name for path in present), in_use)
    indexes = [name for name in found.index if name != METADATA_NAME]
    return [name for name in (*found.of_any_save(), *indexes, *found.unfinished) if name not in in_use]


def stale_names_of_rank(present: Iterable[str], in_use: Collection[str], rank: int, world_size: int) -> list[str]:
    """The same where each rank saves for itself: files of this rank, and on rank 0 of ranks that no longer exist."""
    stale = []
    for name in (PurePath(path).name for path in present):
        match = _DATA_FILE.fullmatch(name) or _TEMPORARY.fullmatch(name)
        if match is not None and name not in in_use:
            owner = int(match["rank"] or 0)
            if owner == rank or (rank == 0 and owner >= world_size):
                stale.append(name)
    return stale


def without_running_saves(names: Iterable[str], before: Collection[str], now: Iterable[str]) -> list[str]:
    """The data files among ``names`` of saves that have written nothing since ``before``; other files as they are."""
    alive = {_generation_of(name) for name in (PurePath(path).name for path in now) if name not in before}
    return [name for name in names if _generation_of(name) is None or _generation_of(name) not in alive]


def _generation_of(name: str) -> str | None:
    match = _DATA_FILE.fullmatch(name)
    return match["generation"] if match else None


def names_of_generation(present: Iterable[str], generation: str) -> list[str]:
    """The data files that the save of this generation wrote, on any rank."""
    names = (PurePath(path).name for path in present)
    return [name for name in names if _generation_of(name) == generation]
