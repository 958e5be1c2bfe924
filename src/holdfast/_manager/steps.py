"""The checkpoints of a run, as they are found in its folder: a step exists if and only if its record does."""

from __future__ import annotations

import json
import logging
import math
import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from holdfast._base.json_objects import parse_json_object
from holdfast._formats.native.names import RECORD, SET_ASIDE
from holdfast._formats.native.record import LARGEST_RECORD, decode_record
from holdfast._manager.run_file import Row, RunState
from holdfast._manager.summaries import Summary
from holdfast._stores.roots import Root
from holdfast._stores.store import Store
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, HoldfastError, UnreadableCheckpointError

DAMAGE = (DamagedCheckpointError, CheckpointNotFoundError)
"""What another checkpoint can help against. Whatever else is wrong would be wrong with the next one too."""

Mode = Literal["min", "max"]

_FOLDER = re.compile(r"step-([0-9]{1,18})")
_HEAD = re.compile(rb'\{"format":"holdfast",\n"version":\[[0-9]{1,9},[0-9]{1,9}\],\n"generation":"([0-9a-f]{16})",')
_HEAD_BYTES = 128
_TOO_HIGH = 10**18

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepInfo:
    """A committed checkpoint of a run."""

    step: int
    path: str
    """To be given to ``holdfast.load`` or ``holdfast.open``."""
    name: str = ""
    """Of its folder in the root."""
    identity: str = ""
    """The id of the save that wrote it; empty if its record cannot be read."""
    saved_at: datetime | None = None
    nbytes: int = 0
    """What it takes on the disk."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    set_aside: str | None = None
    """Why it is passed over, if it is."""
    damage: str | None = None
    """What is wrong with its record, if something is."""
    unreadable: str | None = None
    """Why it could not be looked at, if so: an error of the disk, or no permission. It may be as good as any."""
    is_ours: bool = False
    """Whether this run saved it, and may delete it."""
    repaired: str = ""
    """What was rebuilt of it, if anything was; ``holdfast.verify`` says what that means."""

    @property
    def is_usable(self) -> bool:
        """Whether to load it if it is the newest or the best. Its data may still turn out to be damaged."""
        return self.set_aside is None and self.damage is None and self.unreadable is None


def folder_of(step: int) -> str:
    """The name of the folder of a step.

    >>> folder_of(500)
    'step-00000500'
    """
    if type(step) is not int or not 0 <= step < _TOO_HIGH:
        raise ValueError(f"a step is a whole number from 0 to 10**18 - 1, not {step!r}")
    return f"step-{step:08d}"


def step_number(step: Any) -> int:
    """The number that a user gives for a step. Those of numpy are numbers too; true and false are not.

    >>> step_number(500)
    500
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool):
        raise TypeError(f"a step is a whole number from 0 on, not {step!r}") from None
    folder_of(number)
    return number


def step_of(name: str) -> int | None:
    """The step that a folder is called after, also if it was named by other rules than ours.

    >>> step_of("step-00000500"), step_of("step-500"), step_of("best-model")
    (500, 500, None)
    """
    found = _FOLDER.fullmatch(name)
    return None if found is None else int(found.group(1))


def list_steps(root: Root, state: RunState) -> list[StepInfo]:
    """All steps in the folder, by their number. ``state`` is what its run file says.

    Checkpoints that somebody else saved there, under the name of a step, are among them. If two folders are called
    after one step, the one that has the name that a manager gives is meant.
    """
    folders: dict[int, str] = {}
    for name in sorted(root.children()):
        step = step_of(name)
        if step is not None and (step not in folders or name == folder_of(step)):
            folders[step] = name
    found = (_step(root, name, step, state) for step, name in sorted(folders.items()))
    return [info for info in found if info is not None]


def look_at(root: Root, step: int, state: RunState) -> StepInfo | None:
    """One step, if it exists under the name that a manager gives."""
    return _step(root, folder_of(step), step, state)


def was_saved_by(state: RunState, name: str) -> bool:
    """Whether the run remembers to have saved what is in a folder, of which the record cannot be read any more."""
    row = state.rows.get(name)
    known = None if row is None else Summary.from_json(row)
    return known is not None and bool(state.run) and known.run == state.run


def rows_of(root: Root, steps: Sequence[StepInfo], state: RunState) -> dict[str, Row]:
    """What to remember of these steps in the run file, so that large records need not be read again."""
    rows: dict[str, Row] = {}
    for info in steps:
        with suppress(OSError):  # it is remembered another time
            summary = _summary(root.child(info.name), state.rows.get(info.name))
            if isinstance(summary, Summary):
                rows[info.name] = summary.to_json()
    return rows


def latest(steps: Sequence[StepInfo]) -> StepInfo | None:
    """The usable one with the highest number. Raises if a newer one could not be looked at: it may be the latest."""
    for info in sorted(steps, key=lambda info: info.step, reverse=True):
        if info.unreadable is not None:
            raise unreadable(info)
        if info.is_usable:
            return info
    return None


