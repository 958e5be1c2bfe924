"""The optimizer's part of a checkpoint, loaded without an optimizer state: its places are made from the index.

Each rank gets its rows of every tensor, as FSDP1 splits them. Under FSDP1 over tensor parallelism the model's own
tensors, ShardedTensors in ShardedTensors, say which part of a parameter is this rank's, and among whom that is split.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from holdfast._base.nested import ObjectPath, unflatten_state_dict
from holdfast._compat.sharded_tensors import ShardedTensor, group_of_sharded
from holdfast._compat.tensors import local_part
from holdfast._dcp.planner import LoadPlanner
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE, BytesStorageMetadata, Metadata, TensorStorageMetadata
from holdfast._formats.dcp.plan import LoadPlan, ReadItem
from holdfast._layout.materialize import empty_row_shards, empty_tensor, group_device_type
from holdfast._layout.offset_shards import OffsetShards
from holdfast._layout.tensor_items import size_and_dtype
from holdfast.errors import StateMismatchError, UnsupportedTensorError

_PARAMETER = 2
"""Where in a path the parameter's name is: ("optimizer", "state", "layer.weight", "exp_avg")."""


class ParameterPart(NamedTuple):
    """What a tensor-parallel rank has of a parameter. Without ``offsets`` it is the whole parameter."""

    offsets: list[int] | None
    sizes: list[int]
    whole: torch.Size


class ModelLayout(NamedTuple):
    """The parts of all parameters, and the ranks that share them: None if parameters are not in two levels."""

    parts: dict[str, ParameterPart]
    group: dist.ProcessGroup | None


def model_layout(model_state: Mapping[str, Any]) -> ModelLayout:
    """Look at the tensors of a model's state. Values that are not tensors do not matter."""
    parts: dict[str, ParameterPart] = {}
    group = None
    for key, value in model_state.items():
        if not isinstance(value, torch.Tensor):
            continue
        size, _ = size_and_dtype(value)
        if not is_nested(value, key=key):
            parts[key] = ParameterPart(None, list(size), size)
            continue
        outer, inner = _only_shard(value, key)
        parts[key] = ParameterPart(list(outer.shard_offsets), list(outer.shard_sizes), size)
        group = group_of_sharded(inner)
    return ModelLayout(parts, group)


def is_nested(value: torch.Tensor, *, key: str = "") -> bool:
    """Whether the shards of a ShardedTensor are ShardedTensors. Other nestings are refused."""
    inner: Any = None
    if isinstance(value, ShardedTensor):
        inner = next((shard.tensor for shard in value.local_shards()), None)
    elif isinstance(value, DTensor):
        inner = local_part(value)
    if isinstance(inner, DTensor):
        kind = f"a DTensor in a {type(value).__name__}"
        raise UnsupportedTensorError(
            f"{repr(key) if key else 'A tensor'} is {kind}; only ShardedTensors in ShardedTensors say which part of "
            "the optimizer's state is this rank's. For models of DTensors, get_optimizer_state_dict makes a state that "
            "holdfast.dcp.load loads into.",
            key=key,
            kind=kind,
        )
    return isinstance(value, ShardedTensor) and isinstance(inner, ShardedTensor)


def _only_shard(tensor: Any, key: str) -> tuple[Any, ShardedTensor]:
    shards = tensor.local_shards()
    if len(shards) != 1:
        raise UnsupportedTensorError(
            f"'{key}' has {len(shards)} shards on this rank that are ShardedTensors. The optimizer's state can only be "
            "laid out like one: give each rank one part of every parameter.",
            key=key,
            kind="a nested ShardedTensor with several shards on a rank",
        )
    return shards[0].metadata, shards[0].tensor


