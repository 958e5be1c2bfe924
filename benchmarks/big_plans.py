"""Plans for more ranks than this machine can run: the root's part is done for real, the others are made up.

Each contender plans once for the same layout: every tensor is cut over all ranks. What the ranks would send is made
before, as bytes; what counts is the processor time from the bytes of all ranks to the bytes for all ranks.
"""

from __future__ import annotations

import dataclasses
import pickle
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.contenders import OURS, OURS_DCP, STOCK
from benchmarks.quiet import quietly
from benchmarks.rounds import Measure
from benchmarks.suite import Suite, remove

ELEMENTS = 4
"""Of every tensor on every rank: what is planned does not depend on it."""

FEW = 8
"""Ranks that have saved what is loaded, to compare with very many of them."""

DEADLINE = 600.0

Found = dict[str, float]


def measure_big_plans(suite: Suite) -> None:
    """The root's plan of a save, the size of the index, and what it costs one rank to load from many and from few."""
    scale = suite.scale
    many, tensors = scale.planned_ranks, scale.planned_tensors
    suite.log(f"plans for {many:,} ranks and {tensors} tensors")
    cpu = Measure(f"one plan for {many:,} ranks and {tensors} tensors, the root's CPU", 0, {name: [] for name in PLANS})
    for number in range(scale.fewest_rounds):
        for name, plan in PLANS.items():
            if number == 0 or name != STOCK:  # which takes so long that noise does not matter
                (found,) = suite.ranks(1).run(plan, many, tensors, process_group=False, deadline=DEADLINE)
                cpu.samples[name].append(found["cpu"])
                suite.facts[f"plan {name}"] = found | {"ranks": many, "tensors": tensors}
    suite.measures["plan"] = cpu
    folders = {size: suite.folder / f"saved-by-{size}" for size in (FEW, many)}
    try:
        for size, folder in folders.items():
            (suite.facts[f"index of {size} ranks" if size == FEW else "index"],) = suite.ranks(1).run(
                _save_as, folder, size, many, tensors, process_group=False, deadline=DEADLINE
            )
        loads = Measure(f"one rank of {many:,} plans and makes a load, CPU", 0, {"by many": [], "by few": []})
        for _ in range(scale.rounds):
            for name, size in (("by many", many), ("by few", FEW)):
                (found,) = suite.ranks(1).run(
                    _load_as, folders[size], many, tensors, process_group=False, deadline=DEADLINE
                )
                loads.samples[name].append(found["cpu"])
        suite.measures["load plan"] = loads
    finally:
        for folder in folders.values():
            remove(folder)


# --- what runs in the processes ---


@contextmanager
def _rank_of(rank: int, world_size: int) -> Any:
    """A process group that pretends to have so many ranks, so that there can be tensors that are spread over them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _state(world_size: int, tensors: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world_size,))
    return {
        _key(number): DTensor.from_local(torch.zeros(ELEMENTS), mesh, [Shard(0)], run_check=False)
        for number in range(tensors)
    }


def _key(number: int) -> str:
    return f"layers.{number}.weight"


def _plan_holdfast(world_size: int, tensors: int) -> Found:
    """``holdfast.save``, up to where it would write: the first save of a state, and not one that is known already."""
    import holdfast
    from holdfast._ranks.meeting import LinkedCollectives
    from holdfast._save.planning import known_plan
    from holdfast._tools.simulating.links import SimulatedLink, Work
    from holdfast.stores import MemoryStore

    with (
        quietly(),
        _rank_of(0, world_size),
        mock.patch("holdfast._save.save.SaveRun.write", side_effect=_EnoughError),
    ):
        state = _state(world_size, tensors)
        for _ in range(2):  # the first one imports what it needs
            known_plan.cache_clear()
            work = Work()
            ranks = LinkedCollectives(SimulatedLink(0, world_size, work))
            with (
                mock.patch("holdfast._save.save.meeting", _meeting(ranks)),
                suppress(_EnoughError),
                work.counted(),
            ):
                holdfast.save(state, MemoryStore("plan"))
    return {"cpu": work.cpu, "bytes_in": work.bytes_in, "bytes_out": work.bytes_out}


class _EnoughError(Exception):
    """Raised where a save would begin to write."""


def _meeting(ranks: Any) -> Callable[..., Any]:
    @contextmanager
    def meeting(*_: Any, **__: Any) -> Any:
        yield ranks

    return meeting


def _plan_stock(world_size: int, tensors: int) -> Found:
    """Stock's default planner, with plans that travel as pickles."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    with quietly(), _rank_of(0, world_size):
        planner: Any = dcp.DefaultSavePlanner()
        planner.set_up_planner(_state(world_size, tensors), is_coordinator=True)
        messages = _plans_of_all(planner.create_local_plan(), world_size)
        began = time.process_time()
        plans, metadata = planner.create_global_plan([pickle.loads(message) for message in messages])
        answers = [pickle.dumps(plan) for plan in plans]
        cpu = time.process_time() - began
        metadata.storage_data = {
            item.index: _StorageInfo(f"__{rank}_0.distcp", 2_000 * number, 2_000)
            for rank, plan in enumerate(plans)
            for number, item in enumerate(plan.items)
        }
        index = len(pickle.dumps(metadata))
    return _found(cpu, messages, answers) | {"index": index}


