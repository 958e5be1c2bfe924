"""What one rank brings to a save: its part of the tree, descriptions of its tensors, and the tensors themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import UnsupportedTensorError
from holdfast.formats.native.dtypes import name_of
from holdfast.formats.native.values import Encoder, Path, leaves
from holdfast.patterns import Choice, Selection
from holdfast.planning.holdings import Holding, LocalTensor, hold, memory_of
from holdfast.states.expanding import expand


@dataclass(frozen=True)
class Captured:
    """One rank's state, ready to be saved."""

    tree: Any
    """Its typed value, with names of places where every rank has a value of its own."""
    own: Mapping[str, Any]
    """The typed values at these places, by key."""
    holdings: list[Holding]
    local: Mapping[str, LocalTensor]


@dataclass(frozen=True)
class Capture:
    """How a state is captured."""

    rank: int
    several_ranks: bool
    selection: Selection
    cast: Choice
    allow_pickle: bool
    compare_copies: bool

    def take(self, state: Any) -> Captured:
        """Look at a state, without copying or changing anything."""
        expanded = expand(state, None if self.selection.is_everything else self.selection)
        taken: list[tuple[Path, Any]] = []

        def take(path: Path, tensor: Any) -> None:
            taken.append((path, tensor))

        encoder: Any = Encoder(take, allow_pickle=self.allow_pickle)
        tree = encoder.encode(expanded.tree)
        shared = list(zip(_tensor_keys(tree), taken, strict=True))
        taken.clear()
        own = {}
        own_tensors: list[tuple[str, tuple[Path, Any]]] = []
        for key, (path, value) in expanded.slots.items():
            own[key] = encoder.encode(value, (*path, self.rank))
            own_tensors.extend(zip(_tensor_keys(own[key]), taken, strict=True))
            taken.clear()
        local: dict[str, LocalTensor] = {}
        holdings = [
            self._hold(key, path, tensor, local, from_first_rank=path in expanded.from_first_rank)
            for key, (path, tensor) in shared
        ]
        holdings.extend(self._hold_own(key, tensor, local) for key, (_, tensor) in own_tensors)
        return Captured(tree, own, _with_ties(holdings, local), local)

    def _hold(
        self, key: str, path: Path, tensor: Any, local: dict[str, LocalTensor], *, from_first_rank: bool
    ) -> Holding:
        compare = self.several_ranks and self.compare_copies and not from_first_rank
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
        wish = self.cast(key) if self.cast else None
        if wish is None or not isinstance(tensor, torch.Tensor):
            return None
        dtype = torch_dtype(wish)
        # A pattern such as "model.*" is about weights, and must not take away a counter's or a mask's meaning.
        return dtype if tensor.is_floating_point() or tensor.is_complex() else None


def torch_dtype(wish: Any) -> torch.dtype:
    """The dtype that a user names, as an object of torch or numpy or as a text."""
    name = name_of(wish)
    dtype = getattr(torch, name or "", None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{wish!r} is not a dtype to cast to; give one such as torch.bfloat16 or 'bfloat16'")
    return dtype


def _tensor_keys(tree: Any) -> list[str]:
    return [leaf.node["key"] for leaf in leaves(tree) if leaf.is_tensor]


def _with_ties(holdings: list[Holding], local: Mapping[str, LocalTensor]) -> list[Holding]:
    """Note which keys are further names of the very same memory."""
    first: dict[Any, str] = {}
    noted = []
    for holding in holdings:
        memory: Any = memory_of(local[holding.key].value)
        if memory is not None and holding.kind != "per_rank":
            name = first.setdefault(memory, holding.key)
            if name != holding.key:
                holding = holding._replace(tied_to=name)
        noted.append(holding)
    return noted
