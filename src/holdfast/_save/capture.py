"""What one rank brings to a save: its part of the tree, descriptions of its tensors, and the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from holdfast._base.divisions import Division
from holdfast._base.patterns import Choice, Selection
from holdfast._compat.tensors import PACKED
from holdfast._formats.native.keys import readable
from holdfast._formats.native.refs import Slot, UnregisteredValue
from holdfast._formats.native.registered_types import registered_type, registrable_kind
from holdfast._formats.native.trees import NOTHING, children_of, part_of, pruned
from holdfast._formats.native.values import Encoder, Path, key_of
from holdfast._formats.tensor_bytes import plain_addresses
from holdfast._layout import tensor_kinds as partitioned
from holdfast._layout.descriptions import (
    SavingRanks,
    TensorDescription,
    WritableTensor,
    describe,
    dtype_of_whole,
    others_may_have_it,
)
from holdfast._layout.many_descriptions import Descriptions, LocalTensors, describe_dense
from holdfast._save.agreement import noted_ties
from holdfast._save.options import CheckedOptions
from holdfast._state.expanding import Expanded, expand
from holdfast.errors import PartitionedParameterError, UnsupportedTensorError, UnsupportedValueError

# The part of a state that a user wants, chosen by keys before anything is stored.


def select(expanded: Expanded, wanted: Callable[[str], bool], rank: int) -> Expanded:
    """The leaves whose keys are wanted, in their containers. Containers of which nothing is left are left out too."""
    slots = {}
    for name, (path, value) in expanded.slots.items():
        kept = _selected(value, (*path, rank), lambda below: wanted(key_of(below)))
        if kept is not NOTHING:
            slots[name] = (path, kept)
    names = {path: name for name, (path, _) in expanded.slots.items()}
    tree = _selected(expanded.tree, (), lambda path: names[path] in slots if path in names else wanted(key_of(path)))
    kinds = {path: kind for path, kind in expanded.kinds.items() if path in names or _is_in(tree, path)}
    return Expanded({} if tree is NOTHING else tree, slots, expanded.from_first_rank, kinds)


def _is_in(tree: Any, path: Path) -> bool:
    """Whether something is left at a place. Positions in lists that became shorter do not show it."""
    for name in path:
        children = dict(children_of(tree) or ())
        if name not in children:
            return False
        tree = children[name]
    return True


def _selected(value: Any, path: Path, wanted: Callable[[Path], bool]) -> Any:
    return pruned(value, path, wanted, tensors=(torch.Tensor, np.ndarray, Slot), part_of=_part_of_registered)


def _part_of_registered(value: Any, fields: Mapping[str, Any], path: Path) -> UnregisteredValue:
    """What is not registered cannot be stored as a whole either, unless it is pickled, and then with all its fields."""
    if registered_type(type(value)) is None and not isinstance(value, UnregisteredValue):
        key, kind = key_of(path), registrable_kind(type(value)) or type(value).__name__
        raise UnsupportedValueError(
            f"only some fields of '{key}' are to be saved, which takes a registered {kind}: put "
            f"@holdfast.register_type above {type(value).__qualname__}",
            key=key,
            keys=[key],
        )
    return part_of(value, fields, path)


_MOST_REPORTED = 20


@dataclass(frozen=True)
class Captured:
    """One rank's state, ready to be saved."""

    tree: Any
    """Its typed value, with slots where every rank has a value of its own."""
    own: Mapping[str, Any]
    """The typed values for the slots, by name."""
    descriptions: Sequence[TensorDescription]
    local: Mapping[str, WritableTensor]
    to_compare: frozenset[str] = frozenset()
    """The keys whose digests are still to be taken, because other ranks may hold the same."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The classes of optimizers, by their keys."""
    is_private: bool = False
    """Whether the tensors are copies, which nobody changes."""


_Whose = Literal["shared", "first rank's", "own"]
"""Shared: all ranks that have one should have the same."""


class _Tensors(NamedTuple):
    """The tensors and numpy arrays of a state, in columns."""

    keys: list[str]
    values: list[Any]
    whose: list[_Whose]


class _Encoded(NamedTuple):
    """A state as typed values, and its tensors."""

    tree: Any
    own: Mapping[str, Any]
    tensors: _Tensors


