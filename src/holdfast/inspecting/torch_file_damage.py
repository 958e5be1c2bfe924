"""Finds all damage of a file of ``torch.save``, in which every entry of the archive has a CRC, or most have."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import HoldfastError
from holdfast.inspecting.damage import Damage
from holdfast.inspecting.working import work_through
from holdfast.progress import Tally
from holdfast.sources.torch_file import StoredEntry, TorchFileSource
from holdfast.tuning import READERS


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

    def run(self, on_total: Callable[[int], Tally]) -> None:
        """Find all damage. ``on_total`` is told how many bytes there are to read."""
        tally = on_total(sum(entry.nbytes for entry in self._entries))
        work_through(self._entries, lambda entry: self._look(entry, tally), self._threads)

    def _look(self, entry: StoredEntry, tally: Tally) -> None:
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
        tally.add(entry.nbytes)
