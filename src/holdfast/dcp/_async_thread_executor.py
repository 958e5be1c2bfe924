"""Background saves of staged states in a thread of the program."""

from __future__ import annotations

from concurrent.futures import Future

import torch.distributed as dist

from holdfast._dcp.planner import SavePlanner
from holdfast._dcp.storage import StorageWriter
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE, Metadata
from holdfast._stores.filesystem import AnyPath
from holdfast.dcp._async_executor import _AsyncCheckpointExecutor


def save_wrapper(
    staging_future_or_state_dict: STATE_DICT_TYPE | Future[STATE_DICT_TYPE],
    *,
    checkpoint_id: AnyPath | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Wait for a staged state and save it, in the thread that calls. Returns the index of the checkpoint."""
    from holdfast.dcp.state_dict_saver import save  # whose module has the executors among its names

    staged = staging_future_or_state_dict
    return save(
        staged.result() if isinstance(staged, Future) else staged,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )


class _ThreadBasedAsyncCheckpointExecutor(_AsyncCheckpointExecutor):
    """Saves in a thread. One executor may be used for any number of saves."""

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
    ) -> Future[Metadata]:
        """Queue a save of a copy, or of what a future of a copy gives, behind the group's other background saves."""
        from holdfast.dcp.state_dict_saver import _save_staged, _Target  # which has this class among its names

        return _save_staged(
            staging_future_or_state_dict,
            _Target(checkpoint_id, storage_writer, planner, use_collectives),
            process_group=process_group,
            coordinator_rank=0,
            no_dist=no_dist,
            in_process=False,
        )
