"""A rank's files of a Hugging Face checkpoint: which items go into which, and how they get there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast._dcp.data_files import StoredResult, resolved_items
from holdfast._dcp.planner import SavePlanner
from holdfast._dcp.storage import WriteResult
from holdfast._formats.dcp.plan import WriteItem
from holdfast._formats.hf_folder.names import FileNotes, notes_of_parts
from holdfast._formats.safetensors.torch_dtypes import NAMES, to_safetensors
from holdfast._formats.safetensors.writer import SafetensorsWriter
from holdfast._formats.tensor_bytes import as_bytes
from holdfast._stores.durable_files import flush_to_disk
from holdfast._stores.filesystem import FileSystemBase
from holdfast.errors import HoldfastError, UnsupportedTensorError


@dataclass
class _HFStorageInfo:
    """Where a part of a tensor is: in which file, and as what."""

    relative_path: str
    """As torch has it: a writer gives the name in the folder, and a reader the path."""
    shape: torch.Size
    dtype: torch.dtype
    position: int = field(default=0, compare=False)
    """Where in the file it begins."""
    header_digest: bytes = field(default=b"", compare=False)
    """By which a file that was replaced meanwhile is noticed; empty if nobody has looked into the file yet."""


@dataclass(frozen=True)
class PartFile:
    """A file and the items that go into it, one for each key."""

    path: Any
    name: str
    items: Sequence[WriteItem]


class _OtherDtype(Exception):
    """The planner has converted a tensor on the way, so that the file was laid out wrongly."""


def split_by_file(
    items: Iterable[WriteItem], index_of: Mapping[str, int] | None
) -> dict[tuple[int, int], list[WriteItem]]:
    """Items by the index of their model file, and by a count that keeps several parts of one tensor apart."""
    files: dict[tuple[int, int], list[WriteItem]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for item in items:
        key = item.index.fqn
        files[(1 if index_of is None else index_of[key], seen[key])].append(item)
        seen[key] += 1
    return files


def write_part_file(
    fs: FileSystemBase, file: PartFile, planner: SavePlanner, save_id: str | None, *, copy_ahead: int, sync: bool
) -> list[WriteResult]:
    """Write a file; with ``sync`` its content is durable afterwards."""
    dtypes = {item.index.fqn: _planned_dtype(item) for item in file.items}
    if all(dtype in NAMES for dtype in dtypes.values()):
        try:
            return _write(fs, file, planner, save_id, dtypes, copy_ahead, sync)
        except _OtherDtype:
            pass
    # Only a planner that converts tensors gets here. The layout of the file needs to know what comes out of it.
    dtypes = {item.index.fqn: _tensor_of(item, planner.resolve_data(item)).dtype for item in file.items}
    _refuse_unknown(dtypes)
    return _write(fs, file, planner, save_id, dtypes, copy_ahead, sync)


def _write(
    fs: FileSystemBase,
    file: PartFile,
    planner: SavePlanner,
    save_id: str | None,
    dtypes: Mapping[str, torch.dtype],
    copy_ahead: int,
    sync: bool,
) -> list[WriteResult]:
    items = {item.index.fqn: item for item in file.items}
    entries = [(key, *to_safetensors(key, dtypes[key], _chunk_of(item).sizes)) for key, item in items.items()]
    results: list[WriteResult] = []
    with fs.create_stream(file.path, "wb") as stream:
        writer = SafetensorsWriter(stream, entries, notes_of_parts(_notes(items, save_id)))
        in_order = [items[key] for key in writer.header.tensors]
        for item, data in resolved_items(in_order, planner, copy_ahead):
            tensor = _tensor_of(item, data)
            key = item.index.fqn
            if tensor.dtype != dtypes[key]:
                raise _OtherDtype
            # Torch can view every dtype of one byte as bytes, but not copy all of them.
            writer.write(key, [as_bytes(tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor)])
            info = _HFStorageInfo(file.name, tensor.shape, tensor.dtype, writer.header.position(key))
            results.append(StoredResult(item.index, writer.header.tensors[key].nbytes, info, tensor.dtype))
        writer.finish()
        if sync:
            flush_to_disk(stream)
    return results


def _notes(items: Mapping[str, WriteItem], save_id: str | None) -> FileNotes:
    chunks = {key: _chunk_of(item) for key, item in items.items()}
    full = {key: item.tensor_data.size for key, item in items.items() if item.tensor_data is not None}
    return FileNotes(
        save_id,
        offsets={key: chunk.offsets for key, chunk in chunks.items()},
        sizes={key: full[key] for key, chunk in chunks.items() if chunk.sizes != full[key]},
    )


def _chunk_of(item: WriteItem) -> Any:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _planned_dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _tensor_of(item: WriteItem, data: Any) -> torch.Tensor:
    if not isinstance(data, torch.Tensor) or data.size() != _chunk_of(item).sizes:
        found = f"a tensor of shape {list(data.size())}" if isinstance(data, torch.Tensor) else type(data).__name__
        raise HoldfastError(
            f"'{item.index.fqn}': the planner resolved the item to {found}, but the plan says a tensor of shape "
            f"{list(_chunk_of(item).sizes)}; a planner that changes shapes must change the plan too"
        )
    return data.detach()


def _refuse_unknown(dtypes: Mapping[str, torch.dtype]) -> None:
    unknown = {key: str(dtype) for key, dtype in dtypes.items() if dtype not in NAMES}
    if unknown:
        shown = ", ".join(f"'{key}' ({dtype})" for key, dtype in list(unknown.items())[:10])
        raise UnsupportedTensorError(
            f"safetensors files cannot hold {len(unknown)} tensor(s): {shown}. Convert them, or save them with "
            "FileSystemWriter.",
            key=next(iter(unknown)),
            kind=next(iter(unknown.values())),
        )
