"""Holdfast and all others, each behind the same two calls.

A save is durable when it returns: whoever does not flush by itself is followed by ``sync_tree``, within the measured
time. A load ends with the bytes in the tensors of an existing state: whoever returns new tensors has them copied there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.durable import sync_tree
from benchmarks.states import State

OURS = "holdfast"
OURS_DCP = "holdfast.dcp"
STOCK = "stock DCP"
STOCK_VARIANTS = ("stock DCP, 2 threads", "stock DCP, 4 threads", "stock DCP, a file per tensor")
PEERS = ("torch.save", "safetensors", "torch_checkpointing", "torchsnapshot")
PLAIN_LOAD, MAPPED_LOAD = "torch.load", "torch.load, mapped"
LOADING_PEERS = (PLAIN_LOAD, MAPPED_LOAD, *PEERS[1:])
SLOW_PEERS = ("torch_checkpointing", "torchsnapshot")
"""With many small tensors."""


class Contender(Protocol):
    """One way to save and load a state."""

    def save(self, state: State, folder: Path) -> None:
        """Save to a folder that does not exist yet."""

    def load(self, state: State, folder: Path) -> None:
        """Load into the tensors of the state."""


class Holdfast:
    """``holdfast.save`` and ``load``: digests are made and checked. Loads from DCP files too."""

    def __init__(self) -> None:
        import holdfast

        self._holdfast = holdfast

    def save(self, state: State, folder: Path) -> None:
        self._holdfast.save(state, folder)

    def load(self, state: State, folder: Path) -> None:
        self._holdfast.load(state, folder)


class HoldfastDcp:
    """The drop-in: DCP files."""

    def __init__(self) -> None:
        import holdfast.dcp

        self._dcp = holdfast.dcp

    def save(self, state: State, folder: Path) -> None:
        self._dcp.save(state, checkpoint_id=folder)

    def load(self, state: State, folder: Path) -> None:
        self._dcp.load(state, checkpoint_id=folder)


class StockDcp:
    """``torch.distributed.checkpoint``, which flushes its files by default; the folder is left to it as it is."""

    def __init__(self, **options: Any) -> None:
        import torch.distributed.checkpoint as dcp

        self._dcp = dcp
        self._options = options

    def save(self, state: State, folder: Path) -> None:
        self._dcp.save(state, storage_writer=self._dcp.FileSystemWriter(folder, **self._options))

    def load(self, state: State, folder: Path) -> None:
        self._dcp.load(state, checkpoint_id=folder)


class TorchSave:
    """One file of ``torch.save``."""

    def __init__(self, *, mapped: bool = False) -> None:
        self._mapped = mapped

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir()
        torch.save(state, folder / "state.pt")
        sync_tree(folder)

    def load(self, state: State, folder: Path) -> None:
        _copy(torch.load(folder / "state.pt", mmap=self._mapped), state)


class Safetensors:
    """One file of ``safetensors.torch``."""

    def __init__(self) -> None:
        import safetensors.torch

        self._safetensors = safetensors.torch

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir()
        self._safetensors.save_file(state, folder / "state.safetensors")
        sync_tree(folder)

    def load(self, state: State, folder: Path) -> None:
        _copy(self._safetensors.load_file(folder / "state.safetensors"), state)


class TorchCheckpointing:
    """``torch_checkpointing`` with its synchronous saver, an item for each part of the state, written by two threads.

    Its default direct writer does not align its writes, which ext4 refuses, so it is given buffered ones.
    """

    def __init__(self) -> None:
        from torch_checkpointing import CheckpointManager, CheckpointWriterConfig, SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=SyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(file_write_max_threads=2)),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, state: State, folder: Path) -> None:
        self._manager.save(str(folder), _by_part(state))
        sync_tree(folder)

    def load(self, state: State, folder: Path) -> None:
        self._manager.load(str(folder), into=_by_part(state))  # copies into the tensors by itself


class Torchsnapshot:
    """``torchsnapshot``, which restores in place."""

    def __init__(self) -> None:
        import torchsnapshot

        self._snapshot = torchsnapshot.Snapshot
        self._state_dict = torchsnapshot.StateDict

    def save(self, state: State, folder: Path) -> None:
        self._snapshot.take(str(folder), {"state": self._state_dict(**state)})
        sync_tree(folder)

    def load(self, state: State, folder: Path) -> None:
        self._snapshot(str(folder)).restore({"state": self._state_dict(**state)})


def _by_part(state: State) -> dict[str, State]:
    parts: dict[str, State] = {}
    for key, tensor in state.items():
        parts.setdefault(key.partition(".")[0], {})[key] = tensor
    return parts


def _copy(loaded: State, state: State) -> None:
    for key, tensor in state.items():
        tensor.copy_(loaded[key])


MAKERS: dict[str, Callable[[], Contender]] = {
    OURS: Holdfast,
    OURS_DCP: HoldfastDcp,
    STOCK: StockDcp,
    STOCK_VARIANTS[0]: lambda: StockDcp(thread_count=2),
    STOCK_VARIANTS[1]: lambda: StockDcp(thread_count=4),
    STOCK_VARIANTS[2]: lambda: StockDcp(single_file_per_rank=False, thread_count=2),
    "torch.save": TorchSave,
    MAPPED_LOAD: lambda: TorchSave(mapped=True),
    "safetensors": Safetensors,
    "torch_checkpointing": TorchCheckpointing,
    "torchsnapshot": Torchsnapshot,
}


def why_missing(name: str) -> str | None:
    """Why a contender cannot take part; None if it can."""
    package = name if name in ("safetensors", "torch_checkpointing", "torchsnapshot") else "torch"
    return None if importlib.util.find_spec(package) else "not installed"
