"""Checkpoints of several processes, converted by one: DCP files to ``torch.save``, our own to Hugging Face.

All of it is read from the page cache. What Holdfast writes is on the disk when it returns; stock DCP is measured as it
is and, as elsewhere in this suite, with a flush.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import page_cache, probes
from benchmarks.contenders import OURS, OURS_DCP, STOCK
from benchmarks.durable import sync_tree
from benchmarks.memory import LONGEST_JOB, growth
from benchmarks.quiet import quietly
from benchmarks.rounds import Turn, measure
from benchmarks.suite import Suite, remove
from benchmarks.whole_states import DIRECT_WRITES

UNFLUSHED = "stock DCP, not flushed"
UNCHECKED = "holdfast, not read back"
SHARES = [200] * 4 + [100] * 4 + [64] * 6 + [16] * 16 + [4] * 32
"""How large the tensors are, compared with each other. There are some hundred small ones besides."""
SMALL_TENSORS = 300

Convert = Callable[[Path, Path], object]


def measure_conversions(suite: Suite) -> None:
    """How fast they are, and how much memory they take."""
    suite.log("conversions")
    ranks = suite.ranks(max(suite.scale.world_sizes))
    stock, native = suite.place("conversions stock"), suite.place("conversions native")
    try:
        ranks.run(_save, stock, native, suite.scale.converted_bytes, deadline=300.0)
        _measure(suite, "conversion to torch.save", stock, _to_torch_save())
        _measure(suite, "export to Hugging Face", native, _to_hugging_face(), with_probes=True)
    finally:
        remove(stock)
        remove(native)


def _measure(
    suite: Suite, title: str, source: Path, converters: dict[str, Convert], *, with_probes: bool = False
) -> None:
    target = suite.place("converted")
    nbytes = sum(path.stat().st_size for path in page_cache.files_in(source))

    def turn(name: str, convert: Convert) -> Turn:
        def before() -> None:
            remove(target)
            target.mkdir()
            page_cache.fill(source)

        rounds = suite.scale.fewest_rounds if name in (OURS, UNCHECKED) else None  # no target is about them
        return Turn(name, _bound(convert, source, target / "result"), before, most_rounds=rounds)

    turns = [turn(name, convert) for name, convert in converters.items()]
    if with_probes:
        turns += [
            turn(name, lambda _, path, writers=writers: probes.write_directly(path, nbytes, writers))
            for name, writers in DIRECT_WRITES.items()
        ]
    target.mkdir()
    for number, convert in enumerate(converters.values()):
        _first_call(convert, target / str(number))
    suite.measures[title] = measure(title, nbytes, turns, suite.allowance(0.1, has_target=not with_probes))
    peaks = {}
    for name in converters:
        if name not in (UNFLUSHED, UNCHECKED):  # they take what the others do
            remove(target)
            target.mkdir()
            peaks[name] = _peak(title, name, source, target)
    suite.facts[f"memory of {title}"] = {"bytes": nbytes, "peaks": peaks}
    remove(target)


def _bound(convert: Convert, source: Path, target: Path) -> Callable[[], None]:
    def call() -> None:
        convert(source, target)

    return call


def _to_torch_save() -> dict[str, Convert]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as by_stock

    import holdfast as hf
    from holdfast.dcp.format_utils import dcp_to_torch_save

    def flushed(source: Path, target: Path) -> None:
        by_stock(source, target)
        sync_tree(target.parent)

    return {
        OURS_DCP: dcp_to_torch_save,
        OURS: lambda source, target: hf.convert(source, target, to="torch"),
        UNCHECKED: lambda source, target: hf.convert(source, target, to="torch", check=False),
        STOCK: flushed,
        UNFLUSHED: by_stock,
    }


def _to_hugging_face() -> dict[str, Convert]:
    import holdfast as hf

    return {
        OURS: lambda source, target: hf.export(source, target),
        UNCHECKED: lambda source, target: hf.export(source, target, check=False),
    }


# --- memory ---


def _peak(title: str, name: str, source: Path, folder: Path) -> int:
    """How much a process takes that does nothing else."""
    with multiprocessing.get_context("forkserver").Pool(1, maxtasksperchild=1) as pool:
        return pool.apply_async(_growth_of, (title, name, source, folder)).get(LONGEST_JOB)


def _growth_of(title: str, name: str, source: Path, folder: Path) -> int:
    convert = (_to_torch_save() if "torch.save" in title else _to_hugging_face())[name]
    with quietly():
        _first_call(convert, folder / "first")
        return growth(convert, source, folder / "result")


def _first_call(convert: Convert, folder: Path) -> None:
    """Import what is needed."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"w": torch.ones(9)}}, checkpoint_id=folder / "few")  # there is no process group
    convert(folder / "few", folder / "result")


# --- what runs in the processes ---


def _save(stock: Path, native: Path, nbytes: int) -> None:
    """The same state, by torch and by us."""
    import torch.distributed.checkpoint as dcp

    import holdfast as hf

    state = _state(nbytes)
    dcp.save(state, checkpoint_id=stock)
    hf.save(state, native)


def _state(nbytes: int) -> dict[str, Any]:
    """A model of matrices that are cut by rows, and small tensors that all ranks have."""
    from torch.distributed import get_rank, get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (get_world_size(),))
    columns = 1024 if nbytes >= 1 << 30 else 16
    random = torch.Generator().manual_seed(get_rank())
    model: dict[str, torch.Tensor] = {}
    for number, share in enumerate(SHARES):
        rows = max(1, nbytes * share // sum(SHARES) // columns // 4 // get_world_size())
        local = torch.rand(rows, columns, generator=random)
        model[f"layers.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    for number in range(SMALL_TENSORS):
        model[f"norms.{number}.weight"] = torch.full((64 + number,), float(number))
    return {"model": model, "step": 1}
