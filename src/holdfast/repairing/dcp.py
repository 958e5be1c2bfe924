"""What is wrong with a checkpoint of DCP. Its data files do not hold keys, so nothing can be rebuilt from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from holdfast.errors import CheckpointNotFoundError, HoldfastError
from holdfast.repairing.debris import Heap, heaps_of_dcp
from holdfast.repairing.planned import Planned
from holdfast.storage.layout import METADATA_NAME
from holdfast.stores.store import Store
from holdfast.stores.store_files import StoreFiles

_CANNOT = (
    "the data files of this format do not say which tensors they hold, so the index cannot be rebuilt from them. Copy "
    "it again from where it is whole, or load another checkpoint"
)
_WHAT_IS_LEFT = "copy it again from where it is whole; what is not lost can be converted, with --exclude for the rest"


def problems_of(store: Store) -> tuple[list[Planned], list[Heap]]:
    """What is wrong with the checkpoint in a store, and the files in it that nothing needs."""
    from holdfast.storage.reader import FileSystemReader  # needs torch

    reader = FileSystemReader(store.location)
    reader.fs, reader.path = StoreFiles(store), store.location
    index_path = store.path_of(METADATA_NAME)
    try:
        try:
            index = reader.read_metadata()
        except CheckpointNotFoundError:
            index = reader.read_merged_rank_metadata(0)
    except CheckpointNotFoundError as error:
        return [Planned(index_path, f"there is no index: {error}", _CANNOT)], []
    except HoldfastError as error:
        return [Planned(index_path, str(error), _CANNOT)], []
    pieces: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for item, info in (index.storage_data or {}).items():
        pieces[info.relative_path].append((item.fqn, info.offset + info.length))
    return list(_lost_files(store, pieces)), list(heaps_of_dcp(store, set(pieces)))


def _lost_files(store: Store, pieces: Mapping[str, Sequence[tuple[str, int]]]) -> Iterator[Planned]:
    """Files that are not there, or end too early. ``pieces`` has their keys, and where each ends."""
    sizes = {listed.name: listed.size for listed in store.list()}
    for name, ends in sorted(pieces.items()):
        found = sizes.get(name)
        lost = sorted({key for key, end in ends if found is None or end > found})
        if lost:
            most = max(end for _, end in ends)
            problem = "the file is missing" if found is None else f"the file has {found} bytes, and {most} are needed"
            yield Planned(store.path_of(name), problem, _WHAT_IS_LEFT, keys=lost)
