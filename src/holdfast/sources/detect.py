"""Opens whatever checkpoint is at a place, by looking at what is there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.errors import CheckpointNotFoundError, NotACheckpointError, UncommittedCheckpointError
from holdfast.formats.native.names import RECORD, generation_of
from holdfast.sources.source import Source
from holdfast.stores.places import local_path, store_at
from holdfast.stores.store import Store

_DCP_INDEX = re.compile(r"(?:__\d+)?\.metadata")
_SAFETENSORS = ".safetensors"
_SAFETENSORS_INDEX = ".safetensors.index.json"
_SAFETENSORS_COMMIT = ".safetensors.commit.json"
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80\x02"
"""How files of ``torch.save`` began before torch 1.6."""
_MOST_NAMED = 5


def open_source(place: str | os.PathLike[str] | Store, *, allow_pickle: bool = False) -> Source:
    """Open the checkpoint at a place: one of ours, of DCP, of safetensors or of ``torch.save``.

    ``allow_pickle`` lets files of torch run whatever code they name: for trusted authors only.

    >>> import tempfile, torch
    >>> file = tempfile.mkdtemp() + "/model.pt"
    >>> torch.save({"weight": torch.ones(2, 3), "step": 7}, file)
    >>> source = open_source(file)
    >>> source.format, source.tensors["weight"].shape, source.tree["step"]
    ('torch', (2, 3), 7)
    """
    path = local_path(place)
    if path is None:
        return _open_in_store(place, allow_pickle)
    if path.is_dir():
        return _open_folder(path, allow_pickle)
    if path.exists():
        return _open_file(path, allow_pickle)
    raise CheckpointNotFoundError(
        f"no checkpoint at {path}: the path does not exist. Check it for a typo, and that all ranks see the same disk.",
        path=str(path),
    )


def _open_in_store(place: str | os.PathLike[str] | Store, allow_pickle: bool) -> Source:
    from holdfast.sources.native import NativeSource

    store = store_at(place)
    if store.size(RECORD) is not None:
        return NativeSource(store, allow_pickle=allow_pickle)
    names = sorted(listed.name for listed in store.list())
    if not names:
        raise CheckpointNotFoundError(f"no checkpoint at {store.location}: there is nothing.", path=store.location)
    _refuse_uncommitted(store.location, names)
    raise _not_a_checkpoint(
        store.location, names, "Checkpoints of other formats than Holdfast's are read from local folders only."
    )


def _open_folder(path: Path, allow_pickle: bool) -> Source:
    names = sorted(os.listdir(path))
    if RECORD in names or (path / RECORD).exists():  # a listing may miss a name that is replaced just now
        from holdfast.sources.native import NativeSource

        return NativeSource(store_at(path), allow_pickle=allow_pickle)
    if any(map(_DCP_INDEX.fullmatch, names)):
        from holdfast.sources.dcp import DcpSource

        return DcpSource(path, allow_pickle=allow_pickle)
    _refuse_uncommitted(str(path), names)
    if any(name.endswith((_SAFETENSORS, _SAFETENSORS_INDEX, _SAFETENSORS_COMMIT)) for name in names):
        from holdfast.sources.safetensors import SafetensorsSource

        return SafetensorsSource(path)
    if not names:
        raise CheckpointNotFoundError(f"no checkpoint at {path}: the folder is empty.", path=str(path))
    raise _not_a_checkpoint(str(path), names, _what_to_do(path, names))


def _open_file(path: Path, allow_pickle: bool) -> Source:
    if path.name == RECORD or _DCP_INDEX.fullmatch(path.name) or path.name.endswith(_SAFETENSORS_INDEX):
        return _open_folder(path.parent, allow_pickle)
    with path.open("rb") as stream:
        start = stream.read(9)
    if start.startswith((_ZIP_MAGIC, _PICKLE_MAGIC)):
        from holdfast.sources.torch_file import TorchFileSource

        return TorchFileSource(path, allow_pickle=allow_pickle)
    if start[8:] == b"{" or path.name.endswith(_SAFETENSORS):
        from holdfast.sources.safetensors import SafetensorsSource

        return SafetensorsSource(path)
    raise NotACheckpointError(
        f"{path} is not a checkpoint: it is a file that begins with {start!r}. Give a folder that holds a checkpoint, "
        "a safetensors file, or a file that torch.save wrote.",
        path=str(path),
        found=start,
    )


def _refuse_uncommitted(location: str, names: Sequence[str]) -> None:
    """Raise if all that could be of a checkpoint was left behind by saves that did not come to their end."""
    ours = [name for name in names if generation_of(name) is not None]
    others = [name for name in names if name.endswith(_SAFETENSORS) and name not in ours]
    of_dcp = [name for name in names if name.endswith(".distcp")]
    if others or not (ours or of_dcp):
        return
    left, missing = (ours, RECORD) if ours else (of_dcp, ".metadata")
    raise UncommittedCheckpointError(
        f"no checkpoint at {location}: there are {len(left)} data file(s) but no {missing}. A save was cut off, or "
        "still goes on; nothing was committed. Load an earlier checkpoint, or look again when the save has finished.",
        path=location,
    )


def _not_a_checkpoint(location: str, names: Sequence[str], advice: str) -> NotACheckpointError:
    shown = ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )
    return NotACheckpointError(
        f"{location} is not a checkpoint of a known format: it holds {shown}. {advice}",
        path=location,
        found=list(names),
    )


def _what_to_do(path: Path, names: Iterable[str]) -> str:
    """A hint at a checkpoint one step further down, if there is one."""
    inner, files = [], []
    for name in names:
        place = path / name
        if place.is_dir():
            if any(inside == RECORD or _DCP_INDEX.fullmatch(inside) for inside in os.listdir(place)):
                inner.append(name)
        elif place.is_file():
            with place.open("rb") as stream:
                if stream.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC:
                    files.append(name)
    if inner:
        return f"There are checkpoints inside of it: {', '.join(inner[-_MOST_NAMED:])}. Give one of those paths."
    if files:
        return f"If it is a file of torch.save that you want, give its path: {files[-1]}."
    return "Check the path."
