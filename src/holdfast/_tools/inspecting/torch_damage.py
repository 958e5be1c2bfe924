"""Finds all damage of DCP checkpoints and of ``torch.save`` files, in which most stored items have a CRC."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast._base.threads import work_through
from holdfast._base.tuning import READERS, VERIFIED_BYTES
from holdfast._dcp.source import DcpSource, StoredItem
from holdfast._formats.torch_file.source import StoredEntry, TorchFileSource
from holdfast._tools.inspecting.damage import Damage
from holdfast._watching.progress import Progress
from holdfast.errors import DamagedCheckpointError, HoldfastError

# Finds all damage of a checkpoint of ``torch.distributed.checkpoint``, in which most stored items have a CRC.


class _Lot(NamedTuple):
    """Items of one file that are read together."""

    file: str
    items: Sequence[StoredItem]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


class DcpCheck:
    """One look at all stored items, or at those of some keys."""

    def __init__(self, source: DcpSource, chosen: Callable[[str], bool] | None, memory: int | None) -> None:
        self._source = source
        self._chosen = chosen
        self._memory = memory
        self._lock = threading.Lock()
        self._sizes = dict(source.files())
        self.damage: list[Damage] = []
        self.doubts: list[str] = []
        self.has_digests = True

    def run(self, on_total: Callable[[int], Progress]) -> None:
        """Find all damage. ``on_total`` gets the number of bytes to read."""
        index = next((name for name in self._sizes if name.endswith(".metadata")), ".metadata")
        homeless = [key for key in self._source.keys_without_place() if self._chosen is None or self._chosen(key)]
        if homeless:
            self.damage.append(Damage(index, "does not say where all of these are stored", tuple(homeless)))
        for key, problem in self._source.contradictions().items():
            if self._chosen is None or self._chosen(key):
                self.damage.append(Damage(index, f"contradicts itself: {problem}", (key,)))
        lots = self._lots()
        progress = on_total(sum(lot.nbytes for lot in lots))
        # The reader has threads of its own for large lots; these are for many small ones.
        threads = 2 if self._memory is None and len(lots) > 1 else 1
        work_through(lots, lambda lot: self._look(lot, progress), min(threads, READERS), "holdfast-inspect")

    def _lots(self) -> list[_Lot]:
        """All items, in the order in which they are stored. Those of missing files are reported at once."""
        by_file: dict[str, list[StoredItem]] = defaultdict(list)
        for item in self._source.stored_items():
            if self._chosen is None or self._chosen(item.key):
                by_file[item.file].append(item)
        lots: list[_Lot] = []
        for file, items in by_file.items():
            size = self._sizes.get(file)
            if size is None:
                keys = tuple(dict.fromkeys(item.key for item in items))
                self.damage.append(Damage(file, "is missing", keys, expected="a file", found="no such file"))
                continue
            reached = max(item.begin + item.nbytes for item in items)
            if size < reached:
                lost = tuple(dict.fromkeys(item.key for item in items if item.begin + item.nbytes > size))
                what = f"{reached:,} bytes at least", f"{size:,} bytes"
                self.damage.append(Damage(file, "is cut off", lost, size, reached, *what))
            inside = sorted((item for item in items if item.begin + item.nbytes <= size), key=lambda item: item.begin)
            lots += _cut_into_lots(file, inside)
        return lots

    def _look(self, lot: _Lot, progress: Progress) -> None:
        try:
            self._source.read_items(lot.items, memory=self._memory)
        except (HoldfastError, OSError):
            for item in lot.items:
                self._look_alone(item)
        progress.advance(lot.nbytes)

    def _look_alone(self, item: StoredItem) -> None:
        try:
            self._source.read_items([item], memory=self._memory)
        except (HoldfastError, OSError) as error:
            damage = _damage_of(item, error)
            with self._lock:
                self.damage.append(damage)


def _cut_into_lots(file: str, items: Sequence[StoredItem]) -> list[_Lot]:
    lots: list[_Lot] = []
    waiting: list[StoredItem] = []
    nbytes = 0
    for item in items:
        if waiting and nbytes + item.nbytes > VERIFIED_BYTES:
            lots.append(_Lot(file, waiting))
            waiting, nbytes = [], 0
        waiting.append(item)
        nbytes += item.nbytes
    return [*lots, _Lot(file, waiting)] if waiting else lots


def _damage_of(item: StoredItem, error: Exception) -> Damage:
    where: dict[str, Any] = {"keys": (item.key,), "begin": item.begin, "end": item.begin + item.nbytes}
    if isinstance(error, DamagedCheckpointError):
        if str(error.fields.get("file")).endswith(".metadata"):
            return Damage.from_error(error, ".metadata", (item.key,))
        expected, found = (_shown(error.fields.get(name)) for name in ("expected", "found"))
        return Damage(item.file, "these are not the bytes that were saved", **where, expected=expected, found=found)
    return Damage(item.file, f"cannot be read: {error}", **where)


def _shown(value: Any) -> str | None:
    if isinstance(value, int):
        return f"{value:08x}"
    return None if value is None else str(value)[:200]


# Finds all damage of a file of ``torch.save``, in which every entry of the archive has a CRC, or most have.


class TorchFileCheck:
    """One look at all entries of the archive, or at those that hold chosen tensors."""

    def __init__(self, source: TorchFileSource, chosen: Callable[[str], bool] | None, memory: int | None) -> None:
        self._source = source
        self._entries = [
            entry for entry in source.entries() if chosen is None or any(chosen(key) for key in entry.keys)
        ]
        self._threads = READERS if memory is None else 1
        self.damage: list[Damage] = []
        self.doubts: list[str] = []
        self.has_digests = True

    def run(self, on_total: Callable[[int], Progress]) -> None:
        """Find all damage. ``on_total`` gets the number of bytes to read."""
        progress = on_total(sum(entry.nbytes for entry in self._entries))
        work_through(self._entries, lambda entry: self._look(entry, progress), self._threads, "holdfast-inspect")

    def _look(self, entry: StoredEntry, progress: Progress) -> None:
        try:
            self._source.check_entry(entry.name)
        except (HoldfastError, OSError) as error:
            fields = error.fields if isinstance(error, HoldfastError) else {}
            self.damage.append(
                Damage(
                    self._source.files()[0][0],
                    f"the entry {entry.name!r} of the archive is not as it was saved",
                    entry.keys,
                    entry.begin,
                    entry.begin + entry.nbytes,
                    fields.get("expected"),
                    fields.get("found"),
                )
            )
        progress.advance(entry.nbytes)
