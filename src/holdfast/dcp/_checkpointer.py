"""Save and load with settings that are given once."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import torch.distributed as dist

from holdfast._dcp.planner import LoadPlanner, SavePlanner
from holdfast._dcp.storage import StorageReader, StorageWriter
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE, Metadata
from holdfast._ranks.meeting import drop_in_meeting
from holdfast._stores.filesystem import AnyPath
from holdfast.dcp.state_dict_loader import _perform_load
from holdfast.dcp.state_dict_saver import AsyncSaveResponse, _async_save, _save, _Target
from holdfast.dcp.utils import _runs_alone

__all__: list[str] = []


class _Checkpointer:
    """A writer, a reader and how to use them. Every call saves to the writer's path or loads from the reader's.

    Args:
        storage_writer: where and how to write.
        storage_reader: where to read.
        process_group: the ranks that take part. All by default.
        coordinator_rank: the rank of the group that plans for all and commits.
        no_dist: save and load in this process alone even if there is a group.
        load_planner: what to read. A ``DefaultLoadPlanner`` by default.
        save_planner: what to write. A ``DefaultSavePlanner`` by default.

    Example:
        >>> import tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> from holdfast.dcp._checkpointer import _Checkpointer
        >>> path = tempfile.mkdtemp()
        >>> checkpointer = _Checkpointer(dcp.FileSystemWriter(path), dcp.FileSystemReader(path))
        >>> _ = checkpointer.save({"weights": torch.ones(2)})
        >>> state = {"weights": torch.zeros(2)}
        >>> checkpointer.load(state)
        >>> state
        {'weights': tensor([1., 1.])}
    """

    def __init__(
        self,
        storage_writer: StorageWriter,
        storage_reader: StorageReader,
        *,
        process_group: dist.ProcessGroup | None = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        load_planner: LoadPlanner | None = None,
        save_planner: SavePlanner | None = None,
    ) -> None:
        self.storage_writer, self.save_planner = storage_writer, save_planner
        self.storage_reader, self.load_planner = storage_reader, load_planner
        self.process_group, self.coordinator_rank, self.no_dist = process_group, coordinator_rank, no_dist

    def save(self, state_dict: STATE_DICT_TYPE) -> Metadata:
        """Save a state, as ``holdfast.dcp.save`` does. Returns the index of the checkpoint."""
        return _save(state_dict, self._target(), **self._role())

    def async_save(self, state_dict: STATE_DICT_TYPE) -> Future[Metadata]:
        """Take a private copy of a state and save it in the background. The future is of the checkpoint's index."""
        response = _async_save(state_dict, self._target(), **self._role())
        if isinstance(response, AsyncSaveResponse):
            return cast("Future[Metadata]", response.upload_completion)
        return response

    def load(self, state_dict: dict[str, Any]) -> None:
        """Load into a state, as ``holdfast.dcp.load`` does."""
        with drop_in_meeting(
            "holdfast.dcp.load",
            self.process_group,
            alone=_runs_alone(self.no_dist, "load"),
            coordinator_rank=self.coordinator_rank,
        ) as ranks:
            _perform_load(
                ranks,
                state_dict,
                checkpoint_id=_path_of(self.storage_reader),
                storage_reader=self.storage_reader,
                planner=self.load_planner,
            )

    def _role(self) -> dict[str, Any]:
        return {
            "process_group": self.process_group,
            "coordinator_rank": self.coordinator_rank,
            "no_dist": self.no_dist,
        }

    def _target(self) -> _Target:
        return _Target(_path_of(self.storage_writer), self.storage_writer, self.save_planner)


def _path_of(storage: StorageWriter | StorageReader) -> AnyPath | None:
    """Where a storage is. Giving it its path anew says that a new save or load begins."""
    path: AnyPath | None = getattr(storage, "checkpoint_id", None)
    return path
