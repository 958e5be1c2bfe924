"""The files of a Hugging Face folder: their names, the notes in their headers, and opening them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NoReturn

from holdfast._base.json_objects import are_sizes, parse_json_object
from holdfast._formats.folder_files import FolderFiles, original_of
from holdfast._formats.safetensors.header import read_digest
from holdfast._stores.filesystem import FileSystemBase
from holdfast.errors import DamagedCheckpointError

# The names that files of a Hugging Face folder have, and which of them belong to a checkpoint.


INDEX_NAME = "model.safetensors.index.json"
COMMIT_NAME = "model.safetensors.commit.json"
"""There from the moment a save is complete until all of its files have their final names. See ``hf_commit``."""
SUFFIX = ".safetensors"
SHARDED_FOLDER = "sharded"

_FILE = r"(?:shard-\d{5,}-)?model-\d{5,}-of-\d{5,}\.safetensors"
_DATA_FILE = re.compile(_FILE)
_SHARD = re.compile(r"shard-(\d{5,})-model-\d{5,}-of-\d{5,}\.safetensors")
_NUMBERED = re.compile(r"model-(\d{5,6})-of-(\d{5,6})\.safetensors")
_TEMPORARY = re.compile(
    rf"(?:{_FILE}|{re.escape(INDEX_NAME)}|{re.escape(COMMIT_NAME)})\.(?P<generation>[0-9a-f]{{8}})\.tmp"
)


def file_name(index: int, largest_index: int, shard: int | None = None) -> str:
    """The name of a model's ``index``-th file, or of a part of it.

    >>> file_name(1, 3), file_name(1, 3, shard=2)
    ('model-00001-of-00003.safetensors', 'shard-00002-model-00001-of-00003.safetensors')
    """
    whole = f"model-{index:05d}-of-{largest_index:05d}{SUFFIX}"
    return whole if shard is None else f"shard-{shard:05d}-{whole}"


def temporary_name(final: str, generation: str) -> str:
    """What a file is called until the save that it belongs to is complete."""
    return f"{final}.{generation}.tmp"


def final_name(temporary: str) -> str:
    """What an unfinished file is going to be called.

    >>> final_name(temporary_name("model-00001-of-00001.safetensors", "0a1b2c3d"))
    'model-00001-of-00001.safetensors'
    """
    return temporary.rsplit(".", 2)[0]


def is_data_file(name: str) -> bool:
    """Whether a file is a model file or a part of one, as writers of the layout name them."""
    return _DATA_FILE.fullmatch(name) is not None


def number_of(name: str) -> tuple[int, int] | None:
    """Which file of how many a model file is, by its name; None for files that are not numbered.

    >>> number_of("model-00002-of-00003.safetensors"), number_of("model.safetensors")
    ((2, 3), None)
    """
    match = _NUMBERED.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def is_shard(name: str) -> bool:
    """Whether a file is a part of a model file."""
    return _SHARD.fullmatch(name) is not None


def generation_of(name: str) -> str | None:
    """The save that an unfinished file is of, given by its name or by its path in the folder; None for other files."""
    match = _TEMPORARY.fullmatch(PurePath(name).name)
    return match["generation"] if match else None


def model_files(names: Iterable[str]) -> list[str]:
    """The data files of a model that cannot be asked for them, by their names alone."""
    return [name for name in names if is_data_file(name) or name == f"model{SUFFIX}"]


def files_in(names: Iterable[str], needed: Collection[str] = ()) -> FolderFiles:
    """Whose the files in a folder are. ``needed`` are the data files of its model.

    >>> found = files_in(["model.safetensors", "model.safetensors.index.json.0a1b2c3d.tmp"], ["model.safetensors"])
    >>> found.needed, found.by_save
    (['model.safetensors'], {'0a1b2c3d': ['model.safetensors.index.json.0a1b2c3d.tmp']})
    """
    names = sorted(names)
    by_save: dict[str, list[str]] = defaultdict(list)
    for name in names:
        generation = generation_of(name)
        if name not in needed and (generation is not None or is_data_file(PurePath(name).name)):
            by_save[generation or ""].append(name)
    return FolderFiles(
        index=[name for name in names if name in (INDEX_NAME, COMMIT_NAME)],
        needed=[name for name in names if name in needed],
        by_save=dict(by_save),
        copies=[name for name in names if original_of(name) in (INDEX_NAME, COMMIT_NAME)],
    )


def is_inside_folder(name: str) -> bool:
    """Whether a name that was read from a file stays inside of the folder that it is relative to.

    >>> [is_inside_folder(name) for name in ("sharded/a.safetensors", "../a.safetensors", "/a.safetensors")]
    [True, False, False]
    """
    path = PurePath(name)
    return bool(path.name) and not path.anchor and ".." not in path.parts and "\0" not in name


# The notes in the header of a Hugging Face file: where the parts of tensors in it belong, and which save it is of.
#
# ``DCP_SHARDING_INFO``, ``DCP_VERSION`` and ``format`` are torch's. ``HOLDFAST_SAVE`` is ours, and other readers pass
# over it: the id of the save, by which files of different saves are told apart, and the full sizes of tensors of
# which the file holds a part, by which a missing part is noticed.


SHARDING_KEY = "DCP_SHARDING_INFO"
OFFSETS_KEY = "saved_offsets"
VERSION_KEY = "DCP_VERSION"
VERSION = 1.0
FORMAT_KEY = "format"
FORMAT = "pt"
SAVE_KEY = "HOLDFAST_SAVE"


@dataclass(frozen=True)
class FileNotes:
    """What the notes of a file say."""

    save_id: str | None = None
    offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Full sizes of tensors that the file holds a part of."""


