"""All that is at one place: checkpoints of any format, saves that run, and what others have left."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from holdfast._formats.format_names import (
    FILE_ENDINGS,
    SAFETENSORS,
    SAFETENSORS_COMMIT,
    SAFETENSORS_INDEX,
    START,
    TORCH_ENDINGS,
    Format,
    format_of_file,
    format_of_folder,
    format_of_unfinished,
    stands_for_its_folder,
)
from holdfast._formats.hf_folder.names import SHARDED_FOLDER, is_data_file
from holdfast._formats.native.names import generation_of
from holdfast._manager.run_file import RUN_FILE, Row, RunState
from holdfast._manager.steps import StepInfo, folder_of, list_steps, look_at, rows_of, step_of
from holdfast._stores.places import local_path
from holdfast._stores.roots import LocalRoot, Root, root_at
from holdfast._stores.store import Store
from holdfast._tools.listing.entries import (
    Entry,
    SeenFile,
    SeenFolder,
    entry_of_other,
    entry_of_step,
    entry_of_unfinished,
)
from holdfast._tools.listing.liveliness import owner_in, run_at
from holdfast.errors import CheckpointNotFoundError, NotACheckpointError

# What there is to be listed: the checkpoints in a folder, of whatever format, or a single one.


_ONE_OF_SEVERAL = re.compile(r"(.*)-\d{5,}-of-\d{5,}\.safetensors")
_UNSETTLED = 2.0
"""Seconds within which a folder may have changed again without a new time of change."""


class WatchedFolder:
    """A folder with checkpoints, looked at again and again. A folder in it that has not changed is not read twice."""

    def __init__(self, place: str | os.PathLike[str] | Root) -> None:
        self.single: str | None = None
        """The name of the only checkpoint to be shown, if a checkpoint was given and not a folder with some."""
        self.root, self.single = _root_and_single(place)
        self._seen: dict[str, tuple[int, SeenFolder]] = {}

    @property
    def is_gone(self) -> bool:
        """Whether the folder is not there any more."""
        return isinstance(self.root, LocalRoot) and not self.root.folder.is_dir()

    @property
    def location(self) -> str:
        """What was given."""
        return self.root.location if self.single is None else self.location_of(self.single)

    def location_of(self, name: str) -> str:
        """Where something is that ``look`` has found."""
        return f"{self.root.location.rstrip('/')}/{name}"

    def look(self) -> list[SeenFolder]:
        """Everything that may hold a checkpoint, now."""
        if isinstance(self.root, LocalRoot):
            return self._look_at_the_disk(self.root)
        files = {listed.name: listed.size for listed in self.root.store.list()}
        if self.single is not None:
            names = [] if self.single in files else [self.single]
            files = {name: size for name, size in files.items() if name == self.single}
        else:
            names = sorted(name for name in self.root.children() if not name.startswith("."))
        found = [_listed(self.root, name) for name in names]
        for name, size in sorted(files.items()):
            seen = _seen_file(self.root.store, SeenFile(name, size), is_given=name == self.single)
            found += [seen] if seen is not None else []
        return found

    def place(self, name: str) -> str | Store:
        """What to open for a checkpoint that ``look`` has found."""
        if isinstance(self.root, LocalRoot):
            return self.location_of(name)
        is_file = self.root.store.size(name) is not None
        return self.location_of(name) if is_file else self.root.child(name)

    def _look_at_the_disk(self, root: LocalRoot) -> list[SeenFolder]:
        found, folder = [], root.folder
        for name in self._names_in(root):
            try:
                status = os.stat(folder / name)
                if stat.S_ISDIR(status.st_mode):
                    found.append(self._folder(str(folder / name), name, status))
                elif stat.S_ISREG(status.st_mode):
                    file = SeenFile(name, status.st_size, status.st_mtime, str(folder / name))
                    seen = _seen_file(root.store, file, is_given=name == self.single)
                    found += [seen] if seen is not None else []
            except (FileNotFoundError, NotADirectoryError):
                continue  # it was deleted meanwhile
            except PermissionError:
                if self.single is not None:
                    raise
                found.append(SeenFolder(name, ()))  # of which only the name is known
        for name in self._seen.keys() - {seen.name for seen in found}:
            del self._seen[name]
        return found

    def _names_in(self, root: LocalRoot) -> list[str]:
        if self.single is not None:
            return [self.single]
        try:
            return sorted(name for name in os.listdir(root.folder) if not name.startswith("."))
        except FileNotFoundError:
            return []

    def _folder(self, path: str, name: str, status: os.stat_result) -> SeenFolder:
        known = self._seen.get(name)
        if known is not None and known[0] == status.st_mtime_ns and not _may_grow(known[1]):
            return known[1]
        seen = SeenFolder(name, tuple(_files_in(path)), status.st_mtime)
        if time.time() - status.st_mtime > _UNSETTLED:
            self._seen[name] = status.st_mtime_ns, seen
        return seen


def _seen_file(store: Store, file: SeenFile, *, is_given: bool) -> SeenFolder | None:
    """A file that is a checkpoint by itself, and is called like one."""
    if not file.name.endswith((SAFETENSORS, *TORCH_ENDINGS)) or (generation_of(file.name) and not is_given):
        return None
    try:
        format_ = format_of_file(file.name, store.read(file.name, 0, min(START, file.size)))
    except FileNotFoundError:  # it was deleted meanwhile
        return None
    except OSError as error:
        if is_given:
            raise
        named: Format = "safetensors" if file.name.endswith(SAFETENSORS) else "torch"
        return SeenFolder(file.name, (file,), file.changed_at, named, str(error))
    return None if format_ is None else SeenFolder(file.name, (file,), file.changed_at, format_)


def _root_and_single(place: str | os.PathLike[str] | Root) -> tuple[Root, str | None]:
    if isinstance(place, Root):
        return place, None
    path = local_path(place)
    if path is None:
        return _at_a_url(os.fsdecode(place).rstrip("/"))
    path = path.resolve() if path.name in ("", "..") else path
    if not path.exists():
        raise CheckpointNotFoundError(
            f"there is nothing at {path}. Give the folder of a run, or a checkpoint; check the path for a typo.",
            path=str(path),
        )
    if not path.is_dir():
        path = path.parent if stands_for_its_folder(path.name) else path
        return LocalRoot(path.parent), path.name
    root = LocalRoot(path)
    return (LocalRoot(path.parent), path.name) if _is_single(root) else (root, None)


def _at_a_url(url: str) -> tuple[Root, str | None]:
    above, _, name = url.rpartition("/")
    has_place_above = bool(name) and not above.endswith(("/", ":"))
    if has_place_above and url.endswith(FILE_ENDINGS):  # a web server would be asked for all of it as a list
        root = root_at(above)
        if root.store.size(name) is not None:
            return _at_a_url(above) if stands_for_its_folder(name) else (root, name)
    root = root_at(url)
    if has_place_above and _is_single(root):
        return root_at(above), name
    if not root.store.list() and not root.children():
        raise CheckpointNotFoundError(f"there is nothing at {url}. Check the URL for a typo.", path=url)
    return root, None


def _is_single(root: Root) -> bool:
    """Whether a folder is one checkpoint or what is left of one, and not a place where several are."""
    names = {listed.name for listed in root.store.list()}
    if RUN_FILE in names:
        return False
    found = format_of_folder(names)
    if found in ("native", "dcp"):
        return True
    if found is None and format_of_unfinished(names) is None:
        return False
    if any(_holds_a_checkpoint(root, name) for name in root.children() if name != SHARDED_FOLDER):
        return False  # those of a training, and the final weights beside them
    return found is None or _are_of_one_model(names)


def _holds_a_checkpoint(root: Root, name: str) -> bool:
    try:
        names = set() if name.startswith(".") else {file.name for file in root.child(name).list()}
    except PermissionError:
        return False
    return format_of_folder(names) is not None


def _are_of_one_model(names: Collection[str]) -> bool:
    """Whether the safetensors files with these names are those of one model, and are not just side by side."""
    if any(name.endswith((SAFETENSORS_INDEX, SAFETENSORS_COMMIT)) for name in names):
        return True
    files = [name for name in names if name.endswith(SAFETENSORS)]
    matches = [_ONE_OF_SEVERAL.fullmatch(name) for name in files]
    is_one_series = len({match and match.group(1) for match in matches}) == 1 and None not in matches
    return len(files) == 1 or all(map(is_data_file, files)) or is_one_series


def _files_in(path: str) -> list[SeenFile]:
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                found.append(SeenFile(entry.name, status.st_size, status.st_mtime, entry.path))
    return found


def _listed(root: Root, name: str) -> SeenFolder:
    return SeenFolder(name, tuple(SeenFile(listed.name, listed.size) for listed in root.child(name).list()))


def _may_grow(seen: SeenFolder) -> bool:
    """Whether files may be added to without the folder changing: files of saves that are not committed."""
    if seen.format is None:
        return True
    generations = {generation_of(file.name) for file in seen.files} - {None}
    return len(generations) > 1 or seen.format != "native"


# The checkpoints at a place, as they are found from time to time. What has not changed is not read again.


@dataclass(frozen=True)
class Look:
    """What was there at one moment."""

    folders: Sequence[SeenFolder]
    checkpoints: Sequence[Entry]
    """By step, those without one last."""
    run: RunState = field(default_factory=RunState)
    problem: str = ""
    """What is wrong with the folder or with its run file."""


class Catalogue:
    """The checkpoints in a folder, or a single one.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> folder = tempfile.mkdtemp()
        >>> saved = holdfast.save({"w": torch.ones(4)}, folder + "/step-500")
        >>> [(entry.step, entry.state, entry.format) for entry in Catalogue(folder).look().checkpoints]
        [(500, 'committed', 'native')]
    """

    def __init__(self, place: str | os.PathLike[str] | Root) -> None:
        self.watched = WatchedFolder(place)
        self._rows: dict[str, Row] = {}
        self._known: dict[str, tuple[Any, Entry | None]] = {}

    def look(self) -> Look:
        """What there is now."""
        run, problem = run_at(self.watched.root)
        folders = self.watched.look()
        if self.watched.is_gone:
            problem = f"there is nothing at {self.watched.root.location}: it was deleted, moved or unmounted"
        return Look(folders, self._checkpoints(run, folders), run, problem)

    def _checkpoints(self, run: RunState, folders: Sequence[SeenFolder]) -> list[Entry]:
        root = self.watched.root
        seen = {folder.name: folder for folder in folders}
        remembered = replace(run, rows={**self._rows, **run.rows})
        found: dict[str, Entry] = {}
        steps = self._steps(remembered, seen)
        for info in steps:
            folder = seen.get(info.name)
            if folder is not None:  # or else it came since, or is not to be shown
                known = info, folder
                entry = self._recalled(info.name, known) or entry_of_step(info, folder)
                self._known[info.name] = known, entry
                found[info.name] = entry
        fresh = [info for info in steps if info.identity and info.name not in remembered.rows]
        self._rows = {**{name: row for name, row in self._rows.items() if name in seen}, **rows_of(root, fresh, run)}
        for name, folder in seen.items():
            if name not in found:
                other = self._other(root, folder)
                if other is not None:
                    found[name] = other
        return sorted(found.values(), key=lambda entry: (entry.step is None, entry.step or 0, entry.name))

    def _steps(self, run: RunState, seen: Iterable[str]) -> list[StepInfo]:
        """The steps of the run; of a single checkpoint no more than that, for there may be thousands beside it."""
        root, single = self.watched.root, self.watched.single
        step = None if single is None else step_of(single)
        if single is None or (step is not None and single != folder_of(step)):
            return list_steps(root, run)
        info = None if step is None or single not in seen else look_at(root, step, run)
        return [] if info is None else [info]

    def _other(self, root: Root, folder: SeenFolder) -> Entry | None:
        entry = self._recalled(folder.name, folder)
        if entry is None:
            store = None if folder.is_file else root.child(folder.name)
            entry = entry_of_other(folder, self.watched.location_of(folder.name), store)
            self._known[folder.name] = folder, entry
        return entry

    def _recalled(self, name: str, known: Any) -> Entry | None:
        """What was found out about a folder, if nothing of what was seen of it has changed since."""
        before = self._known.get(name)
        return before[1] if before is not None and before[0] == known else None


# All that is at one place, at one moment: checkpoints of any format, saves that run, and what others have left.


_MOST_NAMED = 20


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
        return {
            "path": self.path,
            "kind": self.kind,
            "owner": self.owner,
            "run": self.run,
            "entries": [entry.to_json() for entry in self.entries],
        }


def list_place(place: str) -> Listing:
    """The checkpoints at a place, the newest last. Raises ``NotACheckpointError`` if there are none.

    >>> import tempfile
    >>> list_place(tempfile.mkdtemp())
    Traceback (most recent call last):
    holdfast.errors.NotACheckpointError: there is no checkpoint at ...
    """
    catalogue = Catalogue(place)
    watched, look = catalogue.watched, catalogue.look()
    complete = {entry.name for entry in look.checkpoints}
    left = [folder for folder in look.folders if folder.name not in complete]
    unfinished = [entry_of_unfinished(folder, watched.location_of(folder.name), look.run) for folder in left]
    entries = sorted([*look.checkpoints, *filter(None, unfinished)], key=_by_age)
    is_run = _is_run(look, entries)
    if not entries and (not is_run or watched.single is not None):
        found = sorted(listed.name for listed in watched.root.store.list())
        inner = "" if watched.single is not None else ", nor in a folder directly inside of it"
        raise NotACheckpointError(
            f"there is no checkpoint at {watched.location}{inner}. Check the path.",
            path=watched.location,
            found=found[:_MOST_NAMED] if watched.single is None else [],
        )
    owner = look.problem or owner_in(look.run) or ""
    if watched.single is not None:
        return Listing(watched.location, "checkpoint", entries)
    return Listing(watched.location, "run" if is_run else "folder", entries, owner, look.run.run)


def _is_run(look: Look, entries: Sequence[Entry]) -> bool:
    """Whether a manager saved here, or checkpoints are named as if one had."""
    return bool(look.run.run or look.problem) or any(step_of(entry.name) is not None for entry in entries)


def _by_age(entry: Entry) -> tuple[Any, ...]:
    """Steps by their number, behind what has none; everything else by time."""
    when = 0.0 if entry.saved_at is None else entry.saved_at.timestamp()
    return (entry.step is not None, entry.step or 0, when, entry.name)
