"""The contracts of planners: who decides what is written and where what is read goes.

One planner instance lives on every rank. During a save the flow calls, in this order: ``set_up_planner`` and
``create_local_plan`` on all ranks, ``create_global_plan`` on the coordinator, ``finish_plan`` on all ranks, and
``resolve_data`` for every item. A load goes the same way, with ``load_bytes`` or ``resolve_tensor`` and
``commit_tensor`` for every item.
"""

from __future__ import annotations

import abc
import io
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch

from holdfast._formats.dcp.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from holdfast._formats.dcp.plan import LoadPlan, ReadItem, SavePlan, WriteItem


class SavePlanner(abc.ABC):
    """Decides what each rank writes."""

    # What planners with plan caching remember between saves, by planner class. Instances come and go with each save.
    _cached_save_plan: ClassVar[dict[str, SavePlan]] = {}
    _cached_final_save_plan: ClassVar[dict[str, SavePlan]] = {}
    _cached_all_plans: ClassVar[dict[str, list[SavePlan]]] = {}
    _cached_global_plan: ClassVar[dict[str, list[SavePlan]]] = {}
    _cached_metadata: ClassVar[dict[str, Metadata]] = {}

    peers: tuple[int, ...] = (0,)
    """Set by the save flow: the global ranks that take part in this save."""

    @abc.abstractmethod
    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state that is to be saved."""

    @abc.abstractmethod
    def create_local_plan(self) -> SavePlan:
        """List what this rank could write."""

    @abc.abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the coordinator: decide what each rank writes, and describe the whole checkpoint."""

    @abc.abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take this rank's part of the decision."""

    @abc.abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of one item. Called from writer threads."""


class LoadPlanner:
    """Decides what each rank reads, and where it goes."""

    takes_what_is_there: bool = False
    """Whether what the index lacks is left out without an error. Then it must be the index of all ranks' parts."""

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state that is to be loaded into."""
        raise NotImplementedError

    def create_local_plan(self) -> LoadPlan:
        """List what this rank needs."""
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: look at what all ranks need."""
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Take this rank's part of the decision."""
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the stored form of a value that is not a tensor."""
        raise NotImplementedError

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """A place for the stored form of a value; not used by the built-in storages."""
        raise NotImplementedError("this planner gives no buffers for values; it takes them through load_bytes")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor (a view of the destination) that the item's data is copied into."""
        raise NotImplementedError

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The data is in ``tensor``, which ``resolve_tensor`` returned."""
        raise NotImplementedError


_Commit: TypeAlias = Callable[[Any, ReadItem, torch.Tensor], None]

_KEEP_ITEMS_APART: set[_Commit] = set()


def keeps_items_apart(commit: _Commit) -> _Commit:
    """Say of a ``commit_tensor`` that its planner has memory of its own for every item."""
    _KEEP_ITEMS_APART.add(commit)
    return commit


def may_be_filled_at_once(planner: LoadPlanner) -> bool:
    """Whether several items may be resolved before the first of them is committed.

    A planner that does something in ``commit_tensor`` may use the same memory for all items, and copy them from there.
    """
    return getattr(planner.commit_tensor, "__func__", None) in _KEEP_ITEMS_APART
