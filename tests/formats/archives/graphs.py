"""Indexes in both libraries' classes, and a comparison that does not stop at dataclass equality."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as stock_filesystem
from torch.distributed.checkpoint import metadata as stock

from holdfast._formats.dcp import metadata as ours
from holdfast._formats.dcp.metadata import Seal, _StorageInfo

STOCK_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


# Strides are in the classes of 2.15 and later, and never in the files that we write; older ones have no version,
# and those before 2.7 no modules.
STORES_TRANSFORMS = "transform_descriptors" in stock_filesystem._StorageInfo.__dataclass_fields__  # since 2.7
NOT_IN_EVERY_TORCH = (
    {"strides"}
    | ({"version"} - stock.Metadata.__dataclass_fields__.keys())
    | ({"modules"} - stock.StorageMeta.__dataclass_fields__.keys())
)


def example(*, seal: bool = True) -> ours.Metadata:
    """A small index with everything an ordinary one has."""
    chunks = [
        ours.ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([rows, 4])) for row, rows in ((0, 2), (2, 2), (4, 1))
    ]
    properties = ours.TensorProperties(torch.bfloat16, requires_grad=True, memory_format=torch.channels_last)
    described: dict[str, ours.STORAGE_TYPES] = {
        "model.w": ours.TensorStorageMetadata(properties, torch.Size([5, 4]), chunks),
        "model.scalar": ours.TensorStorageMetadata(
            ours.TensorProperties(torch.int64),
            torch.Size([]),
            [ours.ChunkStorageMetadata(torch.Size([]), torch.Size([]))],
        ),
        "step": ours.BytesStorageMetadata(),
    }
    places: dict[ours.MetadataIndex, _StorageInfo] = {}
    for position, chunk in enumerate(chunks):
        info = _StorageInfo(f"__{position}_0.distcp", position * 100, 77)
        if seal:
            info.seal = Seal(64, 13, 0xDEADBEEF, 7)
        places[ours.MetadataIndex("model.w", chunk.offsets, position)] = info
    places[ours.MetadataIndex("model.scalar", torch.Size([]), 0)] = _StorageInfo("__0_0.distcp", 1 << 40, 3)
    places[ours.MetadataIndex("step")] = _StorageInfo("sub/__0_1.distcp", 0, 366, ["stream.zstd/1"])
    planner_data = {"model.w": ("model", "w"), "model.scalar": ("model", "scalar"), "step": ("step",), "l.0": ("l", 0)}
    return ours.Metadata(described, planner_data, places, ours.StorageMeta("/data/run", "some-id"), "1.0.0")


def to_stock(value: Any) -> Any:
    """The same object graph in stock torch's classes."""
    match value:
        case ours.Metadata() | ours.TensorStorageMetadata():
            return _in_stock(value, {name: to_stock(part) for name, part in _parts(value).items()})
        case ours.TensorProperties() | ours.ChunkStorageMetadata() | ours.BytesStorageMetadata() | ours.StorageMeta():
            return _in_stock(value, _parts(value))
        case ours.MetadataIndex():
            return stock.MetadataIndex(value.fqn, value.offset, value.index)
        case _StorageInfo():
            parts = ("relative_path", "offset", "length", "transform_descriptors")
            return _in_stock(value, {name: getattr(value, name) for name in parts}, stock_filesystem._StorageInfo)
        case dict() if type(value) is dict:
            return {to_stock(key): to_stock(inner) for key, inner in value.items()}
        case list():
            return [to_stock(inner) for inner in value]
        case _:
            return value


def _parts(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _in_stock(value: Any, parts: dict[str, Any], cls: Any = None) -> Any:
    """An object of stock's class of the same name, with the fields that the installed version has."""
    cls = cls or getattr(stock, type(value).__name__)
    return cls(**{name: part for name, part in parts.items() if name in cls.__dataclass_fields__})


def facts(value: Any) -> Any:
    """All that an index says, free of classes: types by name, and hints that equality leaves out."""
    if isinstance(value, dict):
        return [(facts(key), facts(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [facts(inner) for inner in value]
    if type(value).__name__ == "_StorageInfo":
        transforms = value.transform_descriptors if STORES_TRANSFORMS else None
        return "_StorageInfo", value.relative_path, value.offset, value.length, facts(transforms)
    if hasattr(value, "__dataclass_fields__"):
        names = [name for name in value.__dataclass_fields__ if name not in NOT_IN_EVERY_TORCH]
        return type(value).__name__, [(name, facts(getattr(value, name))) for name in names]
    return type(value).__name__, repr(value)


def modules_in(value: Any, seen: set[int] | None = None) -> set[str]:
    """The modules of all classes in an object graph."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return set()
    seen.add(id(value))
    found = {type(value).__module__}
    if isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    return found.union(*[modules_in(part, seen) for part in inner])


def stock_pickle(metadata: ours.Metadata, protocol: int = pickle.DEFAULT_PROTOCOL) -> bytes:
    """``.metadata`` as stock writes it. The copy gives every part its own objects, as they have after a gather."""
    return pickle.dumps(copy.deepcopy(to_stock(metadata)), protocol)
