"""Repairs Hugging Face folders: finishes a save that was killed, and rebuilds the index from headers of files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast._base.json_objects import parse_json_object
from holdfast._formats.hf_folder.commit import Folder, Switch, make_index
from holdfast._formats.hf_folder.names import (
    COMMIT_NAME,
    INDEX_NAME,
    file_name,
    is_inside_folder,
    number_of,
    read_notes,
    temporary_name,
)
from holdfast._formats.safetensors.header import Header, read_header
from holdfast._stores.durable_files import lock_folder, written_atomically
from holdfast._stores.local_filesystem import FileSystem
from holdfast._stores.local_store import LocalStore
from holdfast._tools.repairing.report import Planned, keep_copy
from holdfast.errors import CommitConflictError, DamagedCheckpointError, HoldfastError


def problems_of(path: Path) -> Iterator[Planned]:
    """What is wrong with the folder, and what can be done."""
    folder = Folder(FileSystem(), path)
    try:
        switch = folder.switch_under_way()
    except DamagedCheckpointError as error:
        yield Planned(
            str(path / COMMIT_NAME), str(error), "move the file away if the model files are those of one save"
        )
        return
    if switch is not None:
        yield _unfinished_switch(folder, path, switch)
        return
    yield from _problems_of_index(path)


def _unfinished_switch(folder: Folder, path: Path, switch: Switch) -> Planned:
    problem = "a save was committed, and killed before all of its files had their names; other readers cannot read it"
    missing = _missing_files(path, switch)
    if missing:
        return Planned(str(path / COMMIT_NAME), problem, f"files of it are missing: {', '.join(missing)}")

    def finish() -> None:
        # Who had the lock may have finished this switch, or have committed another save: only what is there now counts.
        with folder.fs.lock_folder(path):
            now = folder.switch_under_way()
            if now is None:
                return
            if now.generation != switch.generation or _missing_files(path, now):
                raise _changed_meanwhile(path / COMMIT_NAME)
            left = {name: temporary for name, temporary in now.files.items() if (path / temporary).exists()}
            index = path / temporary_name(INDEX_NAME, now.generation)
            if now.index is not None and not index.exists():
                _write_json(index, now.index)
            folder.give_names(Switch(now.generation, now.save_id, left, now.index), ())

    return Planned(str(path / COMMIT_NAME), problem, "finished: files get their names, then the index", do=finish)


def _missing_files(path: Path, switch: Switch) -> list[str]:
    """Files of a switch that are there under neither name."""
    return [name for name in switch.files if not any((path / place).exists() for place in switch.places(name))]


def _changed_meanwhile(file: Path) -> CommitConflictError:
    return CommitConflictError(
        f"{file}: a save has changed the folder since it was looked at, so nothing was done. Repair it again if "
        "something is still wrong.",
        path=str(file),
    )


def _problems_of_index(path: Path) -> Iterator[Planned]:
    file = path / INDEX_NAME
    numbered = sorted(found.name for found in path.iterdir() if number_of(found.name))
    try:
        index: Mapping[str, Any] | None = parse_json_object(file.read_bytes(), str(file))
        if not _is_index(index):
            yield _rebuilt(path, numbered, "the index has no weight_map of names of tensors and files")
            return
    except FileNotFoundError:
        index = None
    except DamagedCheckpointError as error:
        yield _rebuilt(path, numbered, f"the index is damaged: {error}")
        return
    if index is None:
        if numbered:
            yield _rebuilt(path, numbered, "the index is missing, without which most programs cannot read the files")
        return
    yield from _problems_of_weights(path, index["weight_map"], numbered)


def _is_index(content: Any) -> bool:
    weights = content.get("weight_map") if isinstance(content, dict) else None
    return isinstance(weights, dict) and all(
        isinstance(name, str) and is_inside_folder(name) for name in weights.values()
    )


def _problems_of_weights(path: Path, weights: Mapping[str, str], numbered: list[str]) -> Iterator[Planned]:
    """Compare what an index says with what the files hold."""
    headers: dict[str, Header] = {}
    for name in sorted(set(weights.values()) | set(numbered)):
        try:
            headers[name] = _header(path / name)
        except FileNotFoundError:
            lost = sorted(key for key, where in weights.items() if where == name)
            yield Planned(str(path / name), "the file is missing", "copy it again from where it is intact", keys=lost)
        except HoldfastError as error:
            lost = sorted(key for key, where in weights.items() if where == name)
            yield Planned(str(path / name), str(error), "copy it again from where it is intact", keys=lost)
    same_set = _same_set(weights.values(), headers)
    unlisted = [key for name in same_set for key in headers[name].tensors if key not in weights]
    wrong = [key for key, name in weights.items() if name in headers and key not in headers[name].tensors]
    elsewhere = {key for header in headers.values() for key in header.tensors}
    if wrong and all(key in elsewhere for key in wrong) and set(weights.values()) <= headers.keys():
        yield _rebuilt(
            path, sorted(headers), f"the index names wrong files for {len(wrong)} tensor(s), such as {wrong[0]!r}"
        )
    elif unlisted and not wrong and set(weights.values()) <= headers.keys():
        yield _rebuilt(
            path,
            sorted(same_set),
            f"the index does not name {len(unlisted)} tensor(s) of the files, such as {unlisted[0]!r}",
        )
    elif wrong:
        yield Planned(
            str(path / INDEX_NAME),
            f"{len(wrong)} tensor(s) are not in the files that the index names",
            "copy the files again from where they are intact",
            keys=sorted(wrong),
        )


def _same_set(listed: Iterable[str], names: Iterable[str]) -> list[str]:
    """Of these files, those that an index lists, and numbered ones that are of as many as the listed ones are."""
    listed = set(listed)
    counts = {number[1] for number in map(number_of, listed) if number is not None}
    return [name for name in names if name in listed or ((found := number_of(name)) is not None and found[1] in counts)]


def _rebuilt(path: Path, names: list[str], problem: str) -> Planned:
    file = path / INDEX_NAME
    seen = _content(file)
    index = _index_of(path, names)
    if isinstance(index, str):
        return Planned(str(file), problem, index)

    def rebuild() -> None:
        with lock_folder(path):  # a save may have put another index there, or be about to
            if (path / COMMIT_NAME).exists() or _content(file) != seen or _index_of(path, names) != index:
                raise _changed_meanwhile(file)
            keep_copy(LocalStore(path), INDEX_NAME)
            _write_json(file, index)

    made = f"made from the headers of {len(names)} file(s), {len(index['weight_map'])} tensors"
    return Planned(str(file), problem, made, do=rebuild)


def _index_of(path: Path, names: list[str]) -> dict[str, Any] | str:
    """The index that goes with these files, or why there can be none."""
    missing = _missing_numbers(names)
    if not names:
        return "there are no files named model-00001-of-0000N.safetensors to make one from"
    if missing:
        return f"files are missing, so it would not be complete: {', '.join(missing)}"
    weights: dict[str, str] = {}
    total = 0
    saves: set[str | None] = set()
    for name in names:
        try:
            header = _header(path / name)
            notes = read_notes(header.notes, str(path / name))
        except (HoldfastError, OSError) as error:
            return f"it would be made from the files, and one cannot be read: {error}"
        twice = [key for key in header.tensors if key in weights]
        if twice:
            return f"{twice[0]!r} is both in {weights[twice[0]]} and in {name}: which one is right?"
        weights |= dict.fromkeys(header.tensors, name)
        total += sum(stored.nbytes for stored in header.tensors.values())
        saves.add(notes.save_id)
    if len(saves) > 1:
        return "the files are of different saves; bring those of one save together"
    return make_index(weights, total, next(iter(saves)))


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def _missing_numbers(names: list[str]) -> list[str]:
    """Of files that are numbered, those that are not there."""
    there = {number for number in map(number_of, names) if number is not None}
    expected = ((number, count) for count in sorted({count for _, count in there}) for number in range(1, count + 1))
    return [file_name(*number) for number in expected if number not in there]


def _header(path: Path) -> Header:
    with path.open("rb") as stream:
        return read_header(stream, str(path))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with written_atomically(path) as stream:
        stream.write(json.dumps(content, indent=2).encode())
