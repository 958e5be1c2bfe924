"""Repairs checkpoints of our own format: tables (in version 1, columns) from record and data files, and lost records.

Nothing is destroyed: what is replaced is kept beside it, under another name. The record is put in place by a commit
that fails if somebody else has changed it meanwhile, so a repair that is killed leaves what was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from holdfast._formats.native.columns import Columns, chunk_volumes, decode_columns
from holdfast._formats.native.names import RECORD
from holdfast._formats.native.record import Record
from holdfast._formats.native.source import read_record
from holdfast._stores.store import Store
from holdfast._tools.repairing.data_files import header_in, parts_of_known
from holdfast._tools.repairing.lost_tables import NO_DIGESTS, problems_of_tables, wrong_size
from holdfast._tools.repairing.report import Planned
from holdfast._tools.repairing.unrecorded import (
    Digesting,
    UnrecordedSave,
    generations_in,
    put_in_place,
    repair_now,
    why_incomplete,
)
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, HoldfastError

_LOST_WITH_A_RECORD = (
    "values that are not tensors (steps, learning rates), tensors without elements, ties between tensors, metadata, "
    "and types that safetensors files do not have are lost; keys are as they were, in one flat dict"
)


def problems_of(
    store: Store, *, generation: str | None, may_rebuild: Callable[[], str | None], digesting: Digesting
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
        yield _record_from_files(store, "there is no record", generation, digesting)
        return
    except DamagedCheckpointError as error:
        yield _record_from_files(store, f"the record is damaged: {error}", generation, digesting)
        return
    yield from _problems_below(store, record, digesting)


def complete_saves(store: Store, *, proven: bool) -> frozenset[str]:
    """The generations in a store without a record that a record could be made of.

    If not ``proven``, then also those of which files may be missing without a trace.
    """
    saves = [UnrecordedSave.of(store, generation) for generation in generations_in(store)]
    return frozenset(save.generation for save in saves if save.is_proven or not (proven or save.trouble))


def _problems_below(store: Store, record: Record, digesting: Digesting) -> Iterator[Planned]:
    """What is wrong with the files that a record names."""
    if record.has_tables:
        yield from problems_of_tables(store, record, digesting)
        return
    assert record.index is not None
    sizes = {listed.name: listed.size for listed in store.list()}
    wrong = {file.name: wrong_size(file, sizes.get(file.name)) for file in record.files}
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
            "copy the file again from where it is intact; or keep what is left with holdfast convert --exclude "
            "(in Python: load it with strict=False and include=...)",
            keys=lost,
        )
    if columns is None:
        yield _columns_from_files(store, record, trouble, wrong, digesting)


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
    store: Store, record: Record, trouble: str, wrong: Mapping[str, str], digesting: Digesting
) -> Planned:
    assert record.index is not None
    path = store.path_of(record.index.name)
    problem = f"the file that says where chunks are stored {trouble}"
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
        return Planned(path, problem, why_incomplete(parts), keys=sorted(parts.incomplete))

    def rebuild() -> None:
        digests = digesting.digests_of(store, record.files, record.block_bytes)
        made = repair_now("columns", "the record and the headers of the data files", "computed")
        put_in_place(store, record, parts, digests, made)

    return Planned(path, problem, "rebuilt from the record and the headers of the data files", NO_DIGESTS, do=rebuild)


def _record_from_files(store: Store, problem: str, generation: str | None, digesting: Digesting) -> Planned:
    path = store.path_of(RECORD)
    saves = [UnrecordedSave.of(store, name) for name in generations_in(store)]
    if generation is not None:
        saves = [save for save in saves if save.generation == generation]
        if not saves:
            known = ", ".join(generations_in(store)) or "none"
            return Planned(path, problem, f"there are no data files of generation {generation}; there are: {known}")
    if not saves:
        return Planned(path, problem, "there are no data files to make one from; load another checkpoint")
    usable = [save for save in saves if save.is_proven or (generation is not None and not save.trouble)]
    if not usable:
        return Planned(path, problem, "; ".join(map(str, saves)))
    if len(usable) > 1:
        names = ", ".join(save.generation for save in usable)
        return Planned(path, problem, f"there are several complete saves: {names}. Choose one with --generation")
    save = usable[0]
    loses = _LOST_WITH_A_RECORD
    if save.digests_computed:
        loses += f". The digests were computed in a repair at {save.digests_computed}, not when it was saved"
    if not save.is_proven:
        loses += f". Nothing proves that all files are there. Also, {NO_DIGESTS}"

    def rebuild() -> None:
        save.put_record(digesting)

    return Planned(path, problem, f"made from the data files of generation {save.generation}", loses, do=rebuild)
