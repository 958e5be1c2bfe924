"""Loading the sharded optimizer state of FSDP1 without having an optimizer state to load into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from holdfast._compat.groups import default_group
from holdfast._compat.sharded_tensors import ChunkShardingSpec, ShardedTensor
from holdfast._dcp.load import load_state
from holdfast._dcp.load_planner import DefaultLoadPlanner
from holdfast._dcp.optimizer_state import ModelLayout, OptimizerStatePlanner, is_nested, model_layout
from holdfast._dcp.planner import LoadPlanner
from holdfast._dcp.storage import StorageReader
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE, Metadata, TensorProperties, TensorStorageMetadata
from holdfast._layout.materialize import empty_tensor, group_device_type, rank_device
from holdfast._layout.offset_shards import OffsetShards
from holdfast._ranks.meeting import drop_in_meeting
from holdfast.dcp._storage_utils import _refuse_stock_objects
from holdfast.dcp.utils import _runs_alone

__all__ = ["load_sharded_optimizer_state_dict"]

STATE_DICT_2D_LAYOUT: TypeAlias = dict[str, tuple[Sequence[int] | None, Sequence[int]]]


def load_sharded_optimizer_state_dict(
    model_state_dict: STATE_DICT_TYPE,
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> STATE_DICT_TYPE:
    """Load the optimizer state of a checkpoint for FSDP1, however many ranks it was saved from.

    Returns a new dict with the branch under ``optimizer_key``, nested as it was saved. Tensors come back as
    ShardedTensors with this rank's rows of them; those of one element, like Adam's ``step``, as whole plain tensors.
    ``FullyShardedDataParallel.optim_state_dict_to_load`` takes what is under the key. All ranks must call this. Without
    a process group all tensors come back whole.

    Args:
        model_state_dict: the sharded state of the model (``StateDictType.SHARDED_STATE_DICT``). Under FSDP1 over tensor
            parallelism it says which part of every parameter is this rank's; otherwise nothing is taken from it.
        optimizer_key: the top-level key that the optimizer state was saved under. One that the checkpoint does not
            have is an error.
        storage_reader: where to read.
        planner: what to read. A ``DefaultLoadPlanner`` by default.

    Example:
        >>> import tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> from holdfast.dcp.optimizer import load_sharded_optimizer_state_dict
        >>> path = tempfile.mkdtemp()
        >>> state = {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}
        >>> _ = dcp.save({"optimizer": {"state": state, "param_groups": [{"lr": 0.1}]}}, checkpoint_id=path)
        >>> loaded = load_sharded_optimizer_state_dict({}, "optimizer", dcp.FileSystemReader(path))
        >>> loaded["optimizer"]["state"]["w"]["exp_avg"], loaded["optimizer"]["param_groups"]
        (tensor([1., 1.]), [{'lr': 0.1}])
    """

    def prepare() -> ModelLayout:
        _refuse_stock_objects(storage_reader, planner)
        storage_reader.reset()
        return model_layout(model_state_dict)

    with drop_in_meeting("holdfast.dcp.load", None, alone=_runs_alone(False, "load")) as ranks:
        layout = ranks.own_error_first("plan", prepare)
        places = OptimizerStatePlanner(DefaultLoadPlanner() if planner is None else planner, optimizer_key, layout)
        load_state({}, storage_reader, places, ranks)
        return places.loaded()


class _ReaderWithOffset(DefaultLoadPlanner):
    """Loads into ShardedTensors that are parts of stored tensors; ``fqn_to_offset`` says where each part begins."""

    def __init__(self, fqn_to_offset: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.fqn_to_offset = dict(fqn_to_offset)

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """See every part at its place in the whole."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        stored = {} if metadata is None else metadata.state_dict_metadata
        for key, offset in self.fqn_to_offset.items():
            part, whole = self.state_dict.get(key), stored.get(key)
            if isinstance(part, ShardedTensor) and isinstance(whole, TensorStorageMetadata):
                self.state_dict[key] = OffsetShards(part, offset, whole.size, key)


def _get_state_dict_2d_layout(state_dict: STATE_DICT_TYPE) -> tuple[STATE_DICT_2D_LAYOUT, dist.ProcessGroup | None]:
    """Offsets (None for whole tensors) and sizes of this rank's parts of the parameters, and who shares them."""
    layout = model_layout(state_dict)
    return {key: (part.offsets, part.sizes) for key, part in layout.parts.items()}, layout.group


def _is_nested_tensor(val: torch.Tensor) -> bool:
    """Whether the shards of a ShardedTensor are ShardedTensors."""
    return is_nested(val)


def _alloc_tensor(props: TensorProperties, size: Sequence[int], device_type: str = "cuda") -> torch.Tensor:
    """Memory for a tensor like the stored one, on the device that this process uses."""
    return empty_tensor(props, size, device_type)


def _create_colwise_spec(pg: dist.ProcessGroup | None = None) -> ChunkShardingSpec:
    """Split by the first dimension over the ranks of a group, which are named by their numbers in the whole job."""
    device_type = group_device_type(pg)
    members = dist.get_process_group_ranks(pg or default_group())  # before 2.7, torch needs it given
    return ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/{rank_device(rank, device_type)}" for rank in members])


def _gen_rank_device(global_rank: int, device_type: str = "cuda") -> str:
    """The device of a rank if ranks are dealt out to the accelerators of each machine in turn."""
    return rank_device(global_rank, device_type)
