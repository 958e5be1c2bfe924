"""Writes golden checkpoints with the stock DCP of the torch that runs it; see README.md.

    python -m tests.golden.dcp.write FOLDER

One folder for each kind that this torch can write. Knows torch 2.4 to 2.15 and nothing of Holdfast.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

from tests.golden.dcp import contents

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
except ImportError:  # until 2.4
    from torch.distributed._tensor import DTensor, Replicate, Shard, distribute_tensor
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # until 2.5
    from torch.distributed._composable.fsdp import fully_shard
try:
    from torch.distributed.checkpoint import _extension
except ImportError:  # until 2.6
    _extension = None
try:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
except ImportError:  # 2.7 has it under a private name, older ones have none
    try:
        from torch.distributed.checkpoint._hf_storage import _HuggingFaceStorageWriter as HuggingFaceStorageWriter
    except ImportError:
        HuggingFaceStorageWriter = None


def parameters(function: Any) -> set[str]:
    return set() if function is None else set(inspect.signature(function).parameters)


SHARDS = parameters(HuggingFaceStorageWriter) & {"save_distributed", "save_sharded"}  # called so in 2.8 only


def line(world_size: int) -> Any:
    return init_device_mesh("cpu", (world_size,))


def dtensor_1d(folder: Path, rank: int, world_size: int) -> None:
    placements = {"rows": Shard(0), "columns": Shard(1), "few rows": Shard(0), "copies": Replicate()}
    mesh = line(world_size)
    state = {name: distribute_tensor(full, mesh, [placements[name]]) for name, full in contents.one_dimension().items()}
    dcp.save({"model": state, "step": 12}, checkpoint_id=folder)


def dtensor_2d(folder: Path, rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    placements = {
        "blocks": [Shard(0), Shard(1)],
        "hybrid": [Replicate(), Shard(0)],
        "rows twice": [Shard(0), Shard(0)],
        "copies of columns": [Shard(1), Replicate()],
    }
    state = {name: distribute_tensor(full, mesh, placements[name]) for name, full in contents.two_dimensions().items()}
    dcp.save({"model": state, "step": 12}, checkpoint_id=folder)


def fsdp1(folder: Path, rank: int, world_size: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = FullyShardedDataParallel(contents.Net(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = trained_once(model)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    dcp.save(filled(state), checkpoint_id=folder)


def fsdp2(folder: Path, rank: int, world_size: int) -> None:
    model = contents.Net()
    fully_shard(model, mesh=line(world_size))
    weights, optim = get_state_dict(model, trained_once(model))
    dcp.save(filled({"model": weights, "optim": optim}), checkpoint_id=folder)


def trained_once(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=contents.LEARNING_RATE)
    for parameter in model.parameters():  # older versions cannot compute with FSDP2 without an accelerator
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def filled(state: dict[str, Any]) -> dict[str, Any]:
    """The state with the numbers of ``contents`` in its tensors."""
    for name, full in contents.model().items():
        fill(state["model"][name], full)
    for name, moments in contents.moments().items():
        for kind, full in moments.items():
            fill(state["optim"]["state"][name][kind], full)
    return state


def fill(target: Any, full: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(target, DTensor):
            target.to_local().copy_(distribute_tensor(full, target.device_mesh, target.placements).to_local())
        elif hasattr(target, "local_shards"):
            for shard in target.local_shards():
                begins, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(full[tuple(map(slice, begins, map(sum, zip(begins, sizes, strict=True))))])
        else:
            target.copy_(full)


def one_process(folder: Path, rank: int, world_size: int) -> None:
    dcp.save(contents.of_one_process(), checkpoint_id=folder)


def a_file_per_item(folder: Path, rank: int, world_size: int) -> None:
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, thread_count=2)
    dcp.save(contents.of_one_process(), storage_writer=writer)


def own_keys(folder: Path, rank: int, world_size: int) -> None:
    dcp.save({"own": contents.own_of(rank), "shared": contents.numbers(5)}, checkpoint_id=folder)


def without_collectives(folder: Path, rank: int, world_size: int) -> None:
    state = {name: distribute_tensor(full, line(world_size), [Shard(0)]) for name, full in contents.model().items()}
    dcp.save({"model": state, "step": 12}, checkpoint_id=folder, use_collectives=False)


def zstd(folder: Path, rank: int, world_size: int) -> None:
    writer = dcp.FileSystemWriter(folder, _extensions=[_extension.ZStandard()])
    dcp.save(contents.of_one_process(), storage_writer=writer)


def hugging_face(folder: Path, rank: int, world_size: int) -> None:
    writer = HuggingFaceStorageWriter(path=str(folder), fqn_to_index_mapping=contents.HUGGING_FACE_FILES)
    dcp.save(contents.model(), storage_writer=writer)


def hugging_face_shards(folder: Path, rank: int, world_size: int) -> None:
    state = {name: distribute_tensor(full, line(world_size), [Shard(0)]) for name, full in contents.model().items()}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path=str(folder), **dict.fromkeys(SHARDS, True)))


Kind = Callable[[Path, int, int], None]
KINDS: dict[str, tuple[Kind, int, bool]] = {
    # name: what writes it, on how many ranks, whether this torch can
    "dtensor-1d": (dtensor_1d, 4, True),
    "dtensor-2d": (dtensor_2d, 4, True),
    "fsdp1": (fsdp1, 2, True),
    "fsdp2": (fsdp2, 2, True),
    "one-process": (one_process, 1, True),
    "a-file-per-item": (a_file_per_item, 1, True),
    "own-keys": (own_keys, 3, True),
    "without-collectives": (without_collectives, 3, "use_collectives" in parameters(dcp.save)),
    "zstd": (zstd, 1, hasattr(_extension, "ZStandard")),
    "hugging-face": (hugging_face, 1, HuggingFaceStorageWriter is not None),
    "hugging-face-shards": (hugging_face_shards, 2, bool(SHARDS)),
}


def write_as_rank(rank: int, name: str, folder: Path, scratch: str) -> None:
    kind, world_size, _ = KINDS[name]
    store = dist.FileStore(f"{scratch}/{name}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    warnings.simplefilter("ignore")
    kind(folder / name, rank, world_size)
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, (_, world_size, can_be_written) in KINDS.items():
            if can_be_written:
                arguments = (name, folder, scratch)
                torch.multiprocessing.start_processes(
                    write_as_rank, args=arguments, nprocs=world_size, start_method="spawn"
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
