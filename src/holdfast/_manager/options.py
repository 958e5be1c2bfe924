"""How a manager behaves: frozen options with a default for everything, one class for each subject."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from holdfast._base.arguments import check_choice
from holdfast._manager.preemption import USUAL_SIGNALS, Preemption
from holdfast._manager.retention import Policy, everything, last
from holdfast._save.async_save import How, Writer
from holdfast._save.captured_copies import WhenBusy

OnFailure = Literal["error", "warn"]
FullDiskAction = Literal["error", "prune", "wait"]


@dataclass(frozen=True, kw_only=True)
class Background:
    """How saves go on in the background, while the program trains.

    Example:
        >>> import holdfast, tempfile
        >>> background = holdfast.Background(writer="process", on_failure="warn")
        >>> manager = holdfast.CheckpointManager(tempfile.mkdtemp(), every_steps=500, background=background)
    """

    overlap: bool = False
    """Copy the state during forward and backward as well, which the optimizers in the state wait for. Not for programs
    that change parameters without an optimizer (see ``async_save``)."""
    writer: Writer = "thread"
    """A thread of this process, or a ``"process"`` of its own, which never competes with training for Python's lock."""
    when_busy: WhenBusy = "wait"
    """If an earlier save is still being written: ``"wait"`` for its memory, take a second ``"copy"``, or
    raise ``SaveInProgressError`` (``"error"``)."""
    check_tearing: bool = False
    """Find out whether something changed the state while it was copied, at the cost of some time in the call."""
    on_failure: OnFailure = "error"
    """A save that failed is raised by the next save, ``wait`` and the end of the block. ``"warn"`` warns and goes
    on."""

    def __post_init__(self) -> None:
        check_choice("writer", self.writer, get_args(Writer))
        check_choice("when_busy", self.when_busy, get_args(WhenBusy))
        check_choice("on_failure", self.on_failure, get_args(OnFailure))

    @property
    def how(self) -> How:
        """The same, for ``async_save``."""
        return How(writer=self.writer, when_busy=self.when_busy, check_tearing=self.check_tearing)


@dataclass(frozen=True, kw_only=True)
class OnSignal:
    """By which signals a cluster says that it will end the program, and how long it waits then.

    All ranks agree on it when one of them gets a signal, the state is saved, and ``should_stop`` becomes true. Handlers
    that were there are called too.
    """

    signals: Collection[str | int] = USUAL_SIGNALS
    """Their names or numbers."""
    grace_seconds: float | None = 30.0
    """How long the program will live after a signal; None if unknown. No save waits longer for space on a full disk
    then, and there is a warning if it is little for a save."""

    def __post_init__(self) -> None:
        if isinstance(self.signals, str):
            raise TypeError(f"signals is a list of names, as in [{self.signals!r}], not a str")
        object.__setattr__(self, "signals", tuple(self.signals))
        self.preemption()  # raises for what is not a signal, or not a time

    def preemption(self) -> Preemption:
        """What listens to the signals."""
        return Preemption(self.signals, grace_seconds=self.grace_seconds)


@dataclass(frozen=True, kw_only=True)
class OnFullDisk:
    """What to do when there is no space for a checkpoint. What was written of it is removed in any case."""

    action: FullDiskAction = "error"
    """Raise ``StorageFullError``, ``"prune"`` (delete the oldest checkpoint that may go, and try again), or ``"wait"``
    until there is space."""
    wait_seconds: float = 3600.0
    """How long to wait in all, for each save. Then it is an error."""

    def __post_init__(self) -> None:
        check_choice("action", self.action, get_args(FullDiskAction))
        if isinstance(self.wait_seconds, bool) or not self.wait_seconds > 0:
            raise ValueError(f"wait_seconds must be positive, not {self.wait_seconds!r}")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints are kept, and how carefully the others are deleted. For ``keep=`` of a manager.

    Example:
        >>> import holdfast
        >>> holdfast.Retention(policy=holdfast.keep.every(1000), verify_before_delete=True).dry_run
        False
    """

    policy: Policy | None = None
    """What to keep, of ``holdfast.keep``. Without it, and without ``keep_last``, everything is kept."""
    verify_before_delete: bool = False
    """Read all of a new checkpoint before an older one is deleted for it."""
    dry_run: bool = False
    """Delete nothing by the policy; only log what would be deleted."""

    def __post_init__(self) -> None:
        if self.policy is not None:
            expect("policy", self.policy, Policy)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the run is, and how this job comes to it."""

    run_id: str | None = None
    """The id that the run must have, or gets if it is new."""
    take_over: bool = False
    """Take the run from a job that is still alive on this machine. That one can no longer save."""
    read_only: bool = False
    """Only look and restore, beside the job that trains or after it: for evaluations. Nothing is written, deleted or
    set aside, and no signal is handled."""
    parts: Sequence[str] | None = None
    """The names that every state to be saved must have at its top, no more and no fewer: a checkpoint of a set is the
    whole set."""

    def __post_init__(self) -> None:
        if isinstance(self.parts, str):
            raise TypeError(f"parts is a list of names, not the str {self.parts!r}")
        if self.parts is not None:
            object.__setattr__(self, "parts", tuple(sorted(self.parts)))


def retention_of(keep_last: int | None, keep: Policy | Retention | None) -> Retention:
    """What ``keep_last=`` and ``keep=`` of a manager mean together. The policy is never None.

    >>> from holdfast import keep
    >>> str(retention_of(3, keep.best(1, "loss")).policy)
    'last 3, best 1 by loss'
    """
    if keep is not None:
        expect("keep", keep, Policy, Retention)
    given = keep if isinstance(keep, Retention) else Retention(policy=keep)
    newest = None if keep_last is None else last(keep_last)
    policies = [policy for policy in (newest, given.policy) if policy is not None]
    return replace(given, policy=functools.reduce(operator.or_, policies) if policies else everything())


def background_of(background: Background | bool) -> Background | None:
    """What ``background=`` of a manager means: None if saves are waited for."""
    if isinstance(background, bool):
        return Background() if background else None
    expect("background", background, Background)
    return background


def expect(name: str, value: object, *kinds: type) -> None:
    """Raise if an argument is none of the objects that it takes.

    >>> expect("on_full_disk", "prune", OnFullDisk)
    Traceback (most recent call last):
    TypeError: on_full_disk takes a holdfast.OnFullDisk, not 'prune'
    """
    if not isinstance(value, kinds):
        names = ["holdfast.keep.Policy" if kind is Policy else f"holdfast.{kind.__name__}" for kind in kinds]
        raise TypeError(f"{name} takes a {' or a '.join(names)}, not {value!r}")


def as_texts(*objects: Any, **others: object) -> dict[str, str]:
    """Options as str that ranks can compare, each field of an object apart.

    >>> as_texts(OnFullDisk(), every_steps=10)
    {'every_steps': '10', 'OnFullDisk.action': 'error', 'OnFullDisk.wait_seconds': '3600.0'}
    """
    texts = {name: str(value) for name, value in others.items()}
    for each in objects:
        texts |= {f"{type(each).__name__}.{field.name}": str(getattr(each, field.name)) for field in fields(each)}
    return texts
