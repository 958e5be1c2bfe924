"""Where the items of a load plan go: the tensors that a planner resolves them to, or places of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch

from holdfast._dcp.planner import LoadPlanner, keeps_items_apart
from holdfast._formats.box_reads import Place
from holdfast._formats.dcp.plan import ReadItem
from holdfast._formats.tensor_places import TensorPlace
from holdfast.errors import HoldfastError


class Destination(Place, Protocol):
    """Where an item goes."""

    def take(self, elements: torch.Tensor) -> None:
        """All elements at once."""

    def clear(self) -> None:
        """Leave zeros where there would be something that is not what was saved."""

    def commit(self) -> None:
        """All of it is there."""


class DestinationPlanner(LoadPlanner):
    """A planner that has a place for every item, which need not be a tensor."""

    @abstractmethod
    def destination(self, read_item: ReadItem, stored: torch.dtype) -> Destination:
        """Where an item goes. What is stored for it has elements of type ``stored``."""

    @keeps_items_apart
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Destinations are notified directly."""


def destination_of(item: ReadItem, planner: LoadPlanner, stored: torch.dtype) -> Destination:
    """Where a planner wants an item."""
    if isinstance(planner, DestinationPlanner):
        return planner.destination(item, stored)
    return _PlannedTensor(item, planner, stored)


class _PlannedTensor(TensorPlace):
    """The tensor that a planner resolved an item to."""

    def __init__(self, item: ReadItem, planner: LoadPlanner, stored: torch.dtype) -> None:
        super().__init__(resolve_target(item, planner), stored, item.dest_index.fqn)
        self._item = item
        self._planner = planner

    def commit(self) -> None:
        """Let the planner know."""
        self._planner.commit_tensor(self._item, self.target)


def resolve_target(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    """The tensor that the planner wants an item in. It must be of the size that the plan says."""
    target = planner.resolve_tensor(item).detach()
    if target.size() != item.lengths:
        raise HoldfastError(
            f"'{item.dest_index.fqn}': the planner resolved the item to a tensor of shape {list(target.size())}, where "
            f"the plan says {list(item.lengths)} (mismatch sizes). A planner that changes shapes "
            "must change the plan too."
        )
    return target