def notes_of_parts(notes: FileNotes) -> dict[str, str]:
    """Notes for a file that holds tensors or parts of tensors."""
    sharding = {key: {OFFSETS_KEY: list(offsets)} for key, offsets in notes.offsets.items()}
    return {SHARDING_KEY: json.dumps(sharding), VERSION_KEY: str(VERSION), **notes_of_whole_tensors(notes)}


def notes_of_whole_tensors(notes: FileNotes) -> dict[str, str]:
    """Notes for a file in which all tensors are whole."""
    written = {FORMAT_KEY: FORMAT}
    if notes.save_id is not None:
        save: dict[str, Any] = {"id": notes.save_id}
        if notes.sizes:
            save["sizes"] = {key: list(size) for key, size in notes.sizes.items()}
        written[SAVE_KEY] = json.dumps(save)
    return written


def read_notes(notes: Mapping[str, str], source: str) -> FileNotes:
    """Check the notes of the file ``source``. Files without any hold whole tensors."""
    sharding = _parse(notes, SHARDING_KEY, source)
    save = _parse(notes, SAVE_KEY, source)
    offsets: dict[str, Sequence[int]] = {}
    for key, entry in sharding.items():
        if not isinstance(entry, dict) or not are_sizes(entry.get(OFFSETS_KEY)):
            _refuse(source, key, SHARDING_KEY)
        offsets[key] = entry[OFFSETS_KEY]
    save_id, sizes = save.get("id"), save.get("sizes", {})
    if not isinstance(save_id, (str, type(None))) or not isinstance(sizes, dict):
        _refuse(source, None, SAVE_KEY)
    for key, size in sizes.items():
        if not are_sizes(size):
            _refuse(source, key, SAVE_KEY)
    return FileNotes(save_id, offsets, sizes)


def _parse(notes: Mapping[str, str], note: str, source: str) -> dict[str, Any]:
    return parse_json_object(notes.get(note, "{}"), source, f"its note {note}")


def _refuse(source: str, key: str | None, note: str) -> NoReturn:
    about = "" if key is None else f" about '{key}'"
    raise DamagedCheckpointError(
        f"{source} has a note {note}{about} that makes no sense. Copy the file again, or load another one.",
        file=source,
        key=key,
        expected="offsets and sizes as lists of numbers",
        found=note,
    )


# Opens the files of a Hugging Face folder, whose names are the same in every save.
#
# So a save may put another file under a name between the moment when its header was read and the moment when its data
# is. Whoever read both without looking again would mix two saves.


@contextmanager
def opened_as_described(fs: FileSystemBase, file: str, header_digest: bytes) -> Iterator[Any]:
    """The file whose header has this digest, open for reading; an error if there is another one by now."""
    with ExitStack() as stack:
        try:
            stream = stack.enter_context(fs.create_stream(file, "rb"))
        except FileNotFoundError as error:
            raise _replaced(file, header_digest) from error
        if read_digest(stream, file) != header_digest:
            raise _replaced(file, header_digest)
        yield stream


def _replaced(file: str, header_digest: bytes) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{file} is no longer the file that it was when its header was read: a save has replaced it meanwhile, or "
        "it was removed. Try again when the save has finished.",
        file=file,
        key=None,
        expected=header_digest.hex(),
        found=None,
    )
