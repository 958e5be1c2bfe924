"""Loads a ``torch.save`` file on many ranks, of which only one reads the file.

That rank sends the others what the file holds. So all of them plan as they would with any checkpoint, and what does
not fit is found before anything is changed. Then it sends to each rank the slices that the rank has a place for.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch.futures import Future

from holdfast import _settings as settings
from holdfast._base.nested import flatten
from holdfast._dcp.deliveries import Arrivals, Delivery, entry_of
from holdfast._dcp.planner import LoadPlanner
from holdfast._dcp.storage import StorageReader
from holdfast._formats.dcp.metadata import Metadata, StorageMeta, TensorStorageMetadata
from holdfast._formats.dcp.plan import LoadPlan, ReadItem
from holdfast._formats.torch_file.reading import OpenTorchFile, open_torch_file
from holdfast._ranks.parcels import Parcels
from holdfast._ranks.shared_steps import Collectives
from holdfast._stores.filesystem import AnyPath
from holdfast.errors import CheckpointNotFoundError, RankDisagreementError, StateMismatchError


class BroadcastingTorchSaveReader(StorageReader):
    """Reads a ``torch.save`` file on one rank and gives every rank its part of it.

    By default the rank that coordinates the load reads the file. ``coordinator_rank`` names another one, by its number
    in the whole job: the one that the file is local to, for instance.

    >>> import tempfile, torch
    >>> import holdfast.dcp as dcp
    >>> path = tempfile.mkdtemp() + "/model.pt"
    >>> torch.save({"w": torch.ones(2), "step": 7}, path)
    >>> state = {"w": torch.zeros(2), "step": 0}
    >>> dcp.load(state, storage_reader=BroadcastingTorchSaveReader(), checkpoint_id=path)
    >>> state
    {'w': tensor([1., 1.]), 'step': 7}
    """

    reads_together = True
    """The ranks wait for each other in ``read_data``, and it raises on all of them if one fails."""

    def __init__(
        self,
        checkpoint_id: AnyPath | None = None,
        coordinator_rank: int = 0,
        *,
        allow_pickle: bool | None = None,
        verify: bool | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_id = checkpoint_id
        self.coordinator_rank = coordinator_rank
        self.allow_pickle = allow_pickle
        self.verify = verify
        self._ranks = Collectives(None, use_dist=False, coordinator_rank=0)
        self._metadata = Metadata({})
        self._file: OpenTorchFile | None = None
        self._stored: dict[str, Any] | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Whether there is such a file."""
        return os.path.isfile(checkpoint_id)

    def reset(self, checkpoint_id: AnyPath | None = None) -> None:
        """A new load begins."""
        if checkpoint_id is not None and checkpoint_id != "":
            self.checkpoint_id = checkpoint_id
        self._let_go()

    def meet_ranks(self, ranks: Collectives) -> None:
        """Called by the load flow, on all ranks, before anything else: decide who reads, and learn what there is."""
        choices = ranks.all_gather("plan", lambda: self._reading_rank(ranks))
        if len(set(choices)) > 1:
            with ranks.step("plan"):
                _refuse_different_choices(choices)
        self._ranks = Collectives(ranks.group, ranks.use_dist, choices[0])
        self._metadata = self._ranks.broadcast("plan", self._look_into_file)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the file holds; an empty index if the reader has not met the other ranks."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to learn: who coordinates and who reads need not be the same."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return global_plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of all ranks. All ranks call this together."""
        deliveries: list[Delivery] = []

        def prepare(wanted: list[list[ReadItem]]) -> None:
            deliveries.extend(self._deliveries(wanted))

        try:
            self._ranks.all_reduce("read", lambda: plan.items, prepare)
            arrivals = Arrivals(plan.items, planner, self._metadata)
            with self._ranks.step("read"):
                if self._ranks.is_coordinator:
                    self._deliver(deliveries, arrivals)
                else:
                    _receive(Parcels(self._ranks), arrivals)
        finally:
            self._let_go()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _let_go(self) -> None:
        """Of the file, and of what is known of it."""
        if self._file is not None:
            self._file.close()
        self._file = self._stored = None

    def _reading_rank(self, ranks: Collectives) -> int:
        if not ranks.use_dist or not self.coordinator_rank:
            return ranks.coordinator_rank
        members = ranks.global_ranks()
        if self.coordinator_rank not in members:
            raise ValueError(
                f"coordinator_rank={self.coordinator_rank} is not among the ranks {list(members)} that load; it is "
                "counted in the whole job"
            )
        return members.index(self.coordinator_rank)

    def _look_into_file(self) -> Metadata:
        if self.checkpoint_id is None:
            raise CheckpointNotFoundError(
                "no torch.save file was named; pass checkpoint_id to load or to BroadcastingTorchSaveReader", path=""
            )
        knobs = settings.current()
        self._let_go()
        self._file = open_torch_file(
            self.checkpoint_id,
            allow_pickle=knobs.allow_pickle if self.allow_pickle is None else self.allow_pickle,
            verify=knobs.verify if self.verify is None else self.verify,
        )
        flat = flatten(self._file.state)
        self._stored = flat.values
        entries = {key: entry_of(value) for key, value in flat.values.items()}
        self._file.split(flat.values.values(), lambda value: isinstance(entry_of(value), TensorStorageMetadata))
        return Metadata(entries, planner_data=flat.paths, storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id))

    def _deliveries(self, wanted: list[list[ReadItem]]) -> list[Delivery]:
        """On the rank that reads: what to hand out, values first, each key to all ranks in turn.

        It raises if something cannot be delivered, so that afterwards only the way itself can fail.
        """
        if self._stored is None:
            self._metadata = self._look_into_file()
        stored = self._stored or {}
        by_key: dict[str, list[tuple[int, int, ReadItem]]] = defaultdict(list)
        for rank, items in enumerate(wanted):
            for number, item in enumerate(items):
                by_key[item.storage_index.fqn].append((rank, number, item))
        unknown = sorted(by_key.keys() - stored.keys())
        if unknown:
            raise StateMismatchError(
                f"{self.checkpoint_id} does not hold {unknown}. Take them out of the state to load, or give the file "
                "that has them.",
                missing=unknown,
            )
        assert self._file is not None
        found = [Delivery(key, stored[key], by_key[key], self._file.present) for key in stored if key in by_key]
        return sorted(found, key=lambda delivery: delivery.is_tensor)

    def _deliver(self, deliveries: Sequence[Delivery], own: Arrivals) -> None:
        """Hand everything out. An error in taking the own part does not keep back the others' parts."""
        others = [rank for rank in range(self._ranks.world_size) if rank != self._ranks.rank]
        parcels = Parcels(self._ranks) if others else None
        try:
            for delivery in deliveries:
                for rank, note, content in delivery.blocks():
                    if rank == self._ranks.rank or parcels is None:
                        own.take(note, content)
                    else:
                        parcels.send(rank, note, content)
        finally:
            if parcels is not None:
                parcels.end(others)
        own.finish()


def _receive(parcels: Parcels, arrivals: Arrivals) -> None:
    for note, content in parcels.arriving():
        arrivals.take(note, content)
    arrivals.finish()


def _refuse_different_choices(choices: Sequence[int]) -> None:
    views = {rank: f"rank {choice} of the group reads" for rank, choice in enumerate(choices)}
    raise RankDisagreementError(
        f"the ranks do not agree on who reads the file: {views}. Give all the same coordinator_rank.", views=views
    )