class OptimizerStatePlanner(LoadPlanner):
    """Makes places for the optimizer's state when the index is known, and lets another planner fill them."""

    takes_what_is_there = True

    def __init__(self, planner: LoadPlanner, optimizer_key: str, layout: ModelLayout) -> None:
        self.planner = planner
        self.optimizer_key = optimizer_key
        self.layout = layout
        self._state: STATE_DICT_TYPE = {}
        self._paths: Mapping[str, ObjectPath] = {}

    def __getattr__(self, name: str) -> Any:
        """What the flow and storages may ask of a planner beyond the contract is the other planner's to answer."""
        if name == "planner":  # not there yet, as when it is being copied
            raise AttributeError(name)
        return getattr(self.planner, name)

    def loaded(self) -> STATE_DICT_TYPE:
        """The state that was loaded, nested as it was when it was saved."""
        values = {key: value.part if isinstance(value, OffsetShards) else value for key, value in self._state.items()}
        return unflatten_state_dict(values, self._paths)

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Fill ``state_dict`` with places for all that is stored under the optimizer's key."""
        if metadata is None:
            raise AssertionError("this planner builds the state from metadata, and none was given")
        self._paths = stored_under(self.optimizer_key, metadata)
        state_dict.clear()
        for key, path in self._paths.items():
            state_dict[key] = self._place_for(key, path, metadata.state_dict_metadata[key])
        self._state = state_dict
        self.planner.set_up_planner(state_dict, metadata, is_coordinator)

    def _place_for(self, key: str, path: ObjectPath, stored: TensorStorageMetadata | BytesStorageMetadata) -> Any:
        if isinstance(stored, BytesStorageMetadata):
            return "<to be loaded>"
        if prod(stored.size) <= 1 or not (dist.is_available() and dist.is_initialized()):
            return empty_tensor(stored.properties, stored.size, group_device_type(self.layout.group))
        if self.layout.group is None:
            return empty_row_shards(stored.size, stored.properties)
        part = self.layout.parts.get(str(path[_PARAMETER])) if len(path) > _PARAMETER else None
        if part is None or part.offsets is None:
            return empty_row_shards(stored.size, stored.properties, self.layout.group)
        if stored.size != part.whole:
            raise _size_differs(key, path, stored.size, part.whole)
        shards = empty_row_shards(torch.Size(part.sizes), stored.properties, self.layout.group)
        return OffsetShards(shards, part.offsets, stored.size, key)

    def create_local_plan(self) -> LoadPlan:
        """As the other planner says."""
        return self.planner.create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As the other planner says."""
        return self.planner.create_global_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As the other planner says."""
        return self.planner.finish_plan(central_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As the other planner says."""
        self.planner.load_bytes(read_item, value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """As the other planner says."""
        return self.planner.resolve_bytes(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """As the other planner says."""
        return self.planner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """As the other planner says."""
        self.planner.commit_tensor(read_item, tensor)


def stored_under(top_key: str, metadata: Metadata) -> dict[str, ObjectPath]:
    """The stored keys below a top-level key of the state that was saved, with their paths in it."""
    paths = metadata.planner_data
    if not isinstance(paths, Mapping):
        raise _not_found(
            top_key,
            "The checkpoint does not say how its keys were nested when they were saved: it was saved without "
            "flattening, or by a storage that does not keep that. Load it with holdfast.dcp.load.",
        )
    found = {key: tuple(paths[key]) for key in metadata.state_dict_metadata if key in paths}
    selected = {key: path for key, path in found.items() if path[0] == top_key}
    if not selected:
        known = ", ".join(sorted({str(path[0]) for path in found.values()})) or "none"
        raise _not_found(top_key, f"Its top-level keys are: {known}. Give the one that the optimizer was saved under.")
    return selected


def _not_found(key: str, remedy: str) -> StateMismatchError:
    return StateMismatchError(
        f"The checkpoint has no state of an optimizer under the key {key!r}. {remedy}",
        missing=[key],
    )


def _size_differs(key: str, path: ObjectPath, stored: torch.Size, parameter: torch.Size) -> StateMismatchError:
    return StateMismatchError(
        f"{key}: a tensor of size {list(stored)} is stored, but the parameter '{path[_PARAMETER]}' of the model is of "
        f"size {list(parameter)} and split by tensor parallelism, so it is unclear which part of the stored tensor is "
        "this rank's. Load into the model that the checkpoint is of.",
        shapes={key: (stored, parameter)},
    )
