"""Saves whose data files are there and whose record is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import DamagedCheckpointError, HoldfastError
from holdfast.formats.native.blocks import Digests
from holdfast.formats.native.names import generation_of, index_file, rank_of
from holdfast.formats.native.record import BLOCK_BYTES, Record, StoredFile
from holdfast.formats.native.repairs import Repair
from holdfast.repairing.columns_alone import ColumnsAlone
from holdfast.repairing.data_files import Parts, header_in, parts_of_unknown
from holdfast.repairing.key_trees import tree_of_keys
from holdfast.repairing.rebuilding import Digesting, put_in_place, repair_now
from holdfast.stores.store import Store


def generations_in(store: Store) -> list[str]:
    """The saves that have data files in a store."""
    found = {generation_of(listed.name) for listed in store.list() if rank_of(listed.name) is not None}
    return sorted(generation for generation in found if generation is not None)


@dataclass(frozen=True)
class UnrecordedSave:
    """The data files of one save, without a record."""

    store: Store
    generation: str
    files: Sequence[StoredFile]
    parts: Parts | None
    columns: ColumnsAlone | None
    """If they are there and speak of the same files."""
    trouble: str
    """Why the data files do not make up a checkpoint."""

    @property
    def is_proven(self) -> bool:
        """Whether it is sure that these are all files: the columns are written when all ranks are done."""
        return self.columns is not None and not self.trouble

    @property
    def digests_computed(self) -> str:
        """When a repair has computed the digests; empty if they are those of the save."""
        return "" if self.columns is None else self.columns.digests_computed

    @classmethod
    def of(cls, store: Store, generation: str) -> UnrecordedSave:
        """What is there of one."""
        listed = [file for file in store.list() if rank_of(file.name) is not None]
        listed = [file for file in listed if generation_of(file.name) == generation]
        files = [StoredFile(file.name, file.size) for file in sorted(listed, key=lambda file: _order(file.name))]
        try:
            headers = [header_in(store, file.name) for file in files]
            parts = parts_of_unknown(headers, [store.path_of(file.name) for file in files])
        except (HoldfastError, OSError) as error:
            return cls(store, generation, files, None, None, f"a data file cannot be read: {error}")
        columns = ColumnsAlone.read(store, index_file(generation))
        if columns is not None and not columns.speaks_of(files, headers):
            lost = "the columns speak of other data files than there are: some are missing or were replaced"
            return cls(store, generation, files, parts, None, lost)
        trouble = why_incomplete(parts) if parts.incomplete else ""
        return cls(store, generation, files, parts, columns, trouble)

    def put_record(self, digesting: Digesting) -> None:
        """Make a checkpoint of the files."""
        assert self.parts is not None
        block_bytes = BLOCK_BYTES if self.columns is None else self.columns.block_bytes
        digests = digesting.digests_of(self.store, self.files, block_bytes)
        if self.columns is not None:
            self._refuse_damage(digests, self.columns.digests, block_bytes)
        record = Record(
            generation=self.generation,
            files=self.files,
            index=StoredFile(index_file(self.generation), 0),
            tensors=self.parts.tensors,
            tree=tree_of_keys([ref.key for ref in self.parts.tensors]),
            block_bytes=block_bytes,
        )
        put_in_place(self.store, record, self.parts, digests, self._repair())

    def _repair(self) -> Repair:
        if self.columns is None:
            return repair_now("record", "the data files", "computed")
        if self.digests_computed:
            earlier = f"the data files and columns whose digests were computed at {self.digests_computed}"
            return repair_now("record", earlier, "computed")
        return repair_now("record", "the data files and the columns", "kept")

    def _refuse_damage(self, found: Digests, expected: Digests, block_bytes: int) -> None:
        wrong = np.flatnonzero(found != expected)
        if not wrong.size:
            return
        first, block = 0, int(wrong[0])
        for file in self.files:
            blocks = -(-file.nbytes // block_bytes)
            if block < first + blocks:
                break
            first += blocks
        path = self.store.path_of(file.name)
        raise DamagedCheckpointError(
            f"{path} is damaged from byte {(block - first) * block_bytes} on ({wrong.size} damaged block(s) in all "
            "files), so no record was made. Copy the file again from where it is whole, or load another checkpoint.",
            file=path,
            key=None,
            expected=int(expected[block]),
            found=int(found[block]),
        )

    def __str__(self) -> str:
        why = self.trouble or "nothing proves that all of its files are there; --generation makes a record nevertheless"
        return f"generation {self.generation}: {why}"


def _order(name: str) -> tuple[int, int]:
    """By rank, and then as its rank has numbered it: the order of files in records."""
    return rank_of(name) or 0, int(name.rpartition("-")[2].partition(".")[0])


def why_incomplete(parts: Parts) -> str:
    """What is wrong with parts of which some tensors are incomplete."""
    key, what = next(iter(parts.incomplete.items()))
    return (
        f"{len(parts.incomplete)} tensor(s) cannot be put together from the data files, such as {key!r}, which {what}"
    )
