"""Helpers of the drop-in that programs import from here."""

from __future__ import annotations

import cProfile
import functools
import inspect
import os
import pstats
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from holdfast._base.notices import warn_caller
from holdfast._compat.sharded_tensors import LocalShardOfTensor as Shard
from holdfast._compat.sharded_tensors import ShardedTensor
from holdfast._dcp.state_objects import find_state_dict_object, find_tensor_shard
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE, MetadataIndex
from holdfast._ranks.shared_steps import Collectives as _DistWrapper
from holdfast._ranks.shared_steps import failures_of as _get_failure_dict
from holdfast._stores.filesystem import ReaderView as _ReaderView
from holdfast.dcp.api import WRAPPED_EXCEPTION, CheckpointException, _is_wrapped_exception, _wrap_exception
from holdfast.dcp.stateful import Stateful

__all__ = [
    "ENABLE_PROFILE",
    "WRAPPED_EXCEPTION",
    "CheckpointException",
    "_DistWrapper",
    "_ReaderView",
    "_all_gather_keys",
    "_api_bc_check",
    "_assert_same_keys",
    "_create_file_view",
    "_element_wise_add",
    "_element_wise_sub",
    "_find_shard",
    "_get_failure_dict",
    "_is_wrapped_exception",
    "_normalize_device_info",
    "_profile",
    "_wrap_exception",
    "find_state_dict_object",
    "find_tensor_shard",
]

P = ParamSpec("P")
T = TypeVar("T")

ENABLE_PROFILE = False
"""Set to True to profile the blocks that ``_profile`` wraps."""


def _all_gather_keys(local_dict: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> set[str]:
    """The keys that any rank has."""
    per_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(per_rank, list(local_dict.keys()), group=group)
    return {key for keys in per_rank for key in keys}


def _assert_same_keys(state_dict: Mapping[str, Any], process_group: dist.ProcessGroup | None = None) -> None:
    """Raise on ranks that lack keys of other ranks."""
    if dist.get_world_size(process_group) == 1:
        return
    absent = _all_gather_keys(state_dict, process_group) - set(state_dict.keys())
    if absent:
        raise AssertionError(
            "Key(s) present in other ranks but not this one (rank "
            f"{dist.get_rank(process_group)}), difference: {sorted(absent)}"
        )


def _find_shard(tensor: ShardedTensor, index: MetadataIndex) -> Shard:
    """The local shard that starts where ``index`` says."""
    if index.offset is None:
        raise ValueError(f"Cannot lookup '{index.fqn}': it is a ShardedTensor and no offset was provided")
    here = {torch.Size(shard.metadata.shard_offsets): shard for shard in tensor.local_shards()}
    if index.offset not in here:
        raise ValueError(
            f"Could not find shard at '{index.offset}' for FQN: '{index.fqn}'; this rank has shards at {list(here)}"
        )
    return here[index.offset]


def _element_wise_add(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """The sums of two sequences' elements."""
    return [left + right for left, right in zip(a, b, strict=False)]


def _element_wise_sub(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """The differences of two sequences' elements."""
    return [left - right for left, right in zip(a, b, strict=False)]


def _create_file_view(file: Any, offset: int, length: int) -> _ReaderView:
    """A part of a file as a stream of its own."""
    return _ReaderView(file, offset, length)


def _normalize_device_info(device_type: str, device_id: int) -> str:
    """How a device is called in sharding descriptions."""
    return device_type if device_type == "cpu" else f"{device_type}:{device_id}"


@contextmanager
def _profile() -> Iterator[None]:
    """With ``ENABLE_PROFILE``, print the ten slowest functions of the block on rank 0, or if there are no ranks."""
    alone = not (dist.is_available() and dist.is_initialized())
    if not ENABLE_PROFILE or not (alone or dist.get_rank() == 0):
        yield
        return
    profiler = cProfile.Profile()
    with profiler:
        yield
    pstats.Stats(profiler).sort_stats("time").print_stats(10)


def _api_bc_check(func: Callable[P, T]) -> Callable[P, T]:
    """Let a second positional argument pass as the storage, as it did in old versions, with a warning."""
    names = list(inspect.signature(func).parameters)
    storage = next(name for name in ("storage_writer", "storage_reader") if name in names)

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) != 2:
            return func(*args, **kwargs)
        if storage in kwargs:
            raise AssertionError(f"{func.__name__} got {storage} twice: as second argument and by name")
        warn_caller(f"The order of the arguments of {func.__name__} has changed: pass {storage} by name")
        state, given = args
        return cast(Any, func)(state, **{**kwargs, storage: given})  # type: ignore[no-any-return]

    return wrapper


def _runs_alone(no_dist: bool, verb: str) -> bool:
    """Whether this process saves or loads by itself; warns if that looks like a mistake."""
    if no_dist:
        return True
    if dist.is_available() and dist.is_initialized():
        return False
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        warn_caller(
            "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to "
            f"{verb} in a single process. This one was launched as one of {world_size}: call init_process_group first."
        )
    return True


def _is_stateful(value: Any) -> bool:
    """Whether a value gives and takes state. A class does not, although it has the methods."""
    # Asking for one method first is fifty times faster than having a protocol compared, and most values are tensors.
    return hasattr(value, "load_state_dict") and isinstance(value, Stateful) and not isinstance(value, type)


def _state_of(value: Any) -> Any:
    """The state of an object that has one; anything else as it is."""
    return value.state_dict() if _is_stateful(value) else value


def _sorted_keys(state_dict: STATE_DICT_TYPE) -> list[Any]:
    """Keys in an order that is the same on all ranks, also if they are of different types."""
    return sorted(state_dict, key=lambda key: (str(key), type(key).__name__))
