"""Writes what torch reads: DCP checkpoints, which load on any number of ranks, and ``torch.save`` files."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast._base.nested import ObjectPath, flat_name
from holdfast._base.tuning import SHARE_OF_WRITE_BUFFERS
from holdfast._dcp.save import save_state
from holdfast._dcp.save_planner import DefaultSavePlanner
from holdfast._dcp.torch_file_conversions import StreamingWriter
from holdfast._formats.archives.values import encode_value, needs_pickle
from holdfast._formats.archives.zip_writer import ZipWriter
from holdfast._formats.dcp.blobs import WrittenElements
from holdfast._formats.dcp.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from holdfast._formats.dcp.plan import SavePlan, TensorWriteData, WriteItem, WriteItemType
from holdfast._formats.native.keys import keys_of, readable
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.torch_elements import torch_dtype
from holdfast._formats.native.trees import children_of, hides_tensor, is_named, mapped, substituted
from holdfast._formats.torch_file.description import (
    StoredBytes,
    bytes_of_storage,
    describe,
    expected_size,
    state_archive,
)
from holdfast._load.stored_nodes import StoredNode
from holdfast._ranks.shared_steps import Collectives
from holdfast._stores.durable_files import sink_atomically
from holdfast._tools.converting.outgoing import Outgoing, OutgoingBytes, OutTensor, bytes_of_next
from holdfast._tools.converting.target import Target, Written, refuse_values
from holdfast.errors import UnsupportedValueError

# What the targets that torch reads have in common: stand-ins for tensors, and what neither of them can hold.


UNPICKLABLE = (TypeError, AttributeError, RecursionError, pickle.PicklingError)
"""How pickle says that it cannot store something."""

LEAVE_OUT = "Leave these out (exclude=...), or all values (only_tensors=True, --only-tensors)"
"""What to do about values that a format cannot hold; more follows."""


def stand_ins_for(tensors: Iterable[tuple[str, OutTensor]]) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes and dtypes without elements, by name."""
    return {name: torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device="meta") for name, tensor in tensors}


def refuse_what_torch_lacks(outgoing: Outgoing, format_name: str) -> None:
    """Raise for a state that is not a dict, and for elements that torch does not have."""
    if not isinstance(outgoing.tree, Mapping):
        raise UnsupportedValueError(
            f"{outgoing.source.location} holds a {type(outgoing.tree).__name__} and not a dict of names, which "
            f"{format_name} must have. Convert it to the native format, or save it under a name.",
            key="",
        )
    elements = {
        name: f"its elements are of numpy's type {tensor.numpy}"
        for name, tensor in outgoing.names.items()
        if torch_dtype(tensor.dtype) is None
    }
    refuse_values(outgoing, format_name, elements, "Torch has no such elements. Leave these arrays out (exclude=...).")


# Writes a DCP checkpoint, which ``torch.distributed.checkpoint`` loads on any number of ranks.


_DCP_NAME = "a DCP checkpoint"