def _plan_holdfast_dcp(world_size: int, tensors: int) -> Found:
    """``holdfast.dcp.save`` without data and index: the plan, and where all ranks say that they have written."""
    from holdfast._dcp.save import save_state
    from holdfast._dcp.save_planner import DefaultSavePlanner
    from holdfast._ranks.meeting import LinkedCollectives
    from holdfast._tools.simulating.links import SimulatedLink, Work
    from holdfast.dcp import FileSystemWriter

    with (
        quietly(),
        _rank_of(0, world_size),
        tempfile.TemporaryDirectory() as folder,
        mock.patch("holdfast._dcp.shared_save.SharedSave.write", _written_without_bytes),
        mock.patch("holdfast._dcp.writer._FileSystemWriter.finish_shared_plan") as finish,
    ):
        state = _state(world_size, tensors)
        for _ in range(2):  # the first one imports what it needs
            work = Work()
            ranks = LinkedCollectives(SimulatedLink(0, world_size, work))
            with work.counted():
                save_state(state, FileSystemWriter(folder), DefaultSavePlanner(), ranks)
        (_, places, hosts), _ = finish.call_args
    assert len(hosts) == world_size
    assert len(places.places[0]) == world_size * tensors
    return {"cpu": work.cpu, "bytes_in": work.bytes_in, "bytes_out": work.bytes_out}


def _written_without_bytes(save: Any, _: str) -> Any:
    """What a rank says that it has written, which is one chunk of every tensor. All ranks say the same here."""
    from holdfast._dcp.stored_columns import StoredColumns
    from holdfast._formats.dcp.metadata import Seal

    keys = np.arange(len(save.plan.description.keys))
    columns = np.zeros((len(keys), 4 + len(Seal._fields)), np.int64)
    columns[:, 0] = keys
    columns[:, 2] = 2_000 * keys
    columns[:, 3] = 2_000
    return StoredColumns("host", ("__0_0.distcp",), columns)


def _plans_of_all(first: Any, world_size: int) -> list[bytes]:
    """The plans that all ranks would send: the same as the first one's, of other chunks."""
    messages = []
    for rank in range(world_size):
        offset = torch.Size([rank * ELEMENTS])
        items = []
        for item in first.items:
            chunk = dataclasses.replace(item.tensor_data.chunk, offsets=offset)
            items.append(
                dataclasses.replace(
                    item,
                    index=dataclasses.replace(item.index, offset=offset),
                    tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
                )
            )
        messages.append(pickle.dumps(dataclasses.replace(first, items=items)))
    return messages


def _found(cpu: float, messages: list[bytes], answers: list[bytes]) -> Found:
    return {"cpu": cpu, "bytes_in": sum(map(len, messages[1:])), "bytes_out": sum(map(len, answers[1:]))}


PLANS: dict[str, Callable[[int, int], Found]] = {
    OURS: _plan_holdfast,
    OURS_DCP: _plan_holdfast_dcp,
    STOCK: _plan_stock,
}


def _save_as(folder: Path, savers: int, world_size: int, tensors: int) -> Found:
    """A checkpoint as so many ranks would write it, of tensors that are cut over ``world_size``. Returns its sizes."""
    from holdfast._base.boxes import Box
    from holdfast._base.divisions import Cut, Division
    from holdfast._formats.native.dtypes import dtype_named
    from holdfast._formats.native.layout import ChunkToWrite
    from holdfast._formats.native.names import new_generation
    from holdfast._formats.native.refs import TensorRef
    from holdfast._formats.native.stored_parts import PartsByRule
    from holdfast._formats.native.values import Encoder
    from holdfast._formats.native.writing import (
        CheckpointContents,
        ChunkBytes,
        commit_checkpoint,
        inspect_destination,
        write_chunks,
    )
    from holdfast.stores import LocalStore

    @contextmanager
    def zeros(_: Any) -> Any:
        yield ChunkBytes(lambda chunk: [np.zeros(chunk.nbytes, np.uint8)])

    shape, dtype = (world_size * ELEMENTS,), dtype_named("float32")
    length = shape[0] // savers
    store, generation = LocalStore(folder), new_generation()
    existing = inspect_destination(store, overwrite=False)
    files = []
    for rank in range(savers):
        box = Box((rank * length,), (length,))
        chunks = [ChunkToWrite(number, _key(number), dtype, shape, *box) for number in range(tensors)]
        files += write_chunks(store, chunks, zeros, generation=generation, rank=rank)
    encoder = Encoder(lambda *_: None, allow_pickle=False)
    tree = encoder.encode({_key(number): torch.zeros(1) for number in range(tensors)})
    keys = encoder.keys()
    refs = [TensorRef(key, dtype, shape, "sharded") for key in keys]
    parts = [PartsByRule(Division((Cut(0, savers),), (1,)))] * tensors
    contents = CheckpointContents(refs, tree, None, {}, parts, savers)
    commit_checkpoint(store, existing, files, contents, generation)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if not path.name.startswith("data-")}
    return {"index": sum(sizes.values()), "files": len(files)}


def _load_as(folder: Path, world_size: int, tensors: int) -> Found:
    """One rank of so many loads its part, with nothing to say to the others."""
    import holdfast
    from holdfast._ranks.shared_steps import Collectives

    alone = Collectives(None, False, 0)
    with (
        quietly(),
        _rank_of(world_size // 2, world_size),
        mock.patch("holdfast._load.load.meeting", _meeting(alone)),
    ):
        state = _state(world_size, tensors)
        holdfast.load(state, folder)  # the first one imports what it needs
        began = time.process_time()
        holdfast.load(state, folder)
        return {"cpu": time.process_time() - began}
