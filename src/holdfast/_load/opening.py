"""Opens whatever checkpoint is at a place, by looking at what is there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast._base.texts import some_of
from holdfast._base.torch_needed import needing_torch
from holdfast._formats.dcp.names import is_index
from holdfast._formats.format_names import (
    FILE_ENDINGS,
    SAFETENSORS,
    SAFETENSORS_COMMIT,
    SAFETENSORS_INDEX,
    START,
    ZIP_MAGIC,
    format_of_file,
    stands_for_its_folder,
)
from holdfast._formats.native.names import RECORD, generation_of
from holdfast._formats.source import Source
from holdfast._stores.places import local_path, store_at
from holdfast._stores.roots import root_at
from holdfast._stores.store import Store
from holdfast.errors import CheckpointNotFoundError, NotACheckpointError, UncommittedCheckpointError

_MOST_NAMED = 5
_MOST_LOOKED_AT = 20


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
    if path.is_file():
        return _open_file(path, allow_pickle)
    if path.exists():  # reading a pipe might never end
        raise NotACheckpointError(
            f"{path} is not a checkpoint: it is neither a folder nor a file.", path=str(path), found=None
        )
    raise CheckpointNotFoundError(
        f"no checkpoint at {path}: the path does not exist. Check it for a typo, and that all ranks see the same disk.",
        path=str(path),
    )


def _open_in_store(place: str | os.PathLike[str] | Store, allow_pickle: bool) -> Source:
    if not isinstance(place, Store) and os.fsdecode(place).endswith(FILE_ENDINGS):
        opened = _open_object(os.fsdecode(place), allow_pickle)  # a web server would be asked for all of it as a list
        if opened is not None:
            return opened
    store = store_at(place)
    if store.size(RECORD) is not None:
        from holdfast._formats.native.source import NativeSource

        return NativeSource(store, allow_pickle=allow_pickle)
    names = sorted(listed.name for listed in store.list())
    if any(map(is_index, names)):
        with needing_torch(f"{store.location}, a checkpoint of torch.distributed.checkpoint,"):
            from holdfast._dcp.source import DcpSource

        return DcpSource(store, allow_pickle=allow_pickle)
    _refuse_uncommitted(store.location, names)
    if any(name.endswith((SAFETENSORS, SAFETENSORS_INDEX, SAFETENSORS_COMMIT)) for name in names):
        from holdfast._formats.safetensors.source import SafetensorsSource

        return SafetensorsSource(store)
    opened = None if names or isinstance(place, Store) else _open_object(os.fsdecode(place), allow_pickle)
    if opened is not None:
        return opened
    inner = [] if isinstance(place, Store) else _checkpoints_below(place)
    if inner or names:
        shown = names or [f"{name}/" for name in inner]
        raise _not_a_checkpoint(store.location, shown, _advice(inner, []))
    raise CheckpointNotFoundError(f"no checkpoint at {store.location}: there is nothing.", path=store.location)


def _open_object(url: str, allow_pickle: bool) -> Source | None:
    """The checkpoint that is one object, or that the object belongs to; None if there is no such object."""
    folder, _, name = url.rstrip("/").rpartition("/")
    if folder.endswith(("/", ":")) or not name:
        return None
    store = store_at(folder)
    size = store.size(name)
    if size is None:
        return None
    if stands_for_its_folder(name):
        return _open_in_store(store, allow_pickle)
    kind = _kind_of_file(store.path_of(name), store.read(name, 0, min(START, size)))
    if kind == "torch":
        with needing_torch(f"{store.path_of(name)}, a file of torch.save,"):
            from holdfast._formats.torch_file.source import TorchFileSource

        return TorchFileSource(name, allow_pickle=allow_pickle, store=store)
    from holdfast._formats.safetensors.source import SafetensorsSource

    return SafetensorsSource(store, file=name)


def _open_folder(path: Path, allow_pickle: bool) -> Source:
    names = sorted(os.listdir(path))
    if RECORD in names or (path / RECORD).exists():  # a listing may miss a name that is replaced just now
        from holdfast._formats.native.source import NativeSource

        return NativeSource(store_at(path), allow_pickle=allow_pickle)
    if any(map(is_index, names)):
        with needing_torch(f"{path}, a checkpoint of torch.distributed.checkpoint,"):
            from holdfast._dcp.source import DcpSource

        return DcpSource(path, allow_pickle=allow_pickle)
    _refuse_uncommitted(str(path), names)
    if any(name.endswith((SAFETENSORS, SAFETENSORS_INDEX, SAFETENSORS_COMMIT)) for name in names):
        from holdfast._formats.safetensors.source import SafetensorsSource

        return SafetensorsSource(path)
    if not names:
        raise CheckpointNotFoundError(f"no checkpoint at {path}: the folder is empty.", path=str(path))
    raise _not_a_checkpoint(str(path), names, _what_to_do(path, names))


def _open_file(path: Path, allow_pickle: bool) -> Source:
    if stands_for_its_folder(path.name):
        return _open_folder(path.parent, allow_pickle)
    with path.open("rb") as stream:
        kind = _kind_of_file(str(path), stream.read(START))
    if kind == "torch":
        with needing_torch(f"{path}, a file of torch.save,"):
            from holdfast._formats.torch_file.source import TorchFileSource

        return TorchFileSource(path, allow_pickle=allow_pickle)
    from holdfast._formats.safetensors.source import SafetensorsSource

    return SafetensorsSource(path)


def _kind_of_file(path: str, start: bytes) -> str:
    """The format of a file that begins so."""
    found = format_of_file(path, start)
    if found is not None:
        return found
    raise NotACheckpointError(
        f"{path} is not a checkpoint: it is a file that begins with {start!r}. Give a folder that holds a checkpoint, "
        "a safetensors file, or a file that torch.save wrote.",
        path=path,
        found=start,
    )


def _refuse_uncommitted(location: str, names: Sequence[str]) -> None:
    """Raise if all that could be of a checkpoint was left behind by saves that did not come to their end."""
    ours = [name for name in names if generation_of(name) is not None]
    others = [name for name in names if name.endswith(SAFETENSORS) and name not in ours]
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
    return NotACheckpointError(
        f"{location} is not a checkpoint of a known format: it holds {some_of(names, _MOST_NAMED)}. {advice}",
        path=location,
        found=list(names),
    )


def _what_to_do(path: Path, names: Iterable[str]) -> str:
    """A hint at a checkpoint one step further down, if there is one."""
    inner, files = [], []
    for name in names:
        place = path / name
        if place.is_dir():
            if any(inside == RECORD or is_index(inside) for inside in os.listdir(place)):
                inner.append(name)
        elif place.is_file():
            with place.open("rb") as stream:
                if stream.read(len(ZIP_MAGIC)) == ZIP_MAGIC:
                    files.append(name)
    return _advice(inner, files)


def _checkpoints_below(place: str | os.PathLike[str]) -> list[str]:
    """The last of the checkpoints that are one step further down."""
    root = root_at(place)
    inner: list[str] = []
    for name in sorted(root.children(), reverse=True)[:_MOST_LOOKED_AT]:
        names = [listed.name for listed in root.child(name).list()]
        if any(inside == RECORD or is_index(inside) for inside in names):
            inner.insert(0, name)
    return inner


def _advice(inner: Sequence[str], files: Sequence[str]) -> str:
    if inner:
        return f"There are checkpoints inside of it: {', '.join(inner[-_MOST_NAMED:])}. Give one of those paths."
    if files:
        return f"If it is a file of torch.save that you want, give its path: {files[-1]}."
    return "Check the path."