class DcpTarget(Target):
    """States are flattened as DCP does it, so that its users find the keys that they know.

    The format has lists, and dicts with str keys: other containers of tensors become those. Tied tensors are
    stored once for every name. Empty dicts are kept as values, which DCP itself would lose.
    """

    format = "dcp"

    def refuse(self, outgoing: Outgoing) -> None:
        """Raise for keys that DCP cannot tell apart, for elements that torch lacks, and for values that need code."""
        refuse_what_torch_lacks(outgoing, _DCP_NAME)
        known: dict[str, _Leaf] = {}
        same: dict[str, str] = {}
        refused: dict[str, str] = {}
        for leaf in _leaves(outgoing.tree):
            key = flat_name(leaf.path)
            if key in known:
                one, other = keys_of([known[key].source, leaf.source])
                same[key] = f"is the key of '{one}' and of '{other}'"
            known[key] = leaf
            if (
                not isinstance(leaf.value, TensorRef)
                and not outgoing.allow_pickle
                and (why := _code_for_dcp(leaf.value))
            ):
                refused[key] = why
        advice = (
            "The keys of DCP are str, joined by dots, so it cannot tell these apart. Rename one of each, under the key "
            "in quotes (rename={key: new})."
        )
        refuse_values(outgoing, _DCP_NAME, same, advice)
        advice = (
            f"They take code to be loaded. {LEAVE_OUT}, or have them written as pickles (allow_pickle=True), for those "
            "who load with allow_pickle=True or by torch."
        )
        refuse_values(outgoing, _DCP_NAME, refused, advice)

    def write(self, outgoing: Outgoing, place: Path) -> Written:
        """Write one data file and then the index."""
        flow = _Flow(outgoing)
        writer = _Writer(place, flow, outgoing.budget // SHARE_OF_WRITE_BUFFERS)
        metadata = save_state(
            {}, writer, _Planner(outgoing, flow), Collectives(None, use_dist=False, coordinator_rank=0)
        )
        files = sorted({info.relative_path for info in metadata.storage_data.values()} | {".metadata"})
        return Written(files, sum((place / name).stat().st_size for name in files), _texts_as_keys(outgoing))


def _texts_as_keys(outgoing: Outgoing) -> dict[str, str]:
    """What has another key because keys of dicts are always str in DCP: ``None`` is one that is called so, say."""
    leaves = list(_with_texts(StoredNode.of(outgoing.tree), ()))
    new = keys_of([path for _, path in leaves])
    return {leaf.key: key for (leaf, _), key in zip(leaves, new, strict=True) if leaf.key != key}


def _with_texts(node: StoredNode, path: ObjectPath) -> Iterator[tuple[StoredNode, ObjectPath]]:
    """All leaves, with the paths that they have in DCP, where ints are positions in lists and nothing else."""
    if node.leaf is not None:
        yield node.leaf, path
        return
    for name, child in node.children.items():
        yield from _with_texts(child, (*path, name if _has_positions(node.value) else str(name)))


class _Leaf(NamedTuple):
    """What has a key in DCP."""

    path: ObjectPath
    source: tuple[Any, ...]
    """Its path in what goes out."""
    value: Any


def _leaves(tree: Mapping[Any, Any]) -> Iterator[_Leaf]:
    """All leaves as DCP sees them: dicts are opened, and lists in which there is a dict or a tensor."""
    for name, child in tree.items():
        yield from _leaves_in(_Leaf((str(name),), (name,), child))


def _leaves_in(leaf: _Leaf) -> Iterator[_Leaf]:
    path, source, value = leaf
    parts = children_of(value) if _is_opened(value) else None
    if not parts:
        yield leaf
        return
    is_list = _has_positions(value)
    for name, child in parts:
        yield from _leaves_in(_Leaf((*path, name if is_list else str(name)), (*source, name), child))


def _has_positions(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not is_named(value)


def _is_opened(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    if isinstance(value, TensorRef):
        return False
    return hides_tensor(value) or (isinstance(value, list) and _holds_dict(value) and _comes_back(value))


def _holds_dict(value: list[Any]) -> bool:
    """Whether there is a dict in nested lists. DCP would lose empty ones, so they are no reason to open a list."""
    return any(
        bool(child) if isinstance(child, Mapping) else isinstance(child, list) and _holds_dict(child) for child in value
    )


def _comes_back(value: Any) -> bool:
    """Whether all dicts in nested lists are such as the format gives back. Others are better kept as they are."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(type(key) is str and _comes_back(child) for key, child in value.items())
    return not isinstance(value, list) or all(map(_comes_back, value))


def _code_for_dcp(value: Any) -> str:
    """What code it would take to load a value; nothing if it takes none."""
    try:
        return needs_pickle(encode_value(value)) or ""
    except UNPICKLABLE as error:
        return f"cannot be pickled ({error!s:.100})"


class _Flow(WrittenElements):
    """The elements of stand-ins, which come one tensor after the other."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._stream: Iterator[OutgoingBytes] = iter(())

    def begin(self, keys: list[str]) -> None:
        """The tensors will be asked for in this order."""
        self._stream = self._outgoing.stream(keys)

    def whole(self, tensor: torch.Tensor) -> bytes:
        """The bytes of the next tensor."""
        return b"".join(bytes(piece) for piece in self.pieces(tensor))  # their memory is used again

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The same in parts."""
        return bytes_of_next(self._stream, tensor.nbytes)


class _Writer(StreamingWriter):
    """Writes to a place that gets another name later."""

    def storage_meta(self) -> StorageMeta:
        """The id of this save, and no path."""
        return StorageMeta(save_id=self.save_id)


class _Planner(DefaultSavePlanner):
    """Plans a state of references, each of which is a whole tensor."""

    def __init__(self, outgoing: Outgoing, flow: _Flow) -> None:
        super().__init__()
        self._outgoing = outgoing
        self._flow = flow
        self._keys: dict[str, str] = {}
        """Those of tensors in what goes out, by those that they have in DCP."""

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten what goes out."""
        leaves = {flat_name(leaf.path): leaf for leaf in _leaves(self._outgoing.tree)}
        self.mappings = {key: leaf.path for key, leaf in leaves.items()}
        self._keys = {key: leaf.value.key for key, leaf in leaves.items() if isinstance(leaf.value, TensorRef)}
        tensors = self._outgoing.tensors
        stand_ins = stand_ins_for((key, tensors[own]) for key, own in self._keys.items())
        self.state_dict = {key: leaf.value for key, leaf in leaves.items()} | stand_ins
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """An item for every leaf."""
        items = [self._item(key, value) for key, value in self.state_dict.items()]
        return SavePlan(items, planner_data=self.mappings)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The order of what is written is known now."""
        self._flow.begin([self._keys[item.index.fqn] for item in new_plan.items if item.index.fqn in self._keys])
        return super().finish_plan(new_plan)

    def _item(self, key: str, value: Any) -> WriteItem:
        if key not in self._keys:
            return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
        data = TensorWriteData(whole, TensorProperties(value.dtype), value.size())
        return WriteItem(MetadataIndex(key, whole.offsets), WriteItemType.TENSOR, tensor_data=data)


# Writes one ``torch.save`` file, which ``torch.load`` reads with ``weights_only=True`` and with ``mmap=True``.


_TORCH_FILE_NAME = "a torch.save file"


class TorchTarget(Target):
    """Tied tensors share their storage, as they do in memory. Numpy arrays become tensors."""

    format = "torch"
    is_file = True
    keeps_ties = True

    def refuse(self, outgoing: Outgoing) -> None:
        """Raise for tensors of types that torch lacks, and for values that ``torch.load`` would refuse."""
        refuse_what_torch_lacks(outgoing, _TORCH_FILE_NAME)
        if not outgoing.allow_pickle:
            refused = _refused(substituted(outgoing.tree, lambda ref: None), ())
            advice = (
                "torch.load reads only plain data without running code. "
                f"{LEAVE_OUT}, or have them written as pickles (allow_pickle=True), for torch.load(weights_only=False)."
            )
            refuse_values(outgoing, _TORCH_FILE_NAME, refused, advice)

    def write(self, outgoing: Outgoing, place: Path) -> Written:
        """Write the description of everything, then the bytes of one tensor after the other."""
        stand_ins = stand_ins_for(outgoing.tensors.items())
        state = substituted(outgoing.tree, lambda ref: stand_ins[ref.key])
        description, entries = describe(state, stand_ins.values())
        keys = {id(stand_in): key for key, stand_in in stand_ins.items()}
        with sink_atomically(
            place, expected_size(description, entries), outgoing.budget // SHARE_OF_WRITE_BUFFERS
        ) as sink:
            with state_archive(sink, description) as archive:
                _add_all(archive, outgoing, entries, keys)
            return Written([place.name], sink.size)


def _add_all(archive: ZipWriter, outgoing: Outgoing, entries: Sequence[StoredBytes], keys: Mapping[int, str]) -> None:
    """Write the content of all entries. Tensors inside of values are in memory."""
    wanted = [keys[id(entry.source)] for entry in entries if id(entry.source) in keys]
    stream = outgoing.stream(wanted)
    for entry in entries:
        if isinstance(entry.source, torch.UntypedStorage):
            archive.add(entry.name, bytes_of_storage(entry.source))
        else:
            archive.add_from(entry.name, entry.nbytes, bytes_of_next(stream, entry.nbytes))


def _refused(value: Any, path: tuple[Any, ...]) -> dict[str, str]:
    """The parts of a value that ``torch.load`` would not make, and what it would have to make for each of them."""
    why = _code_for_torch_load(value)
    if not why:
        return {}
    found: dict[str, str] = {}
    parts = children_of(value) or []
    for name, child in parts:
        found |= _refused(child, (*path, name))
    itself = _code_for_torch_load(mapped(value, lambda child: None)) if parts else ""
    if itself or not found:
        found[readable(path)] = itself or why
    return found


def _code_for_torch_load(value: Any) -> str:
    """What code it would take to load a value; nothing if it takes none."""
    stream = io.BytesIO()
    try:
        description, _ = describe(value, ())
    except UNPICKLABLE as error:
        return f"cannot be pickled ({error!s:.100})"
    with state_archive(stream, description):
        pass
    stream.seek(0)
    return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(stream)))
