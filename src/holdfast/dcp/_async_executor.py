"""The contract of what saves a staged state in the background."""

from __future__ import annotations

import abc
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from holdfast._dcp.planner import SavePlanner
from holdfast._dcp.storage import StorageWriter
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE
from holdfast._stores.filesystem import AnyPath


class _AsyncCheckpointExecutor(abc.ABC):
    """Saves a state that nobody changes any more, while the program goes on."""

    @abc.abstractmethod
    def execute_save(
        self,
        staging_future_or_state_dict: STATE_DICT_TYPE | Future[STATE_DICT_TYPE],
        *,
        checkpoint_id: AnyPath | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> Future[Any]:
        """Begin to save a copy, or what a future of a copy gives. Returns a future of the checkpoint's index."""
