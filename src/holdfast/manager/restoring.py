"""Restoring a run: the newest checkpoint that is whole. Those that are not are set aside, and nothing is hidden."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, NoUsableCheckpointError
from holdfast.load_report import LoadReport
from holdfast.manager.steps import StepInfo

logger = logging.getLogger(__name__)

DAMAGE = (DamagedCheckpointError, CheckpointNotFoundError)
"""What another checkpoint can help against. Whatever else is wrong would be wrong with the next one too."""


@dataclass(frozen=True)
class RestoredStep:
    """What ``CheckpointManager.restore`` did."""

    step: int
    path: str
    report: LoadReport
    """Of the load."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    lost_steps: int = 0
    """How many steps behind the newest checkpoint this one is, because newer ones are damaged."""
    set_aside: Sequence[StepInfo] = ()
    """The damaged ones. They are kept, with a note of the reason, and passed over from now on."""

    def __str__(self) -> str:
        lost = f"; {self.lost_steps} steps are lost" if self.lost_steps else ""
        return f"restored step {self.step} from {self.path}{lost}"


def restore_newest(
    candidates: Sequence[StepInfo],
    load: Callable[[StepInfo], LoadReport],
    set_aside: Callable[[StepInfo, str], None],
    *,
    place: str,
) -> RestoredStep | None:
    """Load the first of the candidates, newest first, that is whole. All ranks together, and all the same.

    None if there is no candidate. If there are some and none is whole, that is an error: to begin anew would look like
    a fresh start, and end with the old checkpoints deleted.
    """
    damaged: list[StepInfo] = []
    for info in candidates:
        try:
            if info.damage is not None:
                raise DamagedCheckpointError(info.damage, file=info.path, key=None, expected=None, found=None)
            report = load(info)
        except DAMAGE as error:
            logger.error("step %d of %s is damaged and is set aside: %s", info.step, place, error)  # noqa: TRY400
            set_aside(info, str(error))
            damaged.append(info)
            continue
        lost = candidates[0].step - info.step
        if lost:
            logger.warning("restored step %d of %s; %d steps are lost", info.step, place, lost)
        return RestoredStep(info.step, info.path, report, info.metrics, info.metadata, lost, tuple(damaged))
    if damaged:
        raise NoUsableCheckpointError(
            f"all checkpoints in {place} are damaged: {', '.join(info.path for info in damaged)}. They are kept, each "
            "with a note set-aside.json that says why. What was loaded of the state is not to be used. To begin anew, "
            "choose another folder.",
            path=place,
            steps=[info.step for info in damaged],
        )
    return None
