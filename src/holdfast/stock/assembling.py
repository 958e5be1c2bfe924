"""From what all ranks have written to the contents of one checkpoint. It happens on the coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from holdfast.boxes import Box
from holdfast.errors import DamagedCheckpointError, IncompleteSaveError, InvalidPlanError, UnsupportedValueError
from holdfast.formats.native.dtypes import dtype_named
from holdfast.formats.native.refs import TensorRef
from holdfast.formats.native.values import JSON, Encoder, decode, leaves
from holdfast.planning.agreement import refuse_bad_tiling
from holdfast.planning.merged_trees import TYPE, renamed_tensors
from holdfast.sources.nesting import nested
from holdfast.stock.shares import Share, StoredTensor
from holdfast.storage.native_files import WrittenFile


@dataclass(frozen=True)
class Assembled:
    """The tensors and the tree of a checkpoint, and its files with the numbers that the tensors have there."""

    tensors: Sequence[TensorRef]
    tree: JSON
    files: Sequence[WrittenFile]
    keys: Mapping[str, str]
    """Of the tensors that have a name of torch's: what they are called in the checkpoint."""


def assemble(names: Sequence[str], paths: object, shares: Sequence[Share]) -> Assembled:
    """Put the parts together. ``names`` are all that torch has planned, ``paths`` where they belong in the state.

    Raises if something was not written, or if chunks do not tile their tensors.
    """
    owners = _owners(names, shares)
    stored = _by_name(owners, shares)
    numbers = {(tensor.fqn, tensor.part): number for number, tensor in enumerate(stored)}
    nodes = {name: _node(name, owner, numbers) for name, owner in owners.items()}
    tree, keys = _tree(nodes, paths)
    files, boxes = _renumbered(shares, owners, numbers)
    tensors = []
    for number, tensor in enumerate(stored):
        whole = len(boxes[number]) <= 1
        ref = TensorRef(
            key=keys[str(number)],
            dtype=dtype_named(tensor.dtype),
            shape=tensor.shape,
            kind="replicated" if whole else "sharded",
            numpy=tensor.numpy,
        )
        refuse_bad_tiling(ref, boxes[number])
        tensors.append(ref)
    named = {tensor.fqn: keys[str(number)] for number, tensor in enumerate(stored) if tensor.part is None}
    return Assembled(tensors, tree, files, named)


def _owners(names: Sequence[str], shares: Sequence[Share]) -> dict[str, Share | None]:
    """Whose tensors count under each name: of a value, those of the first rank that has written it; else all."""
    owners: dict[str, Share | None] = dict.fromkeys(names)
    for share in reversed(shares):
        owners.update((name, share) for name in share.values if name in owners)
    return owners


def _counts(tensor: StoredTensor, share: Share, owners: Mapping[str, Share | None]) -> bool:
    owner = owners.get(tensor.fqn)
    return tensor.fqn in owners and (owner is share if tensor.part is not None else owner is None)


def _by_name(owners: Mapping[str, Share | None], shares: Sequence[Share]) -> list[StoredTensor]:
    """Every tensor once, in the order of the names."""
    found: dict[str, dict[int | None, StoredTensor]] = {name: {} for name in owners}
    for share in shares:
        for tensor in share.tensors:
            if not _counts(tensor, share, owners):
                continue
            first = found[tensor.fqn].setdefault(tensor.part, tensor)
            if first != tensor:
                raise InvalidPlanError(
                    f"ranks have given parts of '{tensor.fqn}' as different tensors: of shape {list(first.shape)} and "
                    f"{first.dtype}, and of shape {list(tensor.shape)} and {tensor.dtype}. Nothing was saved.",
                    problems=[tensor.fqn],
                )
    missing = [name for name, owner in owners.items() if owner is None and not found[name]]
    if missing:
        raise IncompleteSaveError(
            f"{len(missing)} planned item(s) were not written, such as '{missing[0]}'. Nothing was saved.",
            missing=missing,
        )
    return [tensor for parts in found.values() for tensor in parts.values()]


def _node(name: str, owner: Share | None, numbers: Mapping[tuple[str, int | None], int]) -> JSON:
    """The typed value under a name. Tensors are referred to by their numbers."""
    if owner is None:
        return {TYPE: "tensor", "key": str(numbers[name, None])}
    value = owner.values[name]
    labels: dict[str, str] = {}
    while (name, len(labels)) in numbers:
        labels[str(len(labels))] = str(numbers[name, len(labels)])
    return renamed_tensors(value, labels) if labels else value


def _tree(nodes: Mapping[str, JSON], paths: object) -> tuple[JSON, dict[str, str]]:
    """The state with everything at its path, and what the tensors of each number are called there."""
    content = list(nodes.values())
    # Containers are stored by those who know how. Arrays stand for the leaves, since they are what can be referred to.
    state = nested({name: np.array(number) for number, name in enumerate(nodes)}, paths)
    tree = _filled(Encoder(lambda path, place: str(int(place))).encode(state), content)
    keys: dict[str, str] = {}
    try:
        for leaf in leaves(tree):
            if leaf.is_tensor:
                leaf.node["key"] = keys.setdefault(leaf.node["key"], leaf.key)
        decode(tree, tensor=str)  # what is committed can be read again, also if it is too deep only as a whole
    except DamagedCheckpointError as error:
        raise UnsupportedValueError(f"the state cannot be stored: {error.found}. Nothing was saved.", key="") from error
    return tree, keys


def _filled(tree: JSON, content: Sequence[JSON]) -> JSON:
    if isinstance(tree, list):
        return [_filled(child, content) for child in tree]
    if isinstance(tree, dict):
        if tree.get(TYPE) == "tensor":
            return content[int(tree["key"])]
        return {name: _filled(child, content) for name, child in tree.items()}
    return tree


def _renumbered(
    shares: Sequence[Share], owners: Mapping[str, Share | None], numbers: Mapping[tuple[str, int | None], int]
) -> tuple[list[WrittenFile], list[list[Box]]]:
    """All files, and the boxes that each tensor is stored in. What several ranks have written counts once."""
    files: list[WrittenFile] = []
    boxes: list[dict[Box, None]] = [{} for _ in numbers]
    for share in shares:
        number_of = [
            numbers[tensor.fqn, tensor.part] if _counts(tensor, share, owners) else None for tensor in share.tensors
        ]
        for file in share.files:
            rows: list[Any] = []
            for tensor, position, offsets, sizes in file.chunks:
                number, box = number_of[tensor], Box(offsets, sizes)
                if number is not None and box not in boxes[number]:
                    boxes[number][box] = None
                    rows.append((number, position, offsets, sizes))
            files.append(replace(file, chunks=rows))
    return files, [list(found) for found in boxes]
