"""Reading the tensors of an index that are alike: the opcodes of the first one are executed, the others recognized.

Stock torch and ``index_writer`` describe a tensor by references to what stands earlier in the index, by its shape and
by that of its chunks. So where a tensor has the dtype and the shape of an earlier one, and one chunk as most have, its
description is the very same bytes. What these mean was checked the first time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from holdfast._formats.archives.known_names import SKIPPED
from holdfast._formats.archives.pickle_machine import Machine
from holdfast._formats.dcp.index_shortcut import GET, GET_OR_SHAPE, NUMBERS
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

# From behind the empty argument tuple of a tensor to its BUILD. Between the braces of a record there is nothing but its
# fields, so that the stack is afterwards what it was, with the record on top.
_PARTS = {
    b"get": GET,
    b"size": GET_OR_SHAPE,
    # A tuple of flags and references, with strides in newer ones, or a reference to one.
    b"properties": rb"(?:%b|\((?:%b|[\x88\x89N]|%b)*t\x94?)" % (GET, GET, NUMBERS),
}
_PARTS[b"chunk"] = rb"%(get)b\)\x81\x94?\}\x94?\(%(get)b%(size)b%(get)b%(size)bub" % _PARTS
_TENSOR = re.compile(
    rb"\x81\x94?\}\x94?\("
    rb"%(get)b%(get)b\)\x81\x94?%(properties)bb"
    rb"%(get)b%(size)b"
    rb"%(get)b\]\x94?(?:%(chunk)ba|\(%(chunk)be)"
    rb"ub" % _PARTS,
    re.DOTALL,
)


class _Tensor(NamedTuple):
    """What some opcodes make, apart from anything that whoever has the result may change."""

    properties: dict[str, Any]
    size: torch.Size
    chunk: tuple[torch.Size, torch.Size]
    memo: list[Any]
    """What comes into the memo,"""
    own: tuple[tuple[int, int], ...]
    """and where that is something of the tensor itself: its slot, and which of the things that ``_made`` gives."""


@dataclass
class _Known:
    """The tensors of one index, by their opcodes."""

    tensors: dict[bytes, _Tensor] = field(default_factory=dict)
    newest: bytes = b""


def repeat_tensor(machine: Machine) -> bool:
    """Make the tensor whose class is on the stack, if its opcodes are of the usual kind."""
    known = machine.scratch.get(_Known)
    if known is None:
        known = machine.scratch[_Known] = _Known()
    opcodes = known.newest
    if not opcodes or not machine.data.startswith(opcodes, machine.position):
        match = _TENSOR.match(machine.data, machine.position)
        if match is None:
            return False
        opcodes = known.newest = match.group()
    tensor = known.tensors.get(opcodes)
    if tensor is None:
        first = len(machine.memo)
        machine.stack.append(())  # the arguments, which this is tried instead of
        machine.run_to(machine.position + len(opcodes))
        known.tensors[opcodes] = _learned(machine.stack[-1], machine.memo[first:])
        return True
    made = _made(tensor)
    machine.stack[-1] = made[0]
    machine.position += len(opcodes)
    start = len(machine.memo)
    machine.memo += tensor.memo
    for slot, which in tensor.own:
        machine.memo[start + slot] = made[which]
    return True


def _learned(tensor: TensorStorageMetadata, memo: list[Any]) -> _Tensor:
    (chunk,) = tensor.chunks
    own = {id(part): which for which, part in enumerate((tensor, tensor.properties, tensor.chunks, chunk))}
    return _Tensor(
        dict(vars(tensor.properties)),
        tensor.size,
        (chunk.offsets, chunk.sizes),
        [value if type(value) in (tuple, torch.Size) else SKIPPED for value in memo],
        tuple((slot, own[id(value)]) for slot, value in enumerate(memo) if id(value) in own),
    )


def _made(tensor: _Tensor) -> tuple[Any, ...]:
    """A tensor of its own, its properties, its list of chunks, and the chunk in it."""
    properties = TensorProperties.__new__(TensorProperties)
    vars(properties).update(tensor.properties)
    chunk = ChunkStorageMetadata(*tensor.chunk)
    chunks = [chunk]
    return TensorStorageMetadata(properties, tensor.size, chunks), properties, chunks, chunk
