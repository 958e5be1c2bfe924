"""The seam between planning and storing: what a format must offer to take part in a save or a load."""

from __future__ import annotations

import abc
import os
from dataclasses import dataclass
from typing import Any

from torch.futures import Future

from holdfast._dcp.planner import LoadPlanner, SavePlanner
from holdfast._formats.dcp.metadata import Metadata, MetadataIndex, StorageMeta
from holdfast._formats.dcp.plan import LoadPlan, SavePlan


@dataclass(frozen=True)
class WriteResult:
    """One item that was written: its name, its size, and what the storage needs to find it again."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


class StorageWriter(abc.ABC):
    """Writes the items of a plan. One instance lives on every rank; calls come in the order of the methods here."""

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, into ``checkpoint_id`` if it is given."""

    @abc.abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the own role; ``rank`` and ``use_collectives`` come as keywords if the method takes ``kwargs``."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Look at this rank's plan before it is sent to the coordinator."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: look at all plans before they are handed out."""

    @abc.abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all items of ``plan``, with the data that ``planner`` resolves for each."""

    @abc.abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: make the checkpoint exist, as the last act of a save."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can take ``checkpoint_id``."""

    def storage_meta(self) -> StorageMeta | None:
        """What the storage wants planners to know."""
        return None


class StorageReader(abc.ABC):
    """Reads the items of a plan. One instance lives on every rank; calls come in the order of the methods here."""

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, from ``checkpoint_id`` if it is given."""

    @abc.abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's index."""

    @abc.abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the index and the own role."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Look at this rank's plan before it is sent to the coordinator."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: look at all plans before they are handed out."""

    @abc.abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of ``plan`` into the places that ``planner`` resolves for each."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can take ``checkpoint_id``."""
