"""Repairs Hugging Face folders: finishes a save that was killed, and rebuilds the index from headers of files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import DamagedCheckpointError, HoldfastError
from holdfast.formats.json_objects import parse_json_object
from holdfast.formats.safetensors.header import Header, read_header
from holdfast.repairing.kept import keep_copy
from holdfast.repairing.planned import Planned
from holdfast.storage.hf_commit import Folder, Switch, make_index
from holdfast.storage.hf_names import COMMIT_NAME, INDEX_NAME, lies_inside, temporary_name
from holdfast.storage.hf_notes import read_notes
from holdfast.stores.atomic import written_atomically
from holdfast.stores.local import FileSystem
from holdfast.stores.local_store import LocalStore

_NUMBERED = re.compile(r"model-(\d{5,})-of-(\d{5,})\.safetensors")


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
    missing = [
        name
        for name, temporary in switch.files.items()
        if not (path / name).exists() and not (path / temporary).exists()
    ]
    if missing:
        return Planned(str(path / COMMIT_NAME), problem, f"files of it are missing: {', '.join(missing)}")

    def finish() -> None:
        with folder.fs.lock_folder(path):
            left = {name: temporary for name, temporary in switch.files.items() if (path / temporary).exists()}
            index = path / temporary_name(INDEX_NAME, switch.generation)
            if switch.index is not None and not index.exists():
                _write_json(index, switch.index)
            folder.give_names(Switch(switch.generation, switch.save_id, left, switch.index), ())

    return Planned(str(path / COMMIT_NAME), problem, "finished: files get their names, then the index", do=finish)


def _problems_of_index(path: Path) -> Iterator[Planned]:
    file = path / INDEX_NAME
    numbered = sorted(found.name for found in path.iterdir() if _NUMBERED.fullmatch(found.name))
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
    return isinstance(weights, dict) and all(isinstance(name, str) and lies_inside(name) for name in weights.values())


def _problems_of_weights(path: Path, weights: Mapping[str, str], numbered: list[str]) -> Iterator[Planned]:
    """Compare what an index says with what the files hold."""
    headers: dict[str, Header] = {}
    for name in sorted(set(weights.values()) | set(numbered)):
        try:
            headers[name] = _header(path / name)
        except FileNotFoundError:
            lost = sorted(key for key, where in weights.items() if where == name)
            yield Planned(str(path / name), "the file is missing", "copy it again from where it is whole", keys=lost)
        except HoldfastError as error:
            lost = sorted(key for key, where in weights.items() if where == name)
            yield Planned(str(path / name), str(error), "copy it again from where it is whole", keys=lost)
    wrong = [key for key, name in weights.items() if name in headers and key not in headers[name].tensors]
    elsewhere = {key for header in headers.values() for key in header.tensors}
    if wrong and all(key in elsewhere for key in wrong) and set(weights.values()) <= headers.keys():
        yield _rebuilt(
            path, sorted(headers), f"the index names wrong files for {len(wrong)} tensor(s), such as {wrong[0]!r}"
        )
    elif wrong:
        yield Planned(
            str(path / INDEX_NAME),
            f"{len(wrong)} tensor(s) are not in the files that the index names",
            "copy the files again from where they are whole",
            keys=sorted(wrong),
        )


def _rebuilt(path: Path, names: list[str], problem: str) -> Planned:
    file = str(path / INDEX_NAME)
    missing = _missing_numbers(names)
    if not names:
        return Planned(file, problem, "there are no files named model-00001-of-0000N.safetensors to make one from")
    if missing:
        return Planned(file, problem, f"files are missing, so it would not be whole: {', '.join(missing)}")
    weights: dict[str, str] = {}
    total = 0
    saves: set[str | None] = set()
    for name in names:
        try:
            header = _header(path / name)
            notes = read_notes(header.notes, str(path / name))
        except (HoldfastError, OSError) as error:
            return Planned(file, problem, f"it would be made from the files, and one cannot be read: {error}")
        twice = [key for key in header.tensors if key in weights]
        if twice:
            return Planned(
                file, problem, f"{twice[0]!r} is both in {weights[twice[0]]} and in {name}: which one is right?"
            )
        weights |= dict.fromkeys(header.tensors, name)
        total += sum(stored.nbytes for stored in header.tensors.values())
        saves.add(notes.save_id)
    if len(saves) > 1:
        return Planned(file, problem, "the files are of different saves; bring those of one save together")
    index = make_index(weights, total, next(iter(saves)))

    def rebuild() -> None:
        keep_copy(LocalStore(path), INDEX_NAME)
        _write_json(path / INDEX_NAME, index)

    return Planned(file, problem, f"made from the headers of {len(names)} file(s), {len(weights)} tensors", do=rebuild)


def _missing_numbers(names: list[str]) -> list[str]:
    """Of files that are numbered, those that are not there."""
    matches = [match for match in map(_NUMBERED.fullmatch, names) if match]
    if not matches:
        return []
    digits = len(matches[0].group(2))
    expected = [
        f"model-{number:05d}-of-{int(match_of):0{digits}d}.safetensors"
        for match_of in {match.group(2) for match in matches}
        for number in range(1, int(match_of) + 1)
    ]
    return [name for name in expected if name not in names]


def _header(path: Path) -> Header:
    with path.open("rb") as stream:
        return read_header(stream, str(path))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with written_atomically(path) as stream:
        stream.write(json.dumps(content, indent=2).encode())
