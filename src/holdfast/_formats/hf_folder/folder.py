"""What a Hugging Face folder holds: every tensor, and where its parts are stored.

If there is an index, it alone says which files count. Without one all safetensors files of the folder count, and they
must be of one save. In either case the parts of every tensor must tile it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from holdfast._base.boxes import volume
from holdfast._base.json_objects import parse_json_object
from holdfast._base.threads import map_in_threads
from holdfast._base.tiling import tiling_problems
from holdfast._formats.hf_folder.commit import Folder, Switch
from holdfast._formats.hf_folder.names import (
    COMMIT_NAME,
    INDEX_NAME,
    SHARDED_FOLDER,
    SUFFIX,
    FileNotes,
    file_name,
    is_data_file,
    is_inside_folder,
    is_shard,
    number_of,
    read_notes,
)
from holdfast._formats.native.dtypes import DType, dtype_named
from holdfast._formats.safetensors.dtypes import in_memory
from holdfast._formats.safetensors.header import Header, read_header
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, HoldfastError, UnsafePathError

if TYPE_CHECKING:
    import torch

_MOST_SHOWN = 10
_MOST_DIGITS = 20


@dataclass(frozen=True)
class FolderChunk:
    """A part of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    header_digest: bytes
    """By which a file that was replaced meanwhile is noticed."""


@dataclass
class StoredKey:
    """A tensor of a folder."""

    elements: DType
    size: tuple[int, ...]
    chunks: list[FolderChunk] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """What torch calls its elements."""
        from holdfast._formats.native.torch_elements import torch_dtype  # listing a folder does not need torch

        found = torch_dtype(self.elements)
        assert found is not None
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return volume(self.size) * self.elements.itemsize


@dataclass(frozen=True)
class Contents:
    """All tensors of a folder, and the save that they are of if it is known."""

    keys: Mapping[str, StoredKey]
    save_id: str | None


@dataclass(frozen=True)
class _File:
    name: str
    path: str
    header: Header
    notes: FileNotes
    wanted: Collection[str]


def read_contents(folder: Folder, threads: int = 1) -> Contents:
    """What can be loaded from a folder."""
    switch, index, lister = _listing(folder)
    if index is not None:
        files = _read_headers(folder, _weight_files(index, lister), switch, threads)
        save_id = switch.save_id if switch is not None else _index_save_id(index)
        if save_id is not None:
            _refuse_other_saves(folder, files + _shards_beside(folder, files, threads), save_id)
        return _assemble(folder, files, save_id)
    if switch is not None:
        files = _read_headers(folder, dict.fromkeys(switch.files), switch, threads)
        _refuse_other_saves(folder, files, switch.save_id)
        return _assemble(folder, files, switch.save_id)
    names = sorted(name for name in folder.names() if name.endswith(SUFFIX))
    if not names:
        raise CheckpointNotFoundError(_what_is_missing(folder), path=str(folder.path))
    return read_files(folder, names, threads)


@dataclass(frozen=True)
class IndexCheck:
    """How far an index agrees with the files of its folder."""

    unlisted: Mapping[str, Sequence[str]]
    """Tensors that the index does not name, by the file they are in: one that it lists, or that is of the same set."""
    missing: Sequence[str]
    """Files of the same set that are neither listed nor there."""
    stated_bytes: int | None
    """How many bytes the index says that all tensors have."""
    listed_bytes: int
    """How many those have that it names."""
    is_exact: bool
    """Whether the number was written by us. Others count tensors that share memory in other ways."""


def check_index(folder: Folder, threads: int = 1) -> IndexCheck | None:
    """Compare the index of a folder with the headers of its files. None if it has none."""
    switch, index, lister = _listing(folder)
    if index is None:
        return None
    files = _read_headers(folder, _weight_files(index, lister), switch, threads)
    weights = index["weight_map"]
    unlisted = {file.name: [key for key in file.header.tensors if key not in weights] for file in files}
    there = {number: name for name in folder.names() if (number := number_of(name)) is not None}
    missing = []
    for number in _unlisted_of_same_set([file.name for file in files]):
        name = there.get(number, "")
        if not name:
            missing.append(file_name(*number))
            continue
        with suppress(HoldfastError, OSError):  # it is not part of the checkpoint, perhaps nothing but left over
            [beside] = _read_headers(folder, {name: None}, None, 1)
            unlisted[name] = [key for key in beside.header.tensors if key not in weights]
    return IndexCheck(
        unlisted={name: keys for name, keys in unlisted.items() if keys},
        missing=missing,
        stated_bytes=_stated_bytes(index),
        listed_bytes=sum(file.header.tensors[key].nbytes for file in files for key in file.wanted),
        is_exact=_index_save_id(index) is not None,
    )


