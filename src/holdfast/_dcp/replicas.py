"""Keys that several ranks hold: one copy is written, by whom, and what if the copies are not the same."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from holdfast._base.notices import warn_caller
from holdfast._compat.sharded_tensors import ShardedTensor
from holdfast._compat.tensors import is_wrapper_subclass
from holdfast._formats.dcp.metadata import MetadataIndex
from holdfast._formats.dcp.plan import SavePlan, WriteItem, written_bytes
from holdfast._formats.tensor_bytes import as_bytes
from holdfast._layout.owners import balanced_owners
from holdfast._ranks.differences import (
    Differing,
    describe_differing,
    differing,
    refuse_different_kinds,
    refuse_differing,
)
from holdfast._settings import OnFinding

# Who writes an item that several ranks hold.


def dedup_save_plans(all_plans: list[SavePlan], save_to_lowest_rank: bool = False) -> list[SavePlan]:
    """Leave each item in the plan of one rank only.

    What only one rank holds stays where it is. The rest goes, largest first, to the rank that has the fewest bytes to
    write so far (the lowest of several), or always to the lowest rank that holds it.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            ranks = holders.get(item.index)
            if ranks is None:
                holders[item.index] = [rank]
                sizes[item.index] = written_bytes(item)
            elif ranks[-1] != rank and not save_to_lowest_rank:
                ranks.append(rank)
    owners = balanced_owners(list(holders.values()), list(sizes.values()), len(all_plans))
    owner = dict(zip(holders, owners, strict=True))
    return [replace(plan, items=_first_of_each(plan.items, owner, rank)) for rank, plan in enumerate(all_plans)]


def _first_of_each(items: list[WriteItem], owner: dict[MetadataIndex, int], rank: int) -> list[WriteItem]:
    kept: dict[MetadataIndex, WriteItem] = {}
    for item in items:
        if owner[item.index] == rank:
            kept.setdefault(item.index, item)
    return list(kept.values())


# Comparing costs a digest of every value that other ranks may hold too. Digests are taken of the content, not of its
# pickled form, which differs between equal values.


_ATOMS = (int, float, complex, bool, type(None))


class Hasher(Protocol):
    """What a digest is taken with."""

    def update(self, data: Any, /) -> Any: ...
    def digest(self) -> bytes: ...


@dataclass(frozen=True)
class Fingerprint:
    """A digest of a value and about how many bytes the value has."""

    digest: bytes
    nbytes: int


def fingerprint(value: Any) -> Fingerprint:
    """Digest the content of ``value``: equal values of equal types have equal digests on every rank."""
    return _fingerprint(value, frozenset())


def _fingerprint(value: Any, ancestors: frozenset[int]) -> Fingerprint:
    hasher = xxhash.xxh3_128(type(value).__qualname__.encode())
    return Fingerprint(nbytes=_feed(hasher, value, ancestors), digest=hasher.digest())


def _feed(hasher: Hasher, value: Any, ancestors: frozenset[int]) -> int:
    """Digest ``value`` and return its size."""
    if isinstance(value, torch.Tensor) and _is_dense(value):
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        return _feed_bytes(hasher, as_bytes(value))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        hasher.update(f"{value.dtype}{value.shape}".encode())
        return _feed_bytes(hasher, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _feed_bytes(hasher, memoryview(value))
    if isinstance(value, (str, type, FunctionType)):
        name = value if isinstance(value, str) else value.__qualname__
        return _feed_bytes(hasher, memoryview(name.encode("utf-8", "surrogatepass")))
    if type(value) in _ATOMS:
        return _feed_bytes(hasher, memoryview(repr(value).encode()))
    return _feed_members(hasher, value, ancestors)


def _is_dense(tensor: Any) -> bool:
    """Whether a tensor is an array of bytes. Inside of values others occur too, and are compared by their parts."""
    if isinstance(tensor, ShardedTensor) or is_wrapper_subclass(tensor):
        return False
    return tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def _feed_bytes(hasher: Hasher, data: memoryview) -> int:
    hasher.update(data)
    return data.nbytes


def _feed_members(hasher: Hasher, value: Any, ancestors: frozenset[int]) -> int:
    if id(value) in ancestors:
        hasher.update(b"cycle")
        return 0
    if isinstance(value, dict):
        children: Any = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = value
    else:
        children = _what_pickle_stores(value)
    members = [_fingerprint(child, ancestors | {id(value)}) for child in children]
    if isinstance(value, (dict, set, frozenset)):
        # Sets of strings come in another order in every process, and dicts may too.
        members.sort(key=lambda member: member.digest)
    for member in members:
        hasher.update(member.digest)
    return sum(member.nbytes for member in members)


def _what_pickle_stores(value: Any) -> list[Any]:
    """The parts that an object is made of. What it merely refers to (a logger, a handle) is not part of its value."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        recipe: Any = reduce(value) if reduce else value.__reduce_ex__(2)
    except Exception:
        return []  # it cannot be stored; whoever tries reports that
    if isinstance(recipe, str):
        return [recipe]
    function, arguments, state, items, pairs = (*recipe[:5], None, None, None)[:5]
    return [function, arguments, state, list(items or ()), list(pairs or ())]


_ADVICE = (
    "If every rank's value matters (a random state, a data position), put the rank into the key; if not, make the "
    "copies equal first. HOLDFAST_REPLICA_MISMATCH=error|warn|ignore, or DefaultSavePlanner(replica_mismatch=...), "
    "says what happens."
)


def settle_differences(all_plans: list[SavePlan], on_mismatch: OnFinding) -> list[SavePlan]:
    """Refuse keys of different kinds, and treat copies that differ: the lowest rank keeps its copy, loudly."""
    _refuse_different_kinds(all_plans)
    found = differing(
        (index, rank, digest) for rank, plan in enumerate(all_plans) for index, digest in plan.replica_digests.items()
    )
    if not found:
        return all_plans
    treat_differing([(index.fqn, groups) for index, groups in found.items()], on_mismatch)
    owners = {index: min(min(ranks) for ranks in groups.values()) for index, groups in found.items()}
    return [
        replace(plan, items=[item for item in plan.items if owners.get(item.index, rank) == rank])
        for rank, plan in enumerate(all_plans)
    ]


def treat_differing(found: Iterable[tuple[str, Mapping[bytes, Sequence[int]]]], on_mismatch: OnFinding) -> None:
    """Raise or warn of keys whose copies differ, each given with the ranks that have the same."""
    by_key: dict[str, Differing] = {}
    for key, groups in found:
        by_key.setdefault(key, Differing(key, tuple(map(tuple, groups.values()))))
    if on_mismatch == "error":
        refuse_differing(list(by_key.values()), _ADVICE)
    if on_mismatch == "warn":
        kept = "The copy of the lowest rank is saved, the others are lost."
        warn_caller(describe_differing(list(by_key.values()), f"{kept} {_ADVICE}"))


def _refuse_different_kinds(all_plans: list[SavePlan]) -> None:
    """A key must be the same kind of thing everywhere: value or tensor, of one size and dtype."""
    found = differing(
        (item.index.fqn, rank, None if (data := item.tensor_data) is None else (data.size, data.properties.dtype))
        for rank, plan in enumerate(all_plans)
        for item in plan.items
    )
    kinds = {key: {_in_words(kind): ranks for kind, ranks in by_kind.items()} for key, by_kind in found.items()}
    refuse_different_kinds(kinds, "Give them different keys, or make them the same on all ranks.")


def _in_words(kind: tuple[torch.Size, torch.dtype] | None) -> str:
    return "a value" if kind is None else f"a tensor of shape {list(kind[0])} and {kind[1]}"
