"""Repairs checkpoints of our own format: columns from the record and the data files, a record from the data files.

Nothing is destroyed: what is replaced is kept beside it, under another name. The record is put in place by a commit
that fails if somebody else has changed it meanwhile, so a repair that is killed leaves what was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np

from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, HoldfastError
from holdfast.formats.native.blocks import Digests, digest_blocks
from holdfast.formats.native.columns import Columns, chunk_volumes, decode_columns, digest_of, encode_columns
from holdfast.formats.native.names import RECORD, generation_of, index_file, rank_of
from holdfast.formats.native.record import BLOCK_BYTES, Record, StoredFile, encode_record
from holdfast.formats.native.refs import TensorRef
from holdfast.progress import OnProgress
from holdfast.repairing.columns_alone import ColumnsAlone
from holdfast.repairing.data_files import Part, Parts, header_in, parts_of_known, parts_of_unknown
from holdfast.repairing.key_trees import tree_of_keys
from holdfast.repairing.planned import Planned
from holdfast.sources.native import read_record
from holdfast.stores.store import Store

KEPT = ".before-repair"
"""At the end of the names of what was replaced."""

_PIECE_BLOCKS = 128
_NO_DIGESTS = (
    "the digests are computed from the data files as they are now, so that damage to them that was there before can no "
    "longer be noticed"
)
_LOST_WITH_A_RECORD = (
    "values that are no tensors (steps, learning rates), tensors without elements, ties between tensors, metadata, and "
    "types that safetensors files do not have are lost; keys are as they were, in one flat dict"
)


def problems_of(
    store: Store, *, generation: str | None, may_rebuild: Callable[[], str | None], on_progress: OnProgress | None
) -> Iterator[Planned]:
    """What is wrong with the checkpoint in a store, and what can be done.

    ``generation`` chooses the save if there are several. ``may_rebuild`` says why a record must not be made where there
    is none, if so: a save may be going on.
    """
    path = store.path_of(RECORD)
    try:
        record = read_record(store)
    except CheckpointNotFoundError:
        obstacle = may_rebuild()
        if obstacle is not None:
            yield Planned(path, "there is no record", obstacle)
            return
        yield _record_from_files(store, "there is no record", generation, on_progress)
        return
    except DamagedCheckpointError as error:
        yield _record_from_files(store, f"the record is damaged: {error}", generation, on_progress)
        return
    yield from _problems_below(store, record, on_progress)


def whole_saves(store: Store, *, proven: bool) -> frozenset[str]:
    """The generations in a store without a record that a record could be made of.

    If not ``proven``, then also those of which files may be missing without a trace.
    """
    saves = [_Save.of(store, generation) for generation in _generations(store)]
    return frozenset(save.generation for save in saves if save.is_proven or not (proven or save.trouble))


def _problems_below(store: Store, record: Record, on_progress: OnProgress | None) -> Iterator[Planned]:
    """What is wrong with the files that a record names."""
    sizes = {listed.name: listed.size for listed in store.list()}
    wrong = {file.name: _wrong_size(file, sizes.get(file.name)) for file in record.files}
    wrong = {name: what for name, what in wrong.items() if what}
    try:
        columns: Columns | None = decode_columns(
            store.read(record.index.name), record, store.path_of(record.index.name)
        )
        trouble = ""
    except (FileNotFoundError, DamagedCheckpointError) as error:
        columns = None
        trouble = "is missing" if isinstance(error, FileNotFoundError) else "is damaged"
    for name, what in wrong.items():
        lost = _keys_in(record, columns, name, behind=sizes.get(name, 0))
        yield Planned(
            store.path_of(name),
            what,
            "copy the file again from where it is whole; or load what is left with strict=False and include=...",
            keys=lost,
        )
    if columns is None:
        yield _columns_from_files(store, record, trouble, wrong, on_progress)


def _wrong_size(file: StoredFile, found: int | None) -> str:
    if found is None:
        return "the file is missing"
    return "" if found == file.nbytes else f"the file has {found} bytes, and should have {file.nbytes}"


def _keys_in(record: Record, columns: Columns | None, name: str, *, behind: int) -> list[str]:
    """The tensors that have a chunk in a file that ends behind this byte, if that is known."""
    if columns is None:
        return []
    number = [file.name for file in record.files].index(name)
    itemsizes = np.array([ref.dtype.itemsize for ref in record.tensors], np.int64)
    ends = columns.chunk_begin + chunk_volumes(columns, record) * itemsizes[columns.chunk_tensor]
    lost = (columns.chunk_file == number) & (ends > behind)
    return [record.tensors[tensor].key for tensor in np.unique(columns.chunk_tensor[lost]).tolist()]


def _columns_from_files(
    store: Store, record: Record, trouble: str, wrong: Mapping[str, str], on_progress: OnProgress | None
) -> Planned:
    path = store.path_of(record.index.name)
    problem = f"the file that tells where chunks lie {trouble}"
    if wrong:
        return Planned(path, problem, "it can be rebuilt once all data files are there")
    try:
        headers = [header_in(store, file.name) for file in record.files]
    except (HoldfastError, OSError) as error:
        return Planned(
            path, problem, f"it would be rebuilt from the data files, and one of them cannot be read: {error}"
        )
    parts = parts_of_known(headers, record.tensors)
    if parts.incomplete:
        return Planned(path, problem, _why_incomplete(parts), keys=sorted(parts.incomplete))

    def rebuild() -> None:
        digests = _digests(store, record.files, record.block_bytes, on_progress)
        _put_in_place(store, replace(record, written=_noted(record.written, "columns")), parts, digests)

    return Planned(path, problem, "rebuilt from the record and the headers of the data files", _NO_DIGESTS, do=rebuild)


def _record_from_files(store: Store, problem: str, generation: str | None, on_progress: OnProgress | None) -> Planned:
    path = store.path_of(RECORD)
    saves = [_Save.of(store, name) for name in _generations(store)]
    if generation is not None:
        saves = [save for save in saves if save.generation == generation]
        if not saves:
            known = ", ".join(_generations(store)) or "none"
            return Planned(path, problem, f"there are no data files of generation {generation}; there are: {known}")
    if not saves:
        return Planned(path, problem, "there are no data files to make one from; load another checkpoint")
    usable = [save for save in saves if save.is_proven or (generation is not None and not save.trouble)]
    if not usable:
        return Planned(path, problem, "; ".join(map(str, saves)))
    if len(usable) > 1:
        names = ", ".join(save.generation for save in usable)
        return Planned(path, problem, f"there are several whole saves: {names}. Choose one with --generation")
    save = usable[0]
    loses = _LOST_WITH_A_RECORD
    if not save.is_proven:
        loses += f". Nothing proves that all files are there. Also, {_NO_DIGESTS}"

    def rebuild() -> None:
        save.put_record(on_progress)

    return Planned(path, problem, f"made from the data files of generation {save.generation}", loses, do=rebuild)


def _generations(store: Store) -> list[str]:
    found = {generation_of(listed.name) for listed in store.list() if rank_of(listed.name) is not None}
    return sorted(generation for generation in found if generation is not None)


@dataclass(frozen=True)
class _Save:
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

    @classmethod
    def of(cls, store: Store, generation: str) -> _Save:
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
        trouble = _why_incomplete(parts) if parts.incomplete else ""
        return cls(store, generation, files, parts, columns, trouble)

    def put_record(self, on_progress: OnProgress | None) -> None:
        """Make a checkpoint of the files."""
        assert self.parts is not None
        block_bytes = BLOCK_BYTES if self.columns is None else self.columns.block_bytes
        digests = _digests(self.store, self.files, block_bytes, on_progress)
        if self.columns is not None:
            self._refuse_damage(digests, self.columns.digests, block_bytes)
        record = Record(
            generation=self.generation,
            files=self.files,
            index=StoredFile(index_file(self.generation), 0),
            tensors=self.parts.tensors,
            tree=tree_of_keys([ref.key for ref in self.parts.tensors]),
            written=_noted({}, "record"),
            block_bytes=block_bytes,
        )
        _put_in_place(self.store, record, self.parts, digests)

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


def _why_incomplete(parts: Parts) -> str:
    key, what = next(iter(parts.incomplete.items()))
    return (
        f"{len(parts.incomplete)} tensor(s) cannot be put together from the data files, such as {key!r}, which {what}"
    )


def _digests(store: Store, files: Sequence[StoredFile], block_bytes: int, on_progress: OnProgress | None) -> Digests:
    """The digests of all blocks of all files, read in pieces."""
    found = [np.empty(0, np.uint32)]
    total, done = sum(file.nbytes for file in files), 0
    buffer = memoryview(bytearray(_PIECE_BLOCKS * block_bytes))
    for file in files:
        with store.reader(file.name) as reader:
            for begin in range(0, file.nbytes, len(buffer)):
                piece = buffer[: min(len(buffer), file.nbytes - begin)]
                reader.read_into(begin, piece)
                found.append(digest_blocks(piece, block_bytes))
                done += len(piece)
                if on_progress is not None:
                    on_progress(done, total)
    return np.concatenate(found)


def _put_in_place(store: Store, record: Record, parts: Parts, digests: Digests) -> None:
    """Write the columns and commit the record. What was there before is kept under other names."""
    content = encode_columns(_columns(record.tensors, parts.parts, digests))
    index = StoredFile(record.index.name, len(content), digest_of(content))
    finished = replace(record, index=index)
    decode_columns(content, finished, store.path_of(index.name))  # nothing is put in place that readers would refuse
    encoded = encode_record(finished)
    old_index, old_record = _kept(store, index.name), _kept(store, RECORD)
    store.commit(index.name, content, replaces=old_index)
    store.sync()
    store.commit(RECORD, encoded, replaces=old_record)


def _kept(store: Store, name: str) -> bytes | None:
    """What is in a file, of which a copy is kept beside it; None if there is no such file."""
    try:
        content = store.read(name)
    except FileNotFoundError:
        return None
    taken = {listed.name for listed in store.list()}
    copies: Iterable[str] = (f"{name}{KEPT}{number}" for number in ("", *range(2, 1000)))
    free = next((copy for copy in copies if copy not in taken or store.read(copy) == content), None)
    if free is not None and free not in taken:
        store.put(free, content)
    return content


def _columns(tensors: Sequence[TensorRef], parts: Mapping[str, Sequence[Part]], digests: Digests) -> Columns:
    rows = [
        (number, part)
        for number, ref in enumerate(tensors)
        for part in sorted(parts.get(ref.key, ()), key=lambda part: part.offsets)
        if 0 not in part.sizes
    ]

    def column(values: Iterable[int]) -> Any:
        return np.array(list(values), dtype=np.int64)

    return Columns(
        chunk_tensor=column(number for number, _ in rows),
        chunk_file=column(part.file for _, part in rows),
        chunk_begin=column(part.begin for _, part in rows),
        chunk_offsets=column(offset for _, part in rows for offset in part.offsets),
        chunk_sizes=column(size for _, part in rows for size in part.sizes),
        digests=digests,
    )


def _noted(written: Mapping[str, Any], what: str) -> dict[str, Any]:
    """How it was written, with a note that it was repaired."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {**written, "repaired": {"what": what, "time": now}}
