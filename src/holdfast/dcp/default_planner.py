"""The planners that are used when none is given, and the functions that they consist of."""

from holdfast._base.boxes import first_overlap, out_of_bounds
from holdfast._dcp.global_plan import create_default_global_save_plan
from holdfast._dcp.global_plan import validate_global_plan as _validate_global_plan
from holdfast._dcp.load_planner import (
    DefaultLoadPlanner,
    create_default_global_load_plan,
    create_default_local_load_plan,
)
from holdfast._dcp.load_planner import EmptyStateDictLoadPlanner as _EmptyStateDictLoadPlanner
from holdfast._dcp.save_planner import DefaultSavePlanner, create_default_local_save_plan
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, Metadata
from holdfast.dcp.planner_helpers import _create_default_metadata_only_plan

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "_EmptyStateDictLoadPlanner",
    "_check_box_bounds",
    "_check_box_overlap",
    "_create_default_local_metadata",
    "_validate_global_plan",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]


def _create_default_local_metadata(state_dict: dict[str, object]) -> Metadata:
    """The index that a flat state would have if its ranks saved it, as far as this rank knows.

    That is all of a ShardedTensor, so that loads on another number of ranks can be planned with it, and this rank's
    part of other tensors.
    """
    _, metadata = create_default_global_save_plan([_create_default_metadata_only_plan(state_dict)])
    return metadata


def _check_box_overlap(box0: ChunkStorageMetadata, box1: ChunkStorageMetadata) -> bool:
    """Whether two chunks share an element."""
    return first_overlap([box0, box1]) is not None


def _check_box_bounds(outer_box_size: tuple[int, ...], inner_box: ChunkStorageMetadata) -> bool:
    """Whether a chunk is inside of a tensor of the given size."""
    return not out_of_bounds([inner_box], outer_box_size)
