"""What ``async_save`` of older versions of torch needs from a writer: a copy of the state.

Until 2.8 torch leaves tensors in host memory as they are, so that the program changes them while they are written,
unless the writer copies the state. Later versions copy it themselves.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import async_save

from holdfast.staging.snapshots import take_snapshot


class CopiesStates:
    """The methods by which torch recognizes a writer that copies states."""

    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy that nothing that the program does later can change."""
        return take_snapshot(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing is left to be done: a copy is complete when ``stage`` returns it."""


StagingIfNeeded: type = object if "async_stager" in inspect.signature(async_save).parameters else CopiesStates
