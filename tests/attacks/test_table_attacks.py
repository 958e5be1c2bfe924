"""Checkpoints of version 2 whose records, tables and indexes were made to do harm, with digests that are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast._stores.local_store import LocalStore
from holdfast.errors import DamagedCheckpointError, StateMismatchError
from tests.attacks.table_forgery import TableForgery
from tests.attacks.test_native_attacks import load_into_nothing, open_and_load, open_and_slice, outcome, verify
from tests.tools.repairing.checkpoints import write

WAYS = [open_and_load, open_and_slice, load_into_nothing, verify]


@pytest.fixture
def forgery(tmp_path: Path) -> TableForgery:
    """Of three tensors: rows of one on two ranks by a rule, one in uneven parts, and a whole one on the second rank."""
    tensors = {"weight": ("float32", (4, 6)), "bias": ("int64", (10,)), "step": ("int32", ())}
    cuts = {
        "weight": [(0, (0, 0), (2, 6)), (1, (2, 0), (2, 6))],
        "bias": [(0, (0,), (3,)), (1, (3,), (7,))],
        "step": [(1, (), ())],
    }
    write(LocalStore(tmp_path / "c"), tensors, cuts)
    found = TableForgery(tmp_path / "c")
    # The rule for the rows, which the helper writes as a list.
    found.record["divisions"].append({"cuts": [[0, 2]], "steps": [1]})
    found.record["tensors"][0]["division"] = len(found.record["divisions"]) - 1
    assert found.index is not None
    own = found.index["part_tensor"] == 1
    for name in ("part_tensor", "part_rank"):
        found.index[name] = found.index[name][own]
    for name in ("part_offsets", "part_sizes"):
        found.index[name] = found.index[name][-2:]
    return found


def test_the_forgery_is_read_if_nothing_is_forged(forgery):
    forgery.write()
    assert [outcome(read, forgery.folder) for read in (open_and_load, open_and_slice, verify)] == [None] * 3


def file(record: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return record["files"][number]


def rule(record: dict[str, Any]) -> dict[str, Any]:
    return record["divisions"][record["tensors"][0]["division"]]


def kept(record: dict[str, Any], **table: Any) -> None:
    """A place of a table that stays wrong."""
    found = file(record)
    found["keep"] = 1
    found["table"].update(table)


RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no world size": lambda r: r.pop("world_size"),
    "a world of nobody": lambda r: r.update(world_size=0),
    "a world without end": lambda r: r.update(world_size=10**18),
    "a world of truth": lambda r: r.update(world_size=True),
    "a smaller world": lambda r: r.update(world_size=1),
    "no divisions": lambda r: r.pop("divisions"),
    "divisions as an object": lambda r: r.update(divisions={}),
    "a division as a number": lambda r: r.update(divisions=[1] * 9),
    "parts without end": lambda r: rule(r).update(cuts=[[0, 10**18]]),
    "parts without end in many cuts": lambda r: rule(r).update(cuts=[[0, 1 << 15]] * 60, steps=[1] * 60),
    "cuts without end": lambda r: rule(r).update(cuts=[[0, 1]] * 100_000, steps=[1] * 100_000),
    "no parts": lambda r: rule(r).update(cuts=[[0, 0]]),
    "negative parts": lambda r: rule(r).update(cuts=[[0, -2]]),
    "parts of floats": lambda r: rule(r).update(cuts=[[0, 2.0]]),
    "a cut of one number": lambda r: rule(r).update(cuts=[[2]]),
    "a cut along a dimension that is not there": lambda r: rule(r).update(cuts=[[2, 2]]),
    "a cut along a negative dimension": lambda r: rule(r).update(cuts=[[-1, 2]]),
    "no steps": lambda r: rule(r).pop("steps"),
    "a step more": lambda r: rule(r).update(steps=[1, 1]),
    "a negative step": lambda r: rule(r).update(steps=[-1]),
    "a huge step": lambda r: rule(r).update(steps=[1 << 60]),
    "a step of nothing": lambda r: rule(r).update(steps=[0]),
    "another cut": lambda r: rule(r).update(cuts=[[1, 2]]),
    "more parts than were stored": lambda r: rule(r).update(cuts=[[0, 4]]),
    "a million parts of one": lambda r: rule(r).update(cuts=[[0, 1 << 20]]),
    "ranks of an unknown list": lambda r: rule(r).update(ranks=0),
    "ranks that are a list": lambda r: rule(r).update(ranks=[0, 1]),
    "a list of no ranks": lambda r: (r.update(rank_lists=[[]]), rule(r).update(ranks=0)),
    "a list of unknown ranks": lambda r: (r.update(rank_lists=[[0, 2]]), rule(r).update(ranks=0)),
    "a list of the same rank": lambda r: (r.update(rank_lists=[[0, 0]]), rule(r).update(ranks=0)),
    "rank lists as a number": lambda r: r.update(rank_lists=7),
    "an unknown division": lambda r: r["tensors"][0].update(division=7),
    "a negative division": lambda r: r["tensors"][0].update(division=-1),
    "a division of truth": lambda r: r["tensors"][0].update(division=True),
    "the division of another": lambda r: r["tensors"][0].pop("division"),
    "a rule for what is listed": lambda r: r["tensors"][1].pop("division"),
    "a list for what has a rule": lambda r: r["tensors"][0].update(division=None),
    "another first rank": lambda r: r["tensors"][0].update(first=1),
    "a negative first rank": lambda r: r["tensors"][0].update(first=-1),
    "a first rank without end": lambda r: r["tensors"][0].update(first=10**30),
    "a first rank of half": lambda r: r["tensors"][0].update(first=0.5),
    "no index": lambda r: r.pop("index"),
    "a file without rank": lambda r: file(r).pop("rank"),
    "a file of an unknown rank": lambda r: file(r).update(rank=2),
    "a file of a negative rank": lambda r: file(r).update(rank=-1),
    "a file of another rank": lambda r: file(r).update(rank=1),
    "a file less": lambda r: r["files"].pop(),
    "a file without table": lambda r: file(r).pop("table"),
    "a table as a number": lambda r: file(r).update(table=7),
    "a table beyond the file": lambda r: kept(r, begin=1 << 50),
    "a table of huge size": lambda r: (
        kept(r, bytes=1 << 60),
        file(r).update(bytes=(1 << 60) + file(r)["table"]["begin"]),
    ),
    "a table at a negative place": lambda r: kept(r, begin=-8),
    "a table that is empty": lambda r: (kept(r, bytes=0), file(r).update(bytes=file(r)["table"]["begin"])),
    "a table that begins earlier": lambda r: kept(
        r, begin=file(r)["table"]["begin"] - 8, bytes=file(r)["table"]["bytes"] + 8
    ),
    "another digest of a table": lambda r: kept(r, xxh3_128="0" * 32),
    "a digest of a table that is a number": lambda r: kept(r, xxh3_128=7),
    "no range of tensors": lambda r: file(r).pop("tensors"),
    "another range of tensors": lambda r: file(r).update(tensors=[1, 1]),
    "an empty range of tensors": lambda r: file(r).update(tensors=[0, -1]),
    "a range of tensors of floats": lambda r: file(r).update(tensors=[0.0, 1.0]),
    "an unknown list of tensors": lambda r: file(r).update(tensor_list=0),
    "a list of unknown tensors": lambda r: (r.update(tensor_lists=[[0, 9]]), file(r).update(tensor_list=0)),
    "a list of too few tensors": lambda r: (r.update(tensor_lists=[[0]]), file(r).update(tensor_list=0)),
    "a list that exchanges tensors": lambda r: (r.update(tensor_lists=[[1, 0]]), file(r).update(tensor_list=0)),
    "a list that leaves out a tensor": lambda r: (
        r.update(tensor_lists=[[0, -2]]),
        file(r).update(tensor_list=0, tensors=[0, 0]),
    ),
    "tensors of too many dimensions in a list": lambda r: (
        r.update(tensor_lists=[[0, -(10**9)]]),
        file(r).update(tensor_list=0),
    ),
    "tensor lists as texts": lambda r: r.update(tensor_lists=["a"]),
    "a shape that no file has room for": lambda r: r["tensors"][0].update(shape=[4, 1 << 30]),
}


@pytest.mark.parametrize("attack", RECORDS)
def test_a_forged_record_is_refused(forgery, attack):
    forgery.write()
    RECORDS[attack](forgery.record)
    forgery.write()
    for read in WAYS:
        error = outcome(read, forgery.folder)
        assert isinstance(error, (DamagedCheckpointError, StateMismatchError)), (read.__name__, error)
        assert len(str(error)) < 2000


T = dict[str, np.ndarray]


def put(name: str, position: int, value: int) -> Callable[[T], None]:
    def attack(table: T) -> None:
        table[name][position] = value

    return attack


def resized(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[T], None]:
    def attack(table: T) -> None:
        table[name] = change(table[name])

    return attack


TABLES: dict[str, Callable[[T], None]] = {
    "a tensor out of range": put("chunk_tensor", -1, 99),
    "the largest tensor number": put("chunk_tensor", -1, 2**32 - 1),
    "tensors out of order": put("chunk_tensor", 0, 2),
    "a chunk behind the data": put("chunk_begin", 0, 1 << 20),
    "a chunk that reaches into the table": put("chunk_begin", 0, 4096 + 72 - 8),
    "a chunk at the end of all numbers": put("chunk_begin", 0, 2**64 - 1),
    "a chunk where sums overflow": put("chunk_begin", 0, 2**62 - 1),
    "a chunk outside of its tensor": put("chunk_offsets", 0, 3),
    "a chunk of another part": put("chunk_offsets", 0, 2),
    "a chunk that reaches out of its part": put("chunk_offsets", 0, 1),
    "a chunk far outside": put("chunk_offsets", 0, 2**64 - 1),
    "a chunk without elements": put("chunk_sizes", 0, 0),
    "a chunk that is too small": put("chunk_sizes", 0, 1),
    "a chunk larger than its part": put("chunk_sizes", 0, 3),
    "a chunk that covers its part and more": lambda table: (
        put("chunk_begin", 0, 4096)(table),
        put("chunk_sizes", 0, 3)(table),
    ),
    "a huge chunk": put("chunk_sizes", 0, 2**62 - 1),
    "sizes that overflow": lambda table: table["chunk_sizes"].fill(1 << 61),
    "a chunk less": resized("chunk_tensor", lambda column: column[:-1]),
    "no chunks": lambda table: table.update({name: table[name][:0] for name in table if name.startswith("chunk_")}),
    "a chunk twice": lambda table: table.update(
        chunk_tensor=np.append(table["chunk_tensor"][:1], table["chunk_tensor"]),
        chunk_begin=np.append(table["chunk_begin"][:1], table["chunk_begin"]),
        chunk_offsets=np.append(table["chunk_offsets"][:2], table["chunk_offsets"]),
        chunk_sizes=np.append(table["chunk_sizes"][:2], table["chunk_sizes"]),
    ),
    "a position less": resized("chunk_begin", lambda column: column[:-1]),
    "an offset less": resized("chunk_offsets", lambda column: column[:-1]),
    "a size more": resized("chunk_sizes", lambda column: np.append(column, column[-1:])),
    "a digest less": resized("digests", lambda column: column[:-1]),
    "a digest more": resized("digests", lambda column: np.append(column, column[-1:])),
    "other digests": resized("digests", lambda column: column ^ np.uint32(1)),
    "a column of another type": resized("chunk_begin", lambda column: column.astype("<i8")),
    "a column of floats": resized("digests", lambda column: column.view("<f4")),
    "a column in two dimensions": resized("chunk_tensor", lambda column: column.reshape(1, -1)),
    "a column that is missing": lambda table: table.pop("digests"),
}


@pytest.mark.parametrize("attack", TABLES)
def test_forged_tables_are_refused(forgery, attack):
    forgery.write()
    TABLES[attack](forgery.tables[0])
    forgery.write()
    for read in WAYS:
        error = outcome(read, forgery.folder)
        assert isinstance(error, DamagedCheckpointError), (read.__name__, error)
        assert str(forgery.folder) in error.file


INDEXES: dict[str, Callable[[T], None]] = {
    "a tensor out of range": put("part_tensor", -1, 99),
    "a tensor that has a rule": put("part_tensor", 0, 0),
    "an unknown rank": put("part_rank", 0, 2),
    "the largest rank": put("part_rank", 0, 2**32 - 1),
    "another rank": put("part_rank", 0, 1),
    "parts that overlap": put("part_offsets", 1, 0),
    "a part outside": put("part_offsets", 1, 9),
    "a part without elements": put("part_sizes", 0, 0),
    "a part that is too large": put("part_sizes", 0, 4),
    "a huge part": put("part_sizes", 0, 2**62 - 1),
    "a part less": resized("part_tensor", lambda column: column[:-1]),
    "no parts": lambda index: index.update({name: index[name][:0] for name in index}),
    "a rank less": resized("part_rank", lambda column: column[:-1]),
    "an offset less": resized("part_offsets", lambda column: column[:-1]),
    "a column that is missing": lambda index: index.pop("part_rank"),
}


@pytest.mark.parametrize("attack", INDEXES)
def test_a_forged_index_is_refused(forgery, attack):
    INDEXES[attack](forgery.index)
    forgery.write()
    for read in WAYS:
        error = outcome(read, forgery.folder)
        assert isinstance(error, DamagedCheckpointError), (read.__name__, error)


def test_parts_that_overlap_are_refused_though_the_tables_agree(forgery):
    """They have as many elements as the tensor, and would leave some of it as it was before."""
    bias = forgery.tables[1]["chunk_tensor"].tolist().index(1)
    assert (bias, forgery.tables[1]["chunk_offsets"][2]) == (1, 3)
    forgery.tables[1]["chunk_offsets"][2] = 0
    forgery.index["part_offsets"][1] = 0
    forgery.write()
    for read in WAYS:
        error = outcome(read, forgery.folder)
        assert isinstance(error, DamagedCheckpointError), (read.__name__, error)
        assert "overlap" in str(error)


def test_members_of_a_later_minor_version_are_passed_over(forgery):
    forgery.record.update(version=[2, 7], news={"a": [1]})
    for table in ("tensors", "files", "divisions"):
        forgery.record[table][0]["news"] = 1
    forgery.tables[0]["more"] = np.arange(3, dtype="<u4")
    forgery.write()
    assert [outcome(read, forgery.folder) for read in (open_and_load, open_and_slice, verify)] == [None] * 3


def test_chunks_that_no_part_of_their_rank_has_count_for_nothing(forgery):
    """As of a tensor that several ranks have written, of which one counts."""
    table = forgery.tables[0]
    table["chunk_tensor"] = np.append(table["chunk_tensor"], np.uint32(2))
    table["chunk_begin"] = np.append(table["chunk_begin"], np.uint64(0))
    forgery.record["files"][0]["tensors"] = [0, 2]
    forgery.write()
    assert [outcome(read, forgery.folder) for read in (open_and_load, open_and_slice, verify)] == [None] * 3
