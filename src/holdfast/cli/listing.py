"""What is at a place: checkpoints of any format, and what saves have left there. Nothing but names and records is read.

A record tells most about a checkpoint of our own; of those of other formats the files tell when and how much. A folder
with data files and without a record is a save that goes on, or debris of one that was killed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, NotACheckpointError
from holdfast.formats.native.names import RECORD, generation_of
from holdfast.manager.run_file import RUN_FILE, RunFile, RunState
from holdfast.manager.steps import StepInfo, folder_of, list_steps, step_of
from holdfast.manager.summaries import Summary
from holdfast.repairing.liveliness import PATIENCE
from holdfast.storage.hf_names import is_data_file
from holdfast.stores.places import local_path
from holdfast.stores.roots import Root, root_at
from holdfast.stores.store import Listed, Store

State = Literal["committed", "set aside", "damaged", "being written", "debris"]

_DCP_INDEX = re.compile(r"(?:__\d+)?\.metadata")
_TORCH_FILE = re.compile(r".+\.(?:pt|pth|bin|ckpt)")
_ZIP_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True)
class Entry:
    """A checkpoint, or what is left of one."""

    name: str
    path: str
    format: str
    """``native``, ``dcp``, ``safetensors`` or ``torch``."""
    state: State
    nbytes: int
    """On the disk, everything in its folder included."""
    step: int | None = None
    reason: str = ""
    """Why it is set aside, damaged or debris."""
    saved_at: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    identity: str = ""
    """Which save it is, of our own format."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        saved_at = None if self.saved_at is None else self.saved_at.isoformat()
        return {**asdict(self), "saved_at": saved_at, "metrics": dict(self.metrics)}


