"""Restoring a run: the newest checkpoint that is intact. Those that are not are set aside, and nothing is hidden."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast._load.report import LoadReport
from holdfast._manager.steps import DAMAGE, StepInfo, unreadable
from holdfast._watching.calls import Call
from holdfast.errors import CheckpointNotFoundError, NoUsableCheckpointError

logger = logging.getLogger(__name__)

_MOST_LOOKS = 10
"""How often a job that deletes while this one reads can have it look again."""


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
    """How many steps behind the newest checkpoint this one is, because newer ones were passed over."""
    set_aside: Sequence[StepInfo] = ()
    """Those that turned out to be damaged. They are kept, with a note of the reason, and passed over from now on."""
    passed_over: Sequence[StepInfo] = ()
    """All that are newer than this one, the newest first: the damaged ones, and those that were set aside before.
    Their ``set_aside`` says why."""

    def report_event(self, began: float, rank: int, world_size: int) -> None:
        """Publish an event for the restore since ``began``, with what could not be loaded."""
        call = Call("restore", self.path, self.step, rank=rank, world_size=world_size, started=began)
        report = self.report
        call.finish(
            nbytes=report.bytes_read,
            slowest_rank=report.slowest_rank,
            lost_steps=self.lost_steps,
            damaged=[info.step for info in self.set_aside],
            passed_over=[info.step for info in self.passed_over],
        )

    def __str__(self) -> str:
        lost = f"; {self.lost_steps} steps are lost" if self.lost_steps else ""
        return f"restored step {self.step} from {self.path}{lost}"


@dataclass(frozen=True)
class Restoring:
    """A search for the newest checkpoint that is intact. All ranks do the same, at the same time."""

    place: str
    list_steps: Callable[[], Sequence[StepInfo]]
    """All that there are, by their step."""
    load: Callable[[StepInfo], LoadReport]
    is_as_listed: Callable[[StepInfo], bool]
    """Whether a checkpoint is still the one that was listed, and not deleted or replaced meanwhile."""
    set_aside: Callable[[StepInfo, str], None]

    def newest(self) -> RestoredStep | None:
        """Load the newest one that is intact. None if there is no checkpoint.

        If there are some and none is intact, that is an error, at every start: to begin anew would look like a fresh
        start, and a training that somebody has restarted at night would begin from nothing. Nor is an older one taken
        in place of one that could not be looked at.
        """
        damaged: list[StepInfo] = []
        for _ in range(_MOST_LOOKS):
            steps, known = self.list_steps(), {(info.step, info.identity) for info in damaged}
            candidates = [info for info in steps if info.set_aside is None and (info.step, info.identity) not in known]
            found = self._first_intact(candidates[::-1], damaged)
            if found is not None:
                return self._restored(*found, steps, damaged)
            known = {(info.step, info.identity) for info in damaged}
            if all((info.step, info.identity) in known for info in candidates):
                break
            # One was deleted while it was read, by a job that has saved a newer one.
        if steps:
            raise self._nothing_usable(steps)
        return None

    def _first_intact(
        self, candidates: Sequence[StepInfo], damaged: list[StepInfo]
    ) -> tuple[StepInfo, LoadReport] | None:
        for info in candidates:
            if info.unreadable is not None:
                raise unreadable(info)
            try:
                return info, self.load(info)
            except DAMAGE as error:
                if not self.is_as_listed(info):
                    logger.warning("step %d of %s was deleted or replaced while it was read", info.step, self.place)
                    return None
                logger.error("step %d of %s is damaged and passed over: %s", info.step, self.place, error)  # noqa: TRY400
                self.set_aside(info, str(error))
                damaged.append(replace(info, set_aside=str(error)))
        return None

    def _restored(
        self, info: StepInfo, report: LoadReport, steps: Sequence[StepInfo], damaged: Sequence[StepInfo]
    ) -> RestoredStep:
        before = [each for each in steps if each.step > info.step and each.set_aside is not None]
        for each in before:
            logger.warning(
                "step %d of %s is passed over, because it was set aside: %s", each.step, self.place, each.set_aside
            )
        # A damaged one that could be noted as such is listed as set aside the next time, if there is a next time.
        newer = {each.step: each for each in (*before, *damaged) if each.step > info.step}
        passed_over = tuple(newer[step] for step in sorted(newer, reverse=True))
        lost = passed_over[0].step - info.step if passed_over else 0
        if lost:
            logger.warning("restored step %d of %s; %d steps are lost", info.step, self.place, lost)
        return RestoredStep(
            info.step, info.path, report, info.metrics, info.metadata, lost, tuple(damaged), passed_over
        )

    def _nothing_usable(self, steps: Sequence[StepInfo]) -> NoUsableCheckpointError:
        return NoUsableCheckpointError(
            f"no checkpoint in {self.place} can be restored: {', '.join(info.path for info in steps)}. They are "
            "damaged, or were set aside earlier: a note set-aside.json in the folder says why. What was loaded of the "
            "state is not to be used. To begin anew, choose another folder, or move these away.",
            path=self.place,
            steps=[info.step for info in steps],
        )


def chosen_step(steps: Sequence[StepInfo], step: int, place: str) -> StepInfo:
    """The one that a user asks for by its number, set aside or not."""
    chosen = next((info for info in steps if info.step == step), None)
    if chosen is None:
        there = ", ".join(str(info.step) for info in steps) or "none"
        raise CheckpointNotFoundError(
            f"there is no checkpoint of step {step} in {place}. There are: {there}.", path=place
        )
    newer = [str(info.step) for info in steps if info.step > step and (info.is_usable or info.unreadable)]
    if newer:
        logger.warning(
            "step %d is restored, and newer ones of %s stay: %s. Until the training is past them, a restart restores "
            "the newest of these; delete them if they are not wanted",
            step,
            place,
            ", ".join(newer),
        )
    return chosen