def _unlisted_of_same_set(listed: Sequence[str]) -> list[tuple[int, int]]:
    """The numbers that complete a set of numbered files, such as 2 of 3."""
    numbers = {number_of(name) for name in listed}
    counts = {number[1] for number in numbers if number is not None}
    if len(counts) != 1 or None in numbers:
        return []
    [count] = counts
    return [(number, count) for number in range(1, count + 1) if (number, count) not in numbers]


def _stated_bytes(index: Mapping[str, Any]) -> int | None:
    about = index.get("metadata")
    stated = about.get("total_size") if isinstance(about, dict) else None
    if isinstance(stated, str) and stated.isdecimal() and len(stated) < _MOST_DIGITS:
        return int(stated)
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not 0 <= stated < float("inf"):
        return None
    return int(stated)


def _listing(folder: Folder) -> tuple[Switch | None, Mapping[str, Any] | None, str]:
    """The index of a folder, or the one that a switch will put there; the switch; and which file says so."""
    switch = folder.switch_under_way()
    index = _read_index(folder) if switch is None else switch.index
    lister = str(folder.at(INDEX_NAME if switch is None else COMMIT_NAME))
    if switch is not None and index is not None:
        index = _checked_index(index, lister)
    return switch, index, lister


def read_files(folder: Folder, names: Iterable[str], threads: int = 1) -> Contents:
    """What these files of a folder hold. Those that name a save must all name the same one."""
    files = _read_headers(folder, dict.fromkeys(names), None, threads)
    ids = {file.notes.save_id for file in files if is_data_file(file.name)}
    if len(ids) > 1:
        _refuse_other_saves(folder, files, next(save_id for save_id in ids if save_id is not None))
    return _assemble(folder, files, next(iter(ids), None))


def _read_index(folder: Folder) -> Mapping[str, Any] | None:
    file = str(folder.at(INDEX_NAME))
    try:
        with folder.fs.create_stream(file, "rb") as stream:
            content = stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _checked_index(parse_json_object(content, file), file)


def _checked_index(content: Any, file: str) -> Mapping[str, Any]:
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise DamagedCheckpointError(
            f"{file} is not the index of a model: it has no weight_map from names of tensors to names of files. Copy "
            "the file again, or load another checkpoint.",
            file=file,
            key=None,
            expected="a weight_map",
            found=str(content)[:200],
        )
    found: Mapping[str, Any] = content
    return found


def _index_save_id(index: Mapping[str, Any]) -> str | None:
    about = index.get("metadata")
    save_id = about.get("holdfast_save_id") if isinstance(about, dict) else None
    return save_id if isinstance(save_id, str) else None


def _weight_files(index: Mapping[str, Any], source: str) -> dict[str, Collection[str] | None]:
    files: dict[str, Collection[str] | None] = {}
    keys: dict[str, set[str]] = {}
    for key, name in index["weight_map"].items():
        if not is_inside_folder(name):
            raise UnsafePathError(
                f"{source} names {name!r}, which is not a file in its folder. Do not load this checkpoint unless you "
                "know who wrote it; if it is yours, write the index again with names of files in the folder.",
                name=name,
            )
        files[name] = keys.setdefault(name, set())
        keys[name].add(key)
    return files


def _read_headers(
    folder: Folder, wanted: Mapping[str, Collection[str] | None], switch: Switch | None, threads: int
) -> list[_File]:
    lister = "the index" if switch is None else "the record of a save"

    def look(name: str) -> _File:
        places = switch.places(name) if switch is not None and name in switch.files else (name,)
        for place in places:
            path = str(folder.at(place))
            try:
                with folder.fs.create_stream(path, "rb") as stream:
                    header = read_header(stream, path)
            except FileNotFoundError:
                continue
            keys = wanted[name]
            return _File(name, path, header, read_notes(header.notes, path), header.tensors if keys is None else keys)
        raise DamagedCheckpointError(
            f"{folder.at(name)} is missing, and {lister} of the folder lists it. If a save has replaced the checkpoint "
            "meanwhile, load again; if not, copy the file back or load another checkpoint.",
            file=str(folder.at(name)),
            key=next(iter(wanted[name] or ()), None),
            expected="a file",
            found=None,
        )

    return map_in_threads(look, wanted, threads, "holdfast-headers")


