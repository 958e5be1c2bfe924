"""What is wrong with a checkpoint of DCP. Its data files do not hold keys, so nothing can be rebuilt from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import CheckpointNotFoundError, HoldfastError
from holdfast.repairing.debris import Heap, heaps_of_dcp
from holdfast.repairing.planned import Planned
from holdfast.stores.local_store import LocalStore

_CANNOT = (
    "the data files of this format do not say which tensors they hold, so the index cannot be rebuilt from them. Copy "
    "it again from where it is whole, or load another checkpoint"
)


def problems_of(path: Path) -> tuple[list[Planned], list[Heap]]:
    """What is wrong with the folder, and the files in it that nothing needs."""
    from holdfast.storage.reader import FileSystemReader  # needs torch

    reader = FileSystemReader(path)
    try:
        try:
            index = reader.read_metadata()
        except CheckpointNotFoundError:
            index = reader.read_merged_rank_metadata(0)
    except CheckpointNotFoundError as error:
        return [Planned(str(path / ".metadata"), f"there is no index: {error}", _CANNOT)], []
    except HoldfastError as error:
        return [Planned(str(path / ".metadata"), str(error), _CANNOT)], []
    needed: dict[str, int] = {}
    keys: dict[str, set[str]] = defaultdict(set)
    for item, info in (index.storage_data or {}).items():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        keys[info.relative_path].add(item.fqn)
    found = list(_lost_files(path, needed, keys))
    heaps = list(heaps_of_dcp(LocalStore(path), set(needed)))
    return found, heaps


def _lost_files(path: Path, needed: dict[str, int], keys: dict[str, set[str]]) -> Iterator[Planned]:
    for name, end in sorted(needed.items()):
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found is not None and found >= end:
            continue
        problem = "the file is missing" if found is None else f"the file has {found} bytes, and {end} are needed"
        remedy = "copy it again from where it is whole; what is not lost can be converted, with --exclude for the rest"
        yield Planned(str(file), problem, remedy, keys=sorted(keys[name]))