@dataclass(frozen=True)
class Listing:
    """What is at one place."""

    path: str
    kind: Literal["run", "folder", "checkpoint"]
    entries: Sequence[Entry]
    owner: str = ""
    """Who saves there now, or is not known to have ended."""
    run: str = ""
    """The id of the run, if it is one."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "entries": [entry.to_json() for entry in self.entries]}


def list_place(place: str) -> Listing:
    """The checkpoints at a place, the newest last. Raises ``NotACheckpointError`` if there are none.

    >>> import tempfile
    >>> list_place(tempfile.mkdtemp())
    Traceback (most recent call last):
    holdfast.errors.NotACheckpointError: there is no checkpoint at ...
    """
    path = local_path(place)
    if path is not None and not path.exists():
        raise CheckpointNotFoundError(f"there is nothing at {path}. Check the path.", path=str(path))
    if path is not None and path.is_file():
        entry = _file(path)
        if entry is None:
            raise NotACheckpointError(f"{path} is no checkpoint. Check the path.", path=str(path), found=[])
        return Listing(str(path), "checkpoint", [entry])
    root = root_at(place)
    state, trouble = _run_state(root)
    names = {listed.name: listed for listed in root.store.list()}
    alone = None if RUN_FILE in names else look_at_store(root.store, _name_of(root.location), state)
    if alone is not None and not _is_any_folder(alone, names):
        return Listing(root.location, "checkpoint", [alone])
    entries = [*_steps(root, state), *_others(root, state)]
    if alone is not None and not entries:
        return Listing(root.location, "checkpoint", [alone])
    if path is not None:
        entries += [entry for name in sorted(names) if (entry := _file(path / name)) is not None]
    is_run = RUN_FILE in names or any(entry.step is not None for entry in entries)
    if not entries and RUN_FILE not in names:
        raise NotACheckpointError(
            f"there is no checkpoint at {root.location}, nor in a folder directly inside of it. Check the path.",
            path=root.location,
            found=sorted(names)[:20],
        )
    owner = trouble or _owner_of(root, state)
    return Listing(root.location, "run" if is_run else "folder", sorted(entries, key=_by_age), owner, state.run)


def look_at_store(store: Store, name: str, state: RunState | None = None, *, in_use: bool = False) -> Entry | None:
    """The checkpoint in one folder, or what is left of one; None if there is neither."""
    files = store.list()
    names = {listed.name for listed in files}
    if RECORD in names:
        return _native(store, name, files)
    format_ = _format_of(names)
    if format_ is None:
        return None
    changed = _changed(store, names)
    nbytes = sum(listed.size for listed in files)
    if _is_committed(names, format_):
        return Entry(name, store.location, format_, "committed", nbytes, step_of(name), saved_at=changed)
    is_recent = changed is not None and time.time() - changed.timestamp() < PATIENCE
    is_begun = state is not None and name in state.unfinished
    goes_on = is_recent or (in_use and is_begun)
    reason = "" if goes_on else "a save was cut off: there is no record"
    state_: State = "being written" if goes_on else "debris"
    return Entry(name, store.location, format_, state_, nbytes, step_of(name), reason, changed)


def _is_any_folder(entry: Entry, names: Collection[str]) -> bool:
    """Whether a folder may just as well be one in which files of models lie around, beside other checkpoints."""
    return entry.format == "safetensors" and not any(name.endswith(".json") or is_data_file(name) for name in names)


def _steps(root: Root, state: RunState) -> list[Entry]:
    return [_step(root, info) for info in list_steps(root, state)]


def _step(root: Root, info: StepInfo) -> Entry:
    files = root.child(info.name).list()
    state: State = "damaged" if info.damage else "set aside" if info.set_aside is not None else "committed"
    return Entry(
        name=info.name,
        path=info.path,
        format="native",
        state=state,
        nbytes=sum(listed.size for listed in files),
        step=info.step,
        reason=info.damage or info.set_aside or "",
        saved_at=info.saved_at,
        metrics=dict(info.metrics),
        pinned=info.pinned,
        identity=info.identity,
    )


def _others(root: Root, state: RunState) -> Iterator[Entry]:
    """Everything in folders that is no step of a run: other formats, other names, and saves that were not committed."""
    in_use = state.owner is not None and state.owner.life() == "alive" and state.owner.owns(root.marks())
    for name in sorted(root.children()):
        store = root.child(name)
        if step_of(name) is not None and store.size(RECORD) is not None:
            canonical = folder_of(step_of(name) or 0)
            if name == canonical or root.child(canonical).size(RECORD) is None:
                continue  # a step, and listed as such
        with suppress(NotADirectoryError, PermissionError):
            entry = look_at_store(store, name, state, in_use=in_use)
            if entry is not None:
                yield entry


def _native(store: Store, name: str, files: Sequence[Listed]) -> Entry:
    from holdfast.formats.native.record import decode_record
    from holdfast.manager.steps import SET_ASIDE, reason_to_pass_over

    nbytes = sum(listed.size for listed in files)
    try:
        content = store.read(RECORD)
        summary = Summary.of(decode_record(content, store.path_of(RECORD)), len(content))
    except DamagedCheckpointError as error:
        return Entry(name, store.location, "native", "damaged", nbytes, step_of(name), str(error))
    aside = reason_to_pass_over(store) if any(listed.name == SET_ASIDE for listed in files) else None
    return Entry(
        name=name,
        path=store.location,
        format="native",
        state="committed" if aside is None else "set aside",
        nbytes=nbytes,
        step=summary.step if step_of(name) is None else step_of(name),
        reason=aside or "",
        saved_at=summary.time(),
        metrics=dict(summary.numbers()),
        identity=summary.identity,
    )


def _format_of(names: set[str]) -> str | None:
    if any(_DCP_INDEX.fullmatch(name) or name.endswith(".distcp") for name in names):
        return "dcp"
    if any(name.endswith((".safetensors", ".safetensors.index.json", ".safetensors.commit.json")) for name in names):
        only_ours = all(generation_of(name) for name in names if name.endswith(".safetensors"))
        return "native" if only_ours and any(generation_of(name) for name in names) else "safetensors"
    return None


def _is_committed(names: set[str], format_: str) -> bool:
    if format_ == "dcp":
        return any(_DCP_INDEX.fullmatch(name) for name in names)
    return format_ == "safetensors"


def _file(path: Path) -> Entry | None:
    """The checkpoint that a single file is."""
    if not path.is_file():
        return None
    if path.name.endswith(".safetensors"):
        format_ = "safetensors"
    elif _TORCH_FILE.fullmatch(path.name) and _begins_with(path, _ZIP_MAGIC):
        format_ = "torch"
    else:
        return None
    status = path.stat()
    changed = datetime.fromtimestamp(status.st_mtime, timezone.utc)
    return Entry(path.name, str(path), format_, "committed", status.st_size, saved_at=changed)


def _begins_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(magic)) == magic


def _changed(store: Store, names: set[str]) -> datetime | None:
    """When a file of a local folder was last written; None elsewhere."""
    folder = local_path(store.location)
    if folder is None:
        return None
    times = []
    for name in names:
        with suppress(FileNotFoundError):
            times.append(os.stat(folder / name).st_mtime)
    return datetime.fromtimestamp(max(times), timezone.utc) if times else None


def _run_state(root: Root) -> tuple[RunState, str]:
    """What the run file says, or what is wrong with it."""
    try:
        return RunFile(root).read(), ""
    except DamagedCheckpointError as error:
        return RunState(), str(error)


def _owner_of(root: Root, state: RunState) -> str:
    owner = state.owner
    if owner is None or not owner.owns(root.marks()) or owner.life() == "dead":
        return ""
    return str(owner) if owner.life() == "alive" else f"{owner}; whether it is alive cannot be told from here"


def _by_age(entry: Entry) -> tuple[Any, ...]:
    """Steps by their number, behind what has none; everything else by time."""
    when = 0.0 if entry.saved_at is None else entry.saved_at.timestamp()
    return (entry.step is not None, entry.step or 0, when, entry.name)


def _name_of(location: str) -> str:
    return location.rstrip("/").rpartition("/")[2]
