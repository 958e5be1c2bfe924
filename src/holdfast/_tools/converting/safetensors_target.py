"""Writes safetensors files: one, or a folder as Hugging Face models are stored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast._base.tuning import PIECE_BYTES, SHARE_OF_WRITE_BUFFERS
from holdfast._formats.hf_folder.names import INDEX_NAME
from holdfast._formats.safetensors.dtypes import IN_MEMORY, PAIRS
from holdfast._formats.safetensors.header import METADATA_KEY, Header, plan_header
from holdfast._stores.local_store import LocalStore
from holdfast._tools.converting.outgoing import Outgoing, OutTensor
from holdfast._tools.converting.target import Target, Written, refuse_values
from holdfast.errors import UnsupportedTensorError

# Which tensor goes into which file of a Hugging Face folder.


_LARGEST_HEADER = 90_000_000
"""Readers refuse headers beyond 100 MB."""


def fill_shards(sizes: Mapping[str, int], largest: int | None) -> list[list[str]]:
    """Keys for every file, in their order. A tensor that is larger than a file may be has one for itself.

    >>> fill_shards({"a": 4, "b": 4, "c": 9, "d": 1}, 8)
    [['a', 'b'], ['c'], ['d']]
    """
    shards: list[list[str]] = [[]]
    remaining, remaining_header = largest, _LARGEST_HEADER
    for key, size in sizes.items():
        entry = 7 * len(key) + 400
        is_full = (remaining is not None and size > remaining) or entry > remaining_header
        if shards[-1] and is_full:
            shards.append([])
            remaining, remaining_header = largest, _LARGEST_HEADER
        shards[-1].append(key)
        remaining = None if remaining is None else remaining - size
        remaining_header -= entry
    return shards


def shard_names(count: int) -> list[str]:
    """The names of so many files.

    >>> shard_names(1), shard_names(2)
    (['model.safetensors'], ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'])
    """
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


_IN_FILES = {name: in_file for in_file, name in IN_MEMORY.items()}
_MOST_SHOWN = 20


class SafetensorsTarget(Target):
    """One file, or a folder with an index if it takes several."""

    format = "safetensors"
    has_flat_keys = True
    arrays_are_tensors = True

    def __init__(
        self, *, is_file: bool = False, max_file_size: int | None = None, files: Sequence[str | Path] = ()
    ) -> None:
        self.is_file = is_file
        self._max_file_size = max_file_size
        self._files = [Path(file) for file in files]

    def refuse(self, outgoing: Outgoing) -> None:
        """Raise for values, and for tensors that the format has no type for."""
        refuse_values(
            outgoing,
            "safetensors files",
            {key: f"it is of type {type(value).__name__}" for key, value in outgoing.values.items()},
            "Pass only_tensors=True (--only-tensors) to leave out all values, or exclude them.",
        )
        refused = {key: why for key, tensor in outgoing.names.items() if (why := _why_not(key, tensor)) is not None}
        if refused:
            raise _unsupported(refused)

    def write(self, outgoing: Outgoing, place: Path) -> Written:
        """Write the file, or the folder."""
        if self.is_file:
            nbytes = _write_file(place, list(outgoing.names), outgoing)
            LocalStore(place.parent).sync()
            return Written([place.name], nbytes)
        place.mkdir()
        shards = fill_shards({key: tensor.nbytes for key, tensor in outgoing.names.items()}, self._max_file_size)
        names = shard_names(len(shards))
        total = sum(_write_file(place / name, keys, outgoing) for name, keys in zip(names, shards, strict=True))
        if len(shards) > 1:
            index = _index(dict(zip(names, shards, strict=True)), outgoing)
            LocalStore(place).put(INDEX_NAME, index)
            names, total = [*names, INDEX_NAME], total + len(index)
        for file in self._files:
            total += _copy(file, place)
            names = [*names, file.name]
        LocalStore(place).sync()
        return Written(names, total)


def _write_file(path: Path, keys: Sequence[str], outgoing: Outgoing) -> int:
    """Write a file, durably. Returns its size."""
    header, start = plan_header([_entry(key, outgoing.names[key]) for key in keys], _notes(outgoing))
    nbytes = _size_of(header)
    with LocalStore(path.parent).create(path.name, nbytes, outgoing.budget // SHARE_OF_WRITE_BUFFERS) as sink:
        sink.write(start)
        for piece in outgoing.stream(header.tensors):
            sink.write(piece.data)
    return nbytes


def _copy(file: Path, folder: Path) -> int:
    """Copy a file of the user, durably. Returns its size."""
    nbytes = file.stat().st_size
    with file.open("rb") as stream, LocalStore(folder).create(file.name) as sink:
        while content := stream.read(PIECE_BYTES):
            sink.write(content)
    return nbytes


def _size_of(header: Header) -> int:
    return header.data_start + sum(tensor.nbytes for tensor in header.tensors.values())


def _entry(key: str, tensor: OutTensor) -> tuple[str, str, tuple[int, ...]]:
    """Name, type and shape by which a file lists a tensor."""
    name, shape = _IN_FILES[tensor.dtype.name], tensor.shape
    return key, name, (*shape[:-1], shape[-1] * 2) if name == PAIRS else shape


def _notes(outgoing: Outgoing) -> Mapping[str, str]:
    """Those that the source has, if it is such a file, and the one that loaders of models look for."""
    noted = outgoing.source.metadata if outgoing.source.format == "safetensors" else {}
    kept = {name: text for name, text in noted.items() if isinstance(text, str) and name != "save_id"}
    return {**kept, "format": "pt"}


def _index(shards: Mapping[str, Sequence[str]], outgoing: Outgoing) -> bytes:
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    content: dict[str, Any] = {
        "metadata": {"total_size": sum(outgoing.names[key].nbytes for key in weight_map)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def _why_not(key: str, tensor: OutTensor) -> str | None:
    name = _IN_FILES.get(tensor.dtype.name)
    if name is None or (name == PAIRS and not tensor.shape):
        return f"has elements of {tensor.dtype}, which the format has no type for: cast it"
    if key == METADATA_KEY:
        return "has the name of the notes of a file: rename it"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "has a name with a lone surrogate, which UTF-8 cannot encode: rename it"
    return None


def _unsupported(refused: Mapping[str, str]) -> UnsupportedTensorError:
    lines = [f"  '{key}' {why}" for key, why in list(refused.items())[:_MOST_SHOWN]]
    if len(refused) > _MOST_SHOWN:
        lines.append(f"  and {len(refused) - _MOST_SHOWN} more (see the field `keys` of this error)")
    first = next(iter(refused))
    return UnsupportedTensorError(
        f"{len(refused)} tensor(s) cannot be stored in safetensors files, so nothing was written:\n"
        + "\n".join(lines)
        + "\nOr exclude them. rename={name: new} and cast={name: dtype} take the names as they are here.",
        key=first,
        kind=refused[first],
        keys=list(refused),
    )
