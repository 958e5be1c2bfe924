"""What a program and its writer process say to each other: orders, answers, snapshots in shared memory."""

from __future__ import annotations

import io
import mmap
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._background.arenas import Arena, ArenaPool, Lease, Memory, shared_arena_of
from holdfast._background.snapshots import plain_parts_of_state, take_snapshot
from holdfast._background.tensor_copies import is_wrapper, make_sharded, put_together, take_apart
from holdfast._base.notices import add_note
from holdfast._compat.sharded_tensors import ShardedTensor
from holdfast._layout.checkpointable import FIELDS, is_checkpointable
from holdfast._ranks.failures import PackedFailure, pack_failure, unpack_failure, wrap_exception
from holdfast._ranks.shared_steps import Collectives
from holdfast._watching.calls import Call
from holdfast.errors import CheckpointException, UnguardedScriptError

# What a program and its writer process say to each other.


Work = Callable[[Collectives, Any, "Call | None"], Any]
"""Saves a copy of a state with the given ranks. Must be picklable to run in a writer process."""


@dataclass(frozen=True)
class SaveRequest:
    """Save this. ``members`` is None for a save of one process alone."""

    work: Work
    state: Any
    call: Call | None
    rank: int
    members: tuple[int, ...] | None
    coordinator_rank: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """The writer asks its program to talk to the other ranks: a method of ``Link`` and its arguments."""

    method: str
    payload: bytes | None
    keywords: dict[str, Any]
    joins: bool = False
    """Whether the writer is to be asked to join what neighbouring ranks have."""


@dataclass(frozen=True)
class ToBeJoined:
    """The program asks its writer, which has asked it to talk to the other ranks, to join what they have."""

    payloads: list[bytes]


@dataclass(frozen=True)
class Answer:
    """What came of an exchange, or of the whole save: a value or an error."""

    value: Any = None
    error: PackedError | None = None

    def get(self) -> Any:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error.unpacked()
        return self.value


@dataclass(frozen=True)
class PackedError:
    """An exception that always pickles. The errors of single ranks travel one by one, so that one odd one is alone."""

    whole: PackedFailure
    step: str | None = None
    by_rank: dict[int, PackedFailure] | None = None

    @classmethod
    def of(cls, error: BaseException) -> PackedError:
        """Pack an exception."""
        if isinstance(error, CheckpointException):
            by_rank = {rank: pack_failure(wrapped) for rank, wrapped in error.failures.items()}
            plain = CheckpointException(error.args[0], {})
            return cls(pack_failure(wrap_exception(plain)), str(error.args[0]), by_rank)
        return cls(pack_failure(wrap_exception(error)))

    def unpacked(self) -> BaseException:
        """The exception again; its message says where it was raised."""
        if self.by_rank is not None and self.step is not None:
            return CheckpointException(self.step, {rank: unpack_failure(each) for rank, each in self.by_rank.items()})
        error, stack = unpack_failure(self.whole)
        where = "".join(traceback.format_list(stack))
        if where:
            add_note(error, f"Raised in the writer process:\n{where}")
        return error


def opened(data: bytes) -> Any:
    """A message from the other end."""
    return pickle.loads(data)  # noqa: S301 - sent by the program that started this process, or by its writer


# How a snapshot gets into another process: its structure as a pickle, its tensors as shared memory.
#
# Both ends are the same program on the same machine, so the pickle is as trusted as the program itself.


def in_shared_memory(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` itself if its tensors are shared already, or else a copy that is."""
    if all(shared_arena_of(part) is not None or part.numel() == 0 for part in plain_parts_of_state(state)):
        return state
    return take_snapshot(state, ArenaPool(Memory.SHARED))


class _Packer(pickle.Pickler):
    """Pickles everything but the elements of tensors in shared memory, for which it notes where they are."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.arenas: list[Arena] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_meta or obj.is_quantized:
            return None
        arena = shared_arena_of(obj)
        if arena is None:
            return None
        if arena not in self.arenas:
            self.arenas.append(arena)
        start = obj.untyped_storage().data_ptr() - arena.address
        memory = (self.arenas.index(arena), start, obj.untyped_storage().nbytes())
        fields = {name: getattr(obj, name) for name in FIELDS} if is_checkpointable(obj) else {}
        layout = (tuple(obj.size()), obj.stride(), obj.storage_offset(), obj.dtype)
        return (*memory, *layout, obj.requires_grad, fields)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ShardedTensor):  # its own way asks for a process group on the other side
            return make_sharded, (obj.local_shards(), obj.metadata(), obj.sharding_spec())
        if isinstance(obj, torch.Tensor) and is_wrapper(obj):
            parts, context = take_apart(obj)
            return put_together, (type(obj), parts, context, obj.size(), obj.stride())
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, blocks: list[memoryview], import_main: Callable[[], None]) -> None:
        super().__init__(stream)
        self._blocks = blocks
        self._import_main = import_main

    def persistent_load(self, pid: Any) -> torch.Tensor:
        block, start, nbytes, size, stride, offset, dtype, requires_grad, fields = pid
        storage = Lease(self._blocks[block]).tensor(start, nbytes)
        made = storage.view(dtype).as_strided(size, stride, offset).requires_grad_(requires_grad)
        vars(made).update(fields)
        return made

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and not hasattr(sys.modules["__main__"], name):
            self._import_main()
            if not hasattr(sys.modules["__main__"], name):
                raise UnguardedScriptError(
                    f"the state, the planner or the writer uses {name}, which the main program defines, and which a "
                    "writer process cannot import. Move it to a module, or save with writer='thread' "
                    "(AsyncCheckpointerType.THREAD in holdfast.dcp).",
                    script="",
                )
        return super().find_class(module, name)


def pack(request: Any) -> tuple[bytes, list[Arena]]:
    """A request as bytes, and the shared memory that it refers to."""
    stream = io.BytesIO()
    packer = _Packer(stream)
    packer.dump(request)
    return stream.getvalue(), packer.arenas


def unpack(data: bytes, descriptors: Iterable[tuple[int, int]], import_main: Callable[[], None]) -> Any:
    """The request again, over the memory behind ``descriptors`` (each with its size).

    ``import_main`` is called if something was defined in the program's main script.
    """
    blocks = [memoryview(mmap.mmap(fd, size)) for fd, size in descriptors]
    return _Unpacker(io.BytesIO(data), blocks, import_main).load()
