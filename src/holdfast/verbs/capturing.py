"""What one rank brings to a save: its part of the tree, descriptions of its tensors, and the tensors themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.errors import UnsupportedTensorError
from holdfast.formats.native.values import Encoder, Path
from holdfast.patterns import Choice, Selection
from holdfast.planning.holdings import Holding, LocalTensor, address_of, hold, memory_of
from holdfast.planning.tensors import size_and_dtype
from holdfast.states.expanding import expand
from holdfast.states.selecting import select
from holdfast.verbs.save_options import SaveOptions
from holdfast.verbs.user_dtypes import PACKED

_MOST_REPORTED = 20


@dataclass(frozen=True)
class Captured:
    """One rank's state, ready to be saved."""

    tree: Any
    """Its typed value, with names of places where every rank has a value of its own."""
    own: Mapping[str, Any]
    """The typed values at these places, by name."""
    holdings: list[Holding]
    local: Mapping[str, LocalTensor]


@dataclass(frozen=True)
class Capture:
    """How a state is captured."""

    rank: int
    selection: Selection
    cast: Choice
    allow_pickle: bool
    compare_copies: bool

    @classmethod
    def of(cls, options: SaveOptions, rank: int, world_size: int) -> Capture:
        """As a save wants it."""
        return cls(
            rank=rank,
            selection=options.selection,
            cast=options.cast,
            allow_pickle=options.allow_pickle,
            compare_copies=world_size > 1 and options.check_replicas is not False,
        )

    def take(self, state: Any) -> Captured:
        """Look at a state, without copying or changing anything."""
        expanded = expand(state)
        if not self.selection.is_everything:
            expanded = select(expanded, self.selection, self.rank)
        found: list[tuple[Path, Any]] = []

        def take(path: Path, tensor: Any) -> None:
            found.append((path, tensor))

        encoder: Any = Encoder(take, allow_pickle=self.allow_pickle)
        tree = encoder.encode(expanded.tree)
        keys = encoder.keys()
        shared = len(keys)
        own = {}
        for name, (path, value) in expanded.slots.items():
            own[name] = encoder.encode(value, (*path, self.rank))
            keys.extend(encoder.keys())
        local: dict[str, LocalTensor] = {}
        holdings: list[Holding] = []
        refused: list[UnsupportedTensorError] = []
        of_first = expanded.from_first_rank
        for number, (key, (path, tensor)) in enumerate(zip(keys, found, strict=True)):
            try:
                if number < shared:
                    holdings.append(self._hold(key, tensor, local, from_first_rank=path in of_first))
                else:
                    holdings.append(self._hold_own(key, tensor, local))
            except UnsupportedTensorError as error:
                refused.append(error)
        if refused:
            raise _all_refused(refused)
        return Captured(tree, own, _with_ties(holdings, local), local)

    def _hold(self, key: str, tensor: Any, local: dict[str, LocalTensor], *, from_first_rank: bool) -> Holding:
        compare = self.compare_copies and not from_first_rank
        holding, local[key] = hold(key, tensor, stored_dtype=self._stored_dtype(key, tensor), compare=compare)
        return holding._replace(from_first_rank=True) if from_first_rank else holding

    def _hold_own(self, key: str, tensor: Any, local: dict[str, LocalTensor]) -> Holding:
        holding, local[key] = hold(key, tensor, stored_dtype=self._stored_dtype(key, tensor), compare=False)
        if holding.kind == "sharded":
            raise UnsupportedTensorError(
                f"'{key}' is spread over ranks and is marked as per rank. Take it out of holdfast.PerRank: a sharded "
                "tensor is stored once for all ranks.",
                key=key,
                kind=type(tensor).__name__,
            )
        return holding._replace(kind="per_rank", rank=self.rank)

    def _stored_dtype(self, key: str, tensor: Any) -> torch.dtype | None:
        wish: torch.dtype | None = self.cast(key) if self.cast else None
        if wish is None or isinstance(tensor, np.ndarray):
            return None
        _, dtype = size_and_dtype(tensor)
        # A pattern such as "model.*" is about weights, and must not take away a counter's or a mask's meaning.
        return wish if dtype.is_floating_point and dtype not in PACKED and dtype != wish else None


def _with_ties(holdings: list[Holding], local: Mapping[str, LocalTensor]) -> list[Holding]:
    """Note which keys are further names of the very same memory, stored in the same way."""
    addresses = [address_of(local[holding.key].value) for holding in holdings]
    how_often = Counter(addresses)
    first: dict[Any, str] = {}
    for number, (holding, address) in enumerate(zip(holdings, addresses, strict=True)):
        memory = memory_of(local[holding.key].value) if how_often[address] > 1 else None
        if memory is not None:
            name = first.setdefault((memory, holding.dtype, holding.kind, str(holding.numpy)), holding.key)
            if name != holding.key:
                holdings[number] = holding._replace(tied_to=name)
    return holdings


def _all_refused(refused: list[UnsupportedTensorError]) -> UnsupportedTensorError:
    """One error for all tensors that cannot be stored."""
    first = refused[0]
    if len(refused) == 1:
        return first
    lines = [f"  {error.message}" for error in refused[:_MOST_REPORTED]]
    if len(refused) > _MOST_REPORTED:
        lines.append(f"  and {len(refused) - _MOST_REPORTED} more (see the field `keys` of this error)")
    return UnsupportedTensorError(
        f"{len(refused)} tensors cannot be stored, so nothing was saved:\n" + "\n".join(lines),
        key=first.key,
        kind=first.kind,
        keys=[error.key for error in refused],
    )
