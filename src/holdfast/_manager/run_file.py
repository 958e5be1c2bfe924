"""The run file (``holdfast-run.json``): which run the checkpoints of a folder belong to, and which job may add to it.

It also holds what cannot be seen in the checkpoints themselves: which are pinned, and which folders a save or a
deletion has begun to change. Whatever a checkpoint says is only cached here. Each change compares and replaces the
whole file, so that none is lost when several processes make one at once.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast._base.json_objects import parse_json_object
from holdfast._manager.run_owner import Owner
from holdfast._stores.roots import Root
from holdfast.errors import (
    CommitConflictError,
    DamagedCheckpointError,
    HoldfastError,
    NotAFolderError,
    RunInUseError,
    RunTakenError,
    UnsupportedVersionError,
)

RUN_FILE = "holdfast-run.json"

_FORMAT = "holdfast-run"
_VERSION = 1
_ATTEMPTS = 100
_LONGEST_PAUSE = 0.05

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunState:
    """What the run file says."""

    run: str = ""
    """The id of the run, which its checkpoints carry too. Empty if there is no run yet."""
    owner: Owner | None = None
    pinned: frozenset[int] = frozenset()
    unfinished: Mapping[str, str] = field(default_factory=dict)
    """Folders that this run has begun to write or to delete, with the id of the save if it is known."""
    rows: Mapping[str, Row] = field(default_factory=dict)
    """What the records of checkpoints said, by folder."""


class RunFile:
    """The run file of a folder of checkpoints.

    Example:
        >>> from holdfast.stores import root_at
        >>> run_file = RunFile(root_at("memory://a-run-with-a-file"))
        >>> state = run_file.claim("token-of-this-job")
        >>> state = run_file.pin(500)
        >>> sorted(run_file.check("token-of-this-job").pinned)
        [500]
        >>> run_file.release("token-of-this-job")
    """

    def __init__(self, root: Root) -> None:
        self._store = root.store
        self.root = root
        self.path = self._store.path_of(RUN_FILE)
        self._last_seen: RunState | None = None
        self.has_rival = False
        """Whether the job from which the run was claimed may be alive, and still be writing."""

    def read(self) -> RunState:
        """What it says now; an empty state if there is none."""
        return self._read()[1]

    def claim(self, token: str, *, take_over: bool = False, run: str | None = None) -> RunState:
        """Make this process the owner. The run goes on if there is one; ``run`` is its id, if it has to be that one.

        Raises ``RunInUseError`` if the present owner is alive on this machine, unless ``take_over``. Where that is
        unknown, because it was on another machine, the run is taken over with a warning in the log. The owner of a
        folder of which this is a copy has no part in it.
        """
        before: Owner | None = None
        noted: Owner | None = None

        def claimed(state: RunState) -> RunState:
            nonlocal before, noted
            if run is not None and state.run not in ("", run):
                raise ValueError(
                    f"{self.root.location} holds the run {state.run!r} and not {run!r}. Choose another folder, or "
                    "leave out the id to go on with the run that is there"
                )
            marks = self.root.marks()
            before = noted = state.owner
            if before is not None and (before.token == token or not before.owns(marks)):
                before = None
            if before is not None and not take_over and before.life() == "alive":
                raise self._in_use(before)
            return replace(state, run=state.run or run or secrets.token_hex(8), owner=Owner.this_process(token, marks))

        try:
            state = self.change(claimed)
        except OSError:
            # It may be in place all the same, and would keep this process itself from trying again.
            with suppress(OSError, HoldfastError):
                self.change(lambda state: replace(state, owner=noted), token=token)
            raise
        if before is not None:
            self._tell_about(before)
        self.has_rival = before is not None and before.life() != "dead"
        return state

    def check(self, token: str) -> RunState:
        """What it says now, if this job is still the owner. Raises ``RunTakenError`` if another one took the run.

        If somebody has deleted the file, it is made again.
        """
        content, state = self._read()
        if content is None and self._last_seen is not None:
            logger.warning("%s was deleted while a job was using it, and is written again", self.path)
            return self.change(lambda state: state, token=token)
        self._refuse_taken(state, token)
        self._last_seen = state
        return state

    def release(self, token: str) -> None:
        """Let others have the run. If another job has taken it already, nothing is changed."""
        try:
            self.change(lambda state: replace(state, owner=None), token=token)
        except RunTakenError:
            return
        except OSError as error:  # when this process has ended, the next job sees that
            logger.warning("%s still names this job as the owner: %s", self.path, error)
        self._last_seen = None

    def pin(self, *steps: int) -> RunState:
        """Keep these steps, whatever the policy says. Any process may do this.

        If a deletion of one had begun before, its folder is among the unfinished ones, and it goes on.
        """
        return self.change(lambda state: replace(state, pinned=state.pinned | frozenset(steps)))

    def unpin(self, *steps: int) -> None:
        """Let the policy decide about these steps again."""
        self.change(lambda state: replace(state, pinned=state.pinned - frozenset(steps)))

    def begin(self, token: str, folders: Mapping[str, str]) -> RunState:
        """Note that these folders are about to change, with the id of the save in them if it is known.

        If the disk is full this is not noted, and the worst that comes of it is that what a killed save left stays:
        deleting something must be possible just then.
        """
        return self._noted(token, lambda state: replace(state, unfinished={**state.unfinished, **folders}))

    def end(
        self, token: str, folders: Iterable[str], *, rows: Mapping[str, Row] | None = None, gone: Iterable[str] = ()
    ) -> RunState:
        """Note that these folders are as they should be, what to remember of checkpoints, and what to forget."""
        done, forgotten = set(folders), set(gone)

        def ended(state: RunState) -> RunState:
            unfinished = {name: identity for name, identity in state.unfinished.items() if name not in done}
            kept = {name: row for name, row in state.rows.items() if name not in forgotten}
            return replace(state, unfinished=unfinished, rows={**kept, **(rows or {})})

        return self._noted(token, ended)

    def begin_beside(self, folder: str, identity: str, check: Callable[[RunState], None]) -> RunState:
        """Note that a folder is about to be deleted, by a process that does not own the run and does not take it.

        ``check`` is given what the file says, and may raise. What the owner itself has noted of the folder stays.
        """

        def begun(state: RunState) -> RunState:
            check(state)
            return replace(state, unfinished={folder: identity, **state.unfinished})

        return self._noted(None, begun)

    def end_beside(self, folder: str, identity: str, *, is_gone: bool, unpinned: Iterable[int] = ()) -> RunState:
        """Take back what ``begin_beside`` has noted; if the checkpoint is gone, forget it."""

        def ended(state: RunState) -> RunState:
            others = {name: known for name, known in state.unfinished.items() if (name, known) != (folder, identity)}
            if not is_gone:
                return replace(state, unfinished=others)
            rows = {name: row for name, row in state.rows.items() if name != folder}
            return replace(state, unfinished=others, rows=rows, pinned=state.pinned - frozenset(unpinned))

        return self._noted(None, ended)

    def change(self, change: Callable[[RunState], RunState], *, token: str | None = None) -> RunState:
        """Replace the state by what ``change`` makes of it, which is asked again if another process was faster.

        With a ``token``, only as the owner: raises ``RunTakenError`` otherwise.
        """
        for attempt in range(_ATTEMPTS):
            content, state = self._read()
            if content is None and token is not None and self._last_seen is not None:
                state = self._last_seen
            if token is not None:
                self._refuse_taken(state, token)
            changed = change(state)
            if content is not None and changed == state:
                return state
            try:
                self._store.commit(RUN_FILE, _encoded(changed), replaces=content)
            except CommitConflictError:
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(random.uniform(0, _LONGEST_PAUSE))
            else:
                self._last_seen = changed
                return changed
        raise AssertionError("the last attempt returns or raises")

    def _noted(self, token: str | None, change: Callable[[RunState], RunState]) -> RunState:
        try:
            return self.change(change, token=token)
        except OSError as error:
            logger.warning("%s could not be changed: %s", self.path, error)
            return change(self.read() if token is None else self.check(token))

    def _read(self) -> tuple[bytes | None, RunState]:
        try:
            content = self._store.read(RUN_FILE)
        except FileNotFoundError:
            return None, RunState()
        except NotADirectoryError as error:
            raise NotAFolderError(
                f"the checkpoints of a run are in a folder, and {self.root.location} is none: it is a file, or below "
                "one. Choose another folder, or move the file away.",
                path=self.root.location,
            ) from error
        return content, _decoded(content, self.path)

    def _refuse_taken(self, state: RunState, token: str) -> None:
        owner = state.owner
        if owner is not None and owner.token == token:
            return
        who = "another job, which has ended since," if owner is None else f"another job ({owner})"
        raise RunTakenError(
            f"{who} has taken over the checkpoints in {self.root.location}, so this job no longer saves or deletes "
            "anything there. Stop this job if the other one should go on; else stop the other one, and start this one "
            "again.",
            path=self.root.location,
            host=None if owner is None else owner.host,
            pid=None if owner is None else owner.pid,
            since=None if owner is None else owner.since,
        )

    def _in_use(self, owner: Owner) -> RunInUseError:
        is_this_process = owner.pid == Owner.this_process("").pid
        who = "this process already (a manager that was not closed)" if is_this_process else f"another job: {owner}"
        return RunInUseError(
            f"the checkpoints in {self.root.location} are in use by {who}. Two jobs would mix up their steps: give "
            "each a folder of its own, or stop that one. With RunOptions(take_over=True) it is this one that "
            "goes on, and that one can no longer save there.",
            path=self.root.location,
            host=owner.host,
            pid=owner.pid,
            since=owner.since,
        )

    def _tell_about(self, before: Owner) -> None:
        life = before.life()
        if life == "dead":
            logger.info("%s goes on with the run of a job that has ended: %s", self.root.location, before)
            return
        seen = "is alive" if life == "alive" else "cannot be seen from here"
        logger.warning(
            "%s belonged to another job (%s), which %s. This job takes over; that one can no longer save there",
            self.root.location,
            before,
            seen,
        )


def _encoded(state: RunState) -> bytes:
    members = {
        "format": _FORMAT,
        "version": _VERSION,
        "run": state.run,
        "owner": None if state.owner is None else state.owner.to_json(),
        "pinned": sorted(state.pinned),
        "unfinished": dict(state.unfinished),
    }
    # A line for each, and not json's indent, by which writing thousands of steps takes ten times as long.
    lines = [f"{json.dumps(name)}: {_json(value)}" for name, value in members.items()]
    rows = ",\n  ".join(f"{json.dumps(name)}: {_json(row)}" for name, row in state.rows.items())
    lines.append(f'"steps": {{\n  {rows}\n }}' if rows else '"steps": {}')
    return ("{\n " + ",\n ".join(lines) + "\n}\n").encode("ascii")


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _decoded(content: bytes, source: str) -> RunState:
    """The state in a run file, which people may have edited. Nothing is guessed: pins could be lost."""
    try:
        members = parse_json_object(content, source)
    except DamagedCheckpointError as error:
        raise _no_run_file(source, content.decode("ascii", "replace")) from error
    version = members.get("version")
    if members.get("format") == _FORMAT and type(version) is int and version > _VERSION:
        raise UnsupportedVersionError(
            f"{source} was written by a newer version of Holdfast (version {version} of the run file; this one knows "
            f"{_VERSION}). Use that version, or choose another folder.",
            file=source,
            version=str(version),
        )
    run, owner, pinned = members.get("run"), members.get("owner"), members.get("pinned")
    unfinished, rows = members.get("unfinished"), members.get("steps")
    known_owner = Owner.from_json(owner)
    is_valid = (
        members.get("format") == _FORMAT
        and type(version) is int
        and version == _VERSION
        and isinstance(run, str)
        and (owner is None or known_owner is not None)
        and isinstance(pinned, list)
        and all(type(step) is int for step in pinned)
        and isinstance(unfinished, dict)
        and all(isinstance(identity, str) for identity in unfinished.values())
        and isinstance(rows, dict)
        and all(isinstance(row, dict) for row in rows.values())
    )
    if not is_valid:
        raise _no_run_file(source, str(members))
    return RunState(str(run), known_owner, frozenset(pinned or ()), dict(unfinished or {}), dict(rows or {}))


def _no_run_file(source: str, found: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{source} is not a run file as this version of Holdfast writes it. Put back what was there; or move it away "
        "to begin a new run beside the checkpoints that are there: they can be loaded, but are no longer pinned or "
        "deleted.",
        file=source,
        key=None,
        expected=f"a {_FORMAT} of version {_VERSION}",
        found=found[:200],
    )
