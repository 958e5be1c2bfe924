"""Files that no checkpoint needs: of saves and conversions that were killed."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast._formats.dcp import names as dcp_names
from holdfast._formats.dcp.names import METADATA_NAME, is_index
from holdfast._formats.hf_folder import names as hf_names
from holdfast._formats.hf_folder.names import COMMIT_NAME
from holdfast._formats.native import names as native_names
from holdfast._formats.native.names import RECORD
from holdfast._formats.native.record import Record
from holdfast._formats.native.source import read_record
from holdfast._manager.run_file import RUN_FILE
from holdfast._stores.places import local_path, store_at
from holdfast._stores.roots import root_at
from holdfast._stores.store import Store
from holdfast._stores.store_files import StoreFiles
from holdfast._tools.converting.work_folders import is_in_use, left_over, remove_left_over
from holdfast._tools.listing.liveliness import why_perhaps_alive
from holdfast._tools.repairing import native
from holdfast._tools.repairing.report import Leftover, Planned
from holdfast.errors import CheckpointNotFoundError, HoldfastError

# Only what has a name that Holdfast gives, and only where nobody can be writing any more: nothing of it has changed
# for a while, no job owns the run, and no process holds a lock.


@dataclass(frozen=True)
class LeftoverFiles:
    """Files in one place that belong together, and that nothing needs."""

    place: str
    names: Sequence[str]
    nbytes: int
    why: str
    obstacle: str | None
    """Why they are left alone."""

    def swept(self, *, apply: bool) -> Leftover:
        """Remove them, if ``apply`` and nobody may be writing; and report what became of them."""
        if self.obstacle is not None:
            return Leftover(self.place, self.names, self.nbytes, self.why, "kept", self.obstacle)
        if not apply:
            return Leftover(self.place, self.names, self.nbytes, self.why, "can be removed")
        try:
            self._remove()
        except OSError as error:
            return Leftover(self.place, self.names, self.nbytes, self.why, "kept", str(error))
        return Leftover(self.place, self.names, self.nbytes, self.why, "removed")

    def _remove(self) -> None:
        store = store_at(self.place)
        store.delete(self.names)
        store.sync()


@dataclass(frozen=True)
class WorkFolder(LeftoverFiles):
    """The unfinished output of a conversion. What it was to replace may be in it, and is put back."""

    def _remove(self) -> None:
        work = Path(self.place) / self.names[0]
        if not remove_left_over(work):
            raise OSError(f"{work} is in use, or cannot be locked")


def leftovers_of_native(store: Store, record: Record | None, *, but: Collection[str] = ()) -> Iterator[LeftoverFiles]:
    """What killed saves left in the folder of a checkpoint, or in one without a record if that is None.

    Generations ``but`` these are meant.
    """
    sizes = _sizes(store)
    found = native_names.files_in(sizes, set() if record is None else record.file_names())
    for generation, names in found.of_our_saves().items():
        if generation not in but:
            yield _of_a_save(store, sizes, generation, names)
    if found.unfinished:
        yield _leftover(store, sizes, found.unfinished, "temporary files of a commit that was killed")


def leftovers_of_hugging_face(store: Store) -> Iterator[LeftoverFiles]:
    """Temporary files of saves to a Hugging Face folder in which no switch is under way, which would need them."""
    sizes = _sizes(store)
    for generation, names in hf_names.files_in(sizes).of_our_saves().items():
        yield _of_a_save(store, sizes, generation, names)


def leftovers_of_dcp(store: Store, needed: Collection[str]) -> Iterator[LeftoverFiles]:
    """Data files that the index does not name, if ``holdfast.dcp`` wrote them, and unfinished indexes."""
    sizes = _sizes(store)
    found = dcp_names.files_in(sizes, needed)
    for generation, names in found.of_our_saves().items():
        yield _of_a_save(store, sizes, generation, names)
    # Without an index of the whole, one of a rank may be needed though a kill kept it from getting its name.
    has_index = METADATA_NAME in sizes
    unfinished = [name for name in found.unfinished if has_index or dcp_names.rank_of_temporary_index(name) is None]
    if unfinished:
        yield _leftover(store, sizes, unfinished, "indexes of saves that were not committed")


def leftovers_of_conversions(folder: Path) -> Iterator[LeftoverFiles]:
    """Unfinished outputs of conversions in a folder."""
    for path in left_over(folder):
        obstacle = "a conversion may be writing it" if is_in_use(path) else None
        yield WorkFolder(str(folder), [path.name], _tree_bytes(path), "left by a conversion that was killed", obstacle)


def holds_leftovers_alone(store: Store) -> bool:
    """Whether a folder without a record holds files of our saves."""
    found = native_names.files_in(_sizes(store))
    return not found.index and bool(found.by_save)


def _sizes(store: Store) -> dict[str, int]:
    return {listed.name: listed.size for listed in store.list()}


def _of_a_save(store: Store, sizes: Mapping[str, int], generation: str, names: Sequence[str]) -> LeftoverFiles:
    return _leftover(store, sizes, names, f"left by a save that was not committed (generation {generation})")


def _leftover(store: Store, sizes: Mapping[str, int], names: Sequence[str], why: str) -> LeftoverFiles:
    nbytes = sum(sizes[name] for name in names)
    return LeftoverFiles(store.location, names, nbytes, why, why_perhaps_alive(store, names))


def _tree_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


# What is wrong with a checkpoint of DCP. Its data files do not hold keys, so nothing can be rebuilt from them.


_CANNOT = (
    "the data files of this format do not say which tensors they hold, so the index cannot be rebuilt from them. Copy "
    "it again from where it is intact, or load another checkpoint"
)
_WHAT_IS_LEFT = "copy it again from where it is intact; what is not lost can be converted, with --exclude for the rest"


def problems_of(store: Store) -> tuple[list[Planned], list[LeftoverFiles]]:
    """What is wrong with the checkpoint in a store, and the files in it that nothing needs."""
    from holdfast._dcp.reader import FileSystemReader  # needs torch

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
    return list(_lost_files(store, pieces)), list(leftovers_of_dcp(store, set(pieces)))


def _lost_files(store: Store, pieces: Mapping[str, Sequence[tuple[str, int]]]) -> Iterator[Planned]:
    """Files that are not there, or end too early. ``pieces`` has their keys, and where each ends."""
    sizes = _sizes(store)
    for name, ends in sorted(pieces.items()):
        found = sizes.get(name)
        lost = sorted({key for key, end in ends if found is None or end > found})
        if lost:
            most = max(end for _, end in ends)
            problem = "the file is missing" if found is None else f"the file has {found} bytes, and {most} are needed"
            yield Planned(store.path_of(name), problem, _WHAT_IS_LEFT, keys=lost)


# Everything at a place that no checkpoint needs, whatever else is wrong there.


def leftovers_at(place: str) -> list[LeftoverFiles]:
    """What killed saves and conversions left in a folder, or in those directly inside of it; nothing is changed.

    >>> import tempfile
    >>> leftovers_at(tempfile.mkdtemp())
    []
    """
    path = local_path(place)
    if path is not None and path.is_file():
        return []
    root = root_at(place)
    leftovers = [] if path is None else list(leftovers_of_conversions(path))
    stores = [root.child(name) for name in sorted(root.children()) if not name.startswith(".")]
    if root.store.size(RUN_FILE) is None:
        stores.insert(0, root.store)
    for store in stores:
        with suppress(PermissionError):  # what may not be looked at may not be swept either
            leftovers += _leftovers_in(store)
    return leftovers


def _leftovers_in(store: Store) -> list[LeftoverFiles]:
    names = {listed.name for listed in store.list()}
    if RECORD in names:
        try:
            return list(leftovers_of_native(store, read_record(store)))
        except HoldfastError:  # a record that cannot be read may need any of the files
            return []
    if native_names.files_in(names).by_save:
        return list(leftovers_of_native(store, None, but=native.complete_saves(store, proven=True)))
    if COMMIT_NAME in names:  # a switch to other files is under way, which needs them
        return []
    return [*_leftovers_of_dcp(store, names), *leftovers_of_hugging_face(store)]


def _leftovers_of_dcp(store: Store, names: set[str]) -> list[LeftoverFiles]:
    """Without torch, indexes cannot be read; where all data files are of one save, that is not needed."""
    if not any(map(is_index, names)):
        return []
    if len(dcp_names.files_in(names).of_our_saves()) < 2:
        return list(leftovers_of_dcp(store, names))
    try:
        return problems_of(store)[1]
    except (HoldfastError, ImportError):
        return []
