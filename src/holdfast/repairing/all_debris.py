"""Everything at a place that no checkpoint needs, whatever else is wrong there."""

from __future__ import annotations

from contextlib import suppress

from holdfast.errors import HoldfastError
from holdfast.formats.native.names import RECORD, generation_of
from holdfast.manager.run_file import RUN_FILE
from holdfast.repairing import dcp, native
from holdfast.repairing.debris import (
    Heap,
    generations_of_dcp,
    heaps_of_conversions,
    heaps_of_dcp,
    heaps_of_hugging_face,
    heaps_of_native,
)
from holdfast.sources.native import read_record
from holdfast.storage.hf_names import COMMIT_NAME
from holdfast.storage.layout import is_index
from holdfast.stores.places import local_path
from holdfast.stores.roots import root_at
from holdfast.stores.store import Store


def debris_of(place: str) -> list[Heap]:
    """What killed saves and conversions left in a folder, or in those directly inside of it; nothing is changed.

    >>> import tempfile
    >>> debris_of(tempfile.mkdtemp())
    []
    """
    path = local_path(place)
    if path is not None and path.is_file():
        return []
    root = root_at(place)
    heaps = [] if path is None else list(heaps_of_conversions(path))
    stores = [root.child(name) for name in sorted(root.children()) if not name.startswith(".")]
    if root.store.size(RUN_FILE) is None:
        stores.insert(0, root.store)
    for store in stores:
        with suppress(PermissionError):  # what may not be looked at may not be swept either
            heaps += _heaps_in(store)
    return heaps


def _heaps_in(store: Store) -> list[Heap]:
    names = {listed.name for listed in store.list()}
    if RECORD in names:
        try:
            return list(heaps_of_native(store, read_record(store)))
        except HoldfastError:  # a record that cannot be read may need any of the files
            return []
    if any(generation_of(name) for name in names):
        return list(heaps_of_native(store, None, but=native.whole_saves(store, proven=True)))
    if COMMIT_NAME in names:  # a switch to other files is under way, which needs them
        return []
    return [*_heaps_of_dcp(store, names), *heaps_of_hugging_face(store)]


def _heaps_of_dcp(store: Store, names: set[str]) -> list[Heap]:
    """Without torch, indexes cannot be read; where all data files are of one save, that is not needed."""
    if not any(map(is_index, names)):
        return []
    if len(generations_of_dcp(names)) < 2:
        return list(heaps_of_dcp(store, names))
    try:
        return dcp.problems_of(store)[1]
    except (HoldfastError, ImportError):
        return []