def unreadable(info: StepInfo) -> UnreadableCheckpointError:
    """What to raise if a step could not be looked at, and an older one must not be taken for it in silence."""
    return UnreadableCheckpointError(
        f"step {info.step} at {info.path} could not be looked at: {info.unreadable}. It may be intact, so no older one "
        "is taken in its place, and nothing was changed. Try again when the disk answers, and check who may read that "
        "folder; or ask for the step that you want by its number, as in restore(state, step=...).",
        path=info.path,
        step=info.step,
        reason=info.unreadable,
    )


def best(steps: Sequence[StepInfo], metric: str, mode: Mode = "min") -> StepInfo | None:
    """The usable one with the best metric, the newest of equals. What could not be looked at is logged."""
    for info in steps:
        if info.unreadable is not None:
            logger.warning("step %d at %s does not count for the best: %s", info.step, info.path, info.unreadable)
    ranked = by_metric([info for info in steps if info.is_usable], metric, mode)
    return ranked[0] if ranked else None


def by_metric(steps: Sequence[StepInfo], metric: str, mode: Mode) -> list[StepInfo]:
    """Those that have the metric, as a finite number: the best first, and the newer one of equals."""
    if mode not in ("min", "max"):
        raise ValueError(f"mode is 'min' if the smallest {metric} is the best, or 'max', and not {mode!r}")
    sign = 1 if mode == "min" else -1
    having = [info for info in steps if math.isfinite(info.metrics.get(metric, math.nan))]
    return sorted(having, key=lambda info: (sign * info.metrics[metric], -info.step))


def identity_in(store: Store) -> str | None:
    """The id of the save whose record is in the store; empty if that is unknown, None if there is no record."""
    try:
        head = _HEAD.match(_head(store)[1])
    except FileNotFoundError:
        return None
    return "" if head is None else head.group(1).decode()


def set_aside(store: Store, reason: str) -> None:
    """Have a checkpoint passed over from now on: it is not the latest, not the best, and is not deleted either.

    A later save to the same folder is not meant by it.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    content = {"reason": reason, "time": now, "identity": identity_in(store)}
    try:
        before = store.read(SET_ASIDE)
    except FileNotFoundError:
        before = None
    store.commit(SET_ASIDE, (json.dumps(content) + "\n").encode("ascii"), replaces=before)


def put_back(store: Store) -> None:
    """Undo ``set_aside``."""
    store.delete([SET_ASIDE])
    store.sync()


def _step(root: Root, name: str, step: int, state: RunState) -> StepInfo | None:
    store, pinned = root.child(name), step in state.pinned
    try:
        summary = _summary(store, state.rows.get(name))
        if summary is None:
            return None
        aside, is_linked = reason_to_pass_over(store), root.is_linked(name)
    except OSError as error:
        return StepInfo(step, store.location, name, pinned=pinned, unreadable=str(error))
    if isinstance(summary, str):
        return StepInfo(step, store.location, name, pinned=pinned, set_aside=aside, damage=summary)
    # A copy of our checkpoint under another name is not ours, nor one that somebody moved away and left a link to.
    is_ours = bool(state.run) and summary.run == state.run and summary.step == step and name == folder_of(step)
    is_ours = is_ours and not is_linked
    return StepInfo(
        step=step,
        path=store.location,
        name=name,
        identity=summary.identity,
        saved_at=summary.time(),
        nbytes=summary.nbytes,
        metrics=summary.numbers(),
        metadata=summary.metadata,
        pinned=pinned,
        set_aside=aside,
        is_ours=is_ours,
        repaired=summary.repaired,
    )


def _summary(store: Store, row: Row | None) -> Summary | str | None:
    """What the record in a store says, what is wrong with it, or None if there is none.

    Raises what the disk raises: that says nothing about the checkpoint.
    """
    try:
        size, content = _head(store)
        head = _HEAD.match(content)
        cached = Summary.from_json(row) if row is not None else None
        is_known = cached is not None and head is not None and cached.identity == head.group(1).decode()
        if cached is not None and is_known and cached.record_bytes == size:
            return cached
        if size > LARGEST_RECORD:
            return f"{store.path_of(RECORD)} has {size} bytes, which is too large for a record"
        content = store.read(RECORD)
        return Summary.of(decode_record(content, store.path_of(RECORD)), len(content))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except HoldfastError as error:
        return str(error)


def _head(store: Store) -> tuple[int, bytes]:
    """How large the record is, and how it begins."""
    with store.reader(RECORD) as reader:
        content = bytearray(min(_HEAD_BYTES, reader.size))
        reader.read_into(0, content)
        return reader.size, bytes(content)


def reason_to_pass_over(store: Store) -> str | None:
    """Why ``set_aside`` was called for the checkpoint in a store; None if it was not, or for an earlier save.

    Raises what the disk raises: a note that cannot be looked for is neither there nor absent.
    """
    try:
        content = store.read(SET_ASIDE)
    except FileNotFoundError:
        return None
    except HoldfastError as error:
        return f"set aside for a reason that cannot be read: {error}"
    try:
        noted = parse_json_object(content, SET_ASIDE)
    except HoldfastError:  # somebody has made such a file by hand
        return content.decode("utf-8", "replace").strip()[:1000]
    is_of_an_earlier_save = "identity" in noted and noted["identity"] != identity_in(store)
    return None if is_of_an_earlier_save else str(noted.get("reason", ""))
