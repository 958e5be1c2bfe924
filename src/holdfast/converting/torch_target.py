"""Writes one ``torch.save`` file, which ``torch.load`` reads with ``weights_only=True`` and with ``mmap=True``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.converting.outgoing import Outgoing, bytes_of_next
from holdfast.converting.target import Target, Written, refuse_values
from holdfast.converting.torch_states import LEAVE_OUT, UNPICKLABLE, refuse_what_torch_lacks, stand_ins_for
from holdfast.formats.native.keys import readable
from holdfast.formats.native.trees import children_of, mapped, substituted
from holdfast.formats.torch_file.description import StoredBytes, describe
from holdfast.formats.torch_file.state_archive import bytes_of_storage, expected_size, state_archive
from holdfast.formats.torch_file.zip_writer import ZipWriter
from holdfast.stores.atomic_sink import sink_atomically
from holdfast.tuning import SHARE_OF_ROOMS

_NAME = "a torch.save file"


class TorchTarget(Target):
    """Tied tensors share their storage, as they do in memory. Numpy arrays become tensors."""

    format = "torch"
    is_file = True
    keeps_ties = True

    def refuse(self, outgoing: Outgoing) -> None:
        """Raise for tensors of types that torch lacks, and for values that ``torch.load`` would refuse."""
        refuse_what_torch_lacks(outgoing, _NAME)
        if not outgoing.allow_pickle:
            refused = _refused(substituted(outgoing.tree, lambda ref: None), ())
            advice = (
                "torch.load reads only plain data without running code. "
                f"{LEAVE_OUT}, or have them written as pickles (allow_pickle=True), for torch.load(weights_only=False)."
            )
            refuse_values(outgoing, _NAME, refused, advice)

    def write(self, outgoing: Outgoing, place: Path) -> Written:
        """Write the description of everything, then the bytes of one tensor after the other."""
        stand_ins = stand_ins_for(outgoing.tensors.items())
        state = substituted(outgoing.tree, lambda ref: stand_ins[ref.key])
        description, entries = describe(state, stand_ins.values())
        keys = {id(stand_in): key for key, stand_in in stand_ins.items()}
        with sink_atomically(place, expected_size(description, entries), outgoing.budget // SHARE_OF_ROOMS) as sink:
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
    why = _needs(value)
    if not why:
        return {}
    found: dict[str, str] = {}
    parts = children_of(value) or []
    for name, child in parts:
        found |= _refused(child, (*path, name))
    itself = _needs(mapped(value, lambda child: None)) if parts else ""
    if itself or not found:
        found[readable(path)] = itself or why
    return found


def _needs(value: Any) -> str:
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