def _shards_beside(folder: Folder, files: list[_File], threads: int) -> list[_File]:
    """Parts of model files that are beside an index and not in it: they may be of a later save."""
    listed = {file.name for file in files}
    beside = sorted(name for name in folder.names() if is_shard(name) and name not in listed)
    return _read_headers(folder, dict.fromkeys(beside, ()), None, threads)


def _refuse_other_saves(folder: Folder, files: Iterable[_File], save_id: str | None) -> None:
    strange = sorted(file.name for file in files if file.notes.save_id != save_id and is_data_file(file.name))
    if strange:
        raise DamagedCheckpointError(
            f"{folder.path} holds files of different saves: {', '.join(strange[:_MOST_SHOWN])} are not of "
            f"save {save_id}, as others are. If a save was interrupted here, save again, or load the folder above if "
            "this one is its `sharded`: nothing is lost there. Otherwise bring the files of one save together in a "
            "folder of their own.",
            file=str(folder.at(strange[0])),
            key=None,
            expected=save_id,
            found=strange,
        )


def _assemble(folder: Folder, files: Iterable[_File], save_id: str | None) -> Contents:
    """Bring the parts of every tensor together, and prove that they tile it."""
    keys: dict[str, StoredKey] = {}
    sizes: dict[str, set[tuple[int, ...]]] = {}
    problems: dict[str, str] = {}
    for file in files:
        for key in file.wanted:
            stored = file.header.tensors.get(key)
            if stored is None:
                problems.setdefault(key, f"is not in {file.name}, where the index says it is")
                continue
            name, shape = in_memory(key, stored.dtype, stored.shape, file.path)
            elements = dtype_named(name)
            offsets = tuple(file.notes.offsets.get(key, (0,) * len(shape)))
            entry = keys.setdefault(key, StoredKey(elements, ()))
            if len(offsets) != len(shape) or entry.elements != elements:
                problems.setdefault(key, f"has a part of another dtype or number of dimensions in {file.name}")
                continue
            position = file.header.position(key)
            entry.chunks.append(FolderChunk(offsets, shape, file.path, position, file.header.digest))
            if key in file.notes.sizes:
                sizes.setdefault(key, set()).add(tuple(file.notes.sizes[key]))
    for key, entry in keys.items():
        if key not in problems:
            problem = _settle(entry, sizes.get(key, set()))
            if problem is not None:
                problems[key] = problem
    if problems:
        shown = "; ".join(f"'{key}' {problem}" for key, problem in list(problems.items())[:_MOST_SHOWN])
        raise DamagedCheckpointError(
            f"{folder.path}: {len(problems)} tensor(s) are not stored as they should be: {shown}. Files may be "
            "missing, or be left over from another save; bring the right ones together, or load another checkpoint.",
            file=str(folder.path),
            key=next(iter(problems)),
            expected="parts that tile their tensors",
            found=problems,
        )
    return Contents(keys, save_id)


def _settle(entry: StoredKey, noted: set[tuple[int, ...]]) -> str | None:
    """Find the size of a tensor and what does not fit into it."""
    chunks = entry.chunks
    if len(chunks) == 1 and not any(chunks[0].offsets) and noted <= {chunks[0].sizes}:
        entry.size = chunks[0].sizes  # whole, as nearly all are: there may be very many
        return None
    if len({len(chunk.sizes) for chunk in chunks}) > 1 or len(noted) > 1:
        return "has parts of tensors of different sizes"
    entry.size = noted.pop() if noted else _reach(chunks)
    # Empty parts may have the offsets of others, which names must keep apart.
    entry.chunks = chunks = [chunk for chunk in chunks if volume(chunk.sizes)] or chunks[:1]
    problems = tiling_problems(chunks, entry.size, name=lambda position: f"in {PurePath(chunks[position].file).name}")
    return f"has chunks that do not tile it: {'; '.join(problems)}" if problems else None


def _reach(chunks: Sequence[FolderChunk]) -> tuple[int, ...]:
    ends = ([at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks)
    return tuple(max(along) for along in zip(*ends, strict=True))


def _what_is_missing(folder: Folder) -> str:
    here = f"no Hugging Face checkpoint at {folder.path}: "
    if not folder.fs.exists(folder.path):
        return here + "the path does not exist. Check it for a typo, and that all ranks see the same disk."
    names = folder.names()
    if SHARDED_FOLDER in names:
        return here + f"it has no {SUFFIX} files, but a folder '{SHARDED_FOLDER}' with parts of them. Load from there."
    if ".metadata" in names:
        return here + "it is a checkpoint of FileSystemWriter. Load it with FileSystemReader."
    return here + f"it has no {SUFFIX} files ({len(names)} other file(s))."