@dataclass(frozen=True)
class Capture:
    """How a state is captured."""

    rank: int
    ranks: SavingRanks
    selection: Selection
    cast: Choice
    allow_pickle: bool
    compare_copies: bool
    compare_later: bool = False
    """Only note what is to be compared: taking digests takes time."""

    @classmethod
    def of(
        cls, options: CheckedOptions, rank: int, members: tuple[int, ...], *, compare_later: bool = False
    ) -> Capture:
        """As a save wants it, by one of the ranks that the whole job counts so."""
        return cls(
            rank=rank,
            ranks=SavingRanks.of(members),
            selection=options.selection,
            cast=options.cast,
            allow_pickle=options.allow_pickle,
            compare_copies=len(members) > 1 and options.replica_mismatch != "ignore",
            compare_later=compare_later,
        )

    def take(self, state: Any) -> Captured:
        """Look at a state, without copying or changing anything."""
        expanded = expand(state)
        if not self.selection.is_everything:
            expanded = select(expanded, self.selection, self.rank)
        encoded = self._encoded(expanded)
        local = self._local(encoded.tensors)
        descriptions = self._described(encoded.tensors, local)
        to_compare = self._to_compare(encoded.tensors, descriptions) if self.compare_later else frozenset()
        kinds = {readable(path): kind for path, kind in expanded.kinds.items()}
        return Captured(encoded.tree, encoded.own, noted_ties(descriptions, local), local, to_compare, kinds)

    def _encoded(self, expanded: Expanded) -> _Encoded:
        """The state as typed values, and the tensors that were met on the way."""
        paths: list[Path] = []
        values: list[Any] = []

        def meet(path: Path, tensor: Any) -> None:
            paths.append(path)
            values.append(tensor)

        encoder = Encoder(meet, allow_pickle=self.allow_pickle)
        tree = encoder.encode(expanded.tree)
        keys = encoder.keys()
        of_first = expanded.from_first_rank
        whose: list[_Whose] = ["shared"] * len(values)
        if of_first:
            whose = ["first rank's" if path in of_first else "shared" for path in paths]
        own = {}
        for name, (path, value) in expanded.slots.items():
            own[name] = encoder.encode(value, (*path, self.rank))
            keys += encoder.keys()
        whose += ["own"] * (len(values) - len(whose))
        return _Encoded(tree, own, _Tensors(keys, values, whose))

    def _local(self, tensors: _Tensors) -> LocalTensors:
        """The tensors themselves, and where those are whose memory can be taken as it is."""
        stored_dtypes = None
        if self.cast:
            stored_dtypes = [
                self._stored_dtype(key, value) for key, value in zip(tensors.keys, tensors.values, strict=True)
            ]
        return LocalTensors(tensors.keys, tensors.values, plain_addresses(tensors.values), stored_dtypes)

    def _described(self, tensors: _Tensors, local: LocalTensors) -> Descriptions:
        """Describe all tensors, or raise one error for all that cannot be stored."""
        compare = self.compare_copies and not self.compare_later
        addresses = local.addresses
        if compare or tensors.whose.count("shared") < len(tensors.whose):  # each may have something of its own
            addresses = [
                address if whose == "shared" and not compare else 0
                for address, whose in zip(addresses, tensors.whose, strict=True)
            ]
        likes, kinds = describe_dense(tensors.values, addresses, local.stored_dtypes, self.ranks)
        refused: list[UnsupportedTensorError] = []
        for position in np.flatnonzero(kinds < 0).tolist():
            key, value, whose = (column[position] for column in tensors)
            try:
                description, _ = describe(
                    key,
                    value,
                    stored_dtype=local.stored_dtypes[position] if local.stored_dtypes else None,
                    compare=compare and whose == "shared",
                    ranks=self.ranks,
                )
                likes.append(description if whose == "shared" else self._marked(description, value, whose))
            except UnsupportedTensorError as error:
                refused.append(error)
            kinds[position] = len(likes) - 1
        if refused:
            raise _all_refused(refused)
        return Descriptions(tensors.keys, likes, kinds)

    def _to_compare(self, tensors: _Tensors, descriptions: Descriptions) -> frozenset[str]:
        if not self.compare_copies:
            return frozenset()
        have_boxes = descriptions.each([bool(like.boxes) for like in descriptions.likes])
        return frozenset(
            key
            for key, value, whose, has_boxes in zip(*tensors, have_boxes, strict=True)
            if whose == "shared" and has_boxes and others_may_have_it(value)
        )

    def _marked(self, description: TensorDescription, value: Any, whose: _Whose) -> TensorDescription:
        """A description that says whose the tensor is."""
        if whose == "own":
            _refuse_sharded(description, value)
            return description._replace(kind="per_rank", rank=self.rank, division=Division(ranks=(self.rank,)))
        return description._replace(from_first_rank=True)

    def _stored_dtype(self, key: str, tensor: Any) -> torch.dtype | None:
        wish: torch.dtype | None = self.cast(key)
        if wish is None or isinstance(tensor, np.ndarray):
            return None
        dtype = dtype_of_whole(tensor)
        # A pattern such as "model.*" is about weights, and must not take away a counter's or a mask's meaning.
        return wish if dtype.is_floating_point and dtype not in PACKED and dtype != wish else None


def _refuse_sharded(description: TensorDescription, tensor: Any) -> None:
    if description.kind == "sharded":
        raise UnsupportedTensorError(
            f"'{description.key}' is spread over ranks and is marked as per rank. Take it out of holdfast.PerRank: a "
            "sharded tensor is stored once for all ranks.",
            key=description.key,
            kind=type(tensor).__name__,
        )


def _all_refused(refused: list[UnsupportedTensorError]) -> UnsupportedTensorError:
    """One error for all tensors that cannot be stored."""
    first = refused[0]
    if len(refused) == 1:
        return first
    if all(isinstance(error, PartitionedParameterError) for error in refused):
        return partitioned.refused([error.key for error in refused])
    lines = [f"  {error.message}" for error in refused[:_MOST_REPORTED]]
    if len(refused) > _MOST_REPORTED:
        lines.append(f"  and {len(refused) - _MOST_REPORTED} more (see the field `keys` of this error)")
    return UnsupportedTensorError(
        f"{len(refused)} tensors cannot be stored, so nothing was saved:\n" + "\n".join(lines),
        key=first.key,
        kind=first.kind,
        keys=[error.key for error in refused],
    )
