"""The default save planner: every leaf of the state is an item, every item is written by one rank."""

from __future__ import annotations

import io
import logging
import pickle
from dataclasses import replace
from typing import Any

import torch

from holdfast import _settings as settings
from holdfast._base.nested import ObjectPath, flatten
from holdfast._dcp import plan_cache
from holdfast._dcp.global_plan import create_default_global_save_plan, merge_planner_data, refuse_invalid_plan
from holdfast._dcp.planner import SavePlanner
from holdfast._dcp.replicas import dedup_save_plans, fingerprint, settle_differences
from holdfast._dcp.state_objects import create_write_items, find_state_dict_object
from holdfast._formats.archives.values import encode_value
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex, StorageMeta
from holdfast._formats.dcp.plan import BytesIOWriteData, SavePlan, WriteItem, WriteItemType
from holdfast._layout.tensor_items import may_be_replicated
from holdfast._settings import OnFinding
from holdfast.errors import InvalidPlanError, UnsupportedValueError

logger = logging.getLogger(__name__)


class DefaultSavePlanner(SavePlanner):
    """Saves a state dict as it is.

    Subclasses change what is saved by overriding ``create_local_plan``, ``lookup_object`` or ``transform_object``, and
    who saves it by overriding ``_dedup_save_plans``. They may look at the class-level caches under
    ``_cached_plans_key``, and set that to keep their plans apart from those of others.
    """

    _plans_name: str | None = None

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        replica_mismatch: OnFinding | None = None,
    ) -> None:
        if dedup_replicated_tensors is not None:
            logger.warning("DefaultSavePlanner: dedup_replicated_tensors has no effect; copies are always written once")
        if replica_mismatch is not None:
            settings.check("replica_mismatch", replica_mismatch)
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self._enable_plan_caching = enable_plan_caching
        self.replica_mismatch = replica_mismatch
        self.state_dict: STATE_DICT_TYPE = {}
        self.mappings: dict[str, ObjectPath] = {}
        self.is_coordinator = False

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state."""
        if self.flatten_state_dict:
            flat = flatten(state_dict)
            self.state_dict, self.mappings = flat.values, flat.paths
        else:
            self.state_dict = dict(state_dict)
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One or more items per leaf; only a note of it if nothing changed since the last save."""
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        if self.flatten_state_dict:
            plan = replace(plan, planner_data=self.mappings)
        if len(self.peers) > 1 and self._on_mismatch() != "ignore":
            plan = self._with_fingerprints(plan)
        self.plan = plan
        return self._cache.announce(plan) if self._enable_plan_caching else plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Remove copies, describe the checkpoint and prove that it is complete."""
        if self._enable_plan_caching:
            self.global_plan, self.metadata = self._cache.plan_globally(all_plans, self._create_global_plan)
        else:
            self.global_plan, self.metadata = self._create_global_plan(all_plans)
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take this rank's part."""
        self.plan = self._cache.recall(new_plan) if self._enable_plan_caching else new_plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of an item, as ``lookup_object`` finds it and ``transform_object`` changes it."""
        found = self.lookup_object(write_item.index)
        transformed: torch.Tensor | io.BytesIO = self.transform_object(write_item, found)
        return transformed

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value or local tensor that ``index`` names."""
        return find_state_dict_object(self.state_dict, index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Tensors as they are, values in their stored form."""
        if write_item.type == WriteItemType.BYTE_IO:
            try:
                return io.BytesIO(encode_value(object))
            except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
                raise UnsupportedValueError(
                    f"'{write_item.index.fqn}' is a {type(object).__module__}.{type(object).__qualname__} that cannot "
                    f"be stored: {type(error).__name__}: {error!s:.300}. Leave it out, or turn it into plain values.",
                    key=write_item.index.fqn,
                ) from error
        return object

    def forget_cached_plans(self) -> None:
        """Called by the save flow when planning failed, so that the next save plans afresh on every rank."""
        self._cache.forget()

    @property
    def enable_plan_caching(self) -> bool:
        """Whether plans are remembered from save to save."""
        return self._enable_plan_caching

    @enable_plan_caching.setter
    def enable_plan_caching(self, enable: bool) -> None:
        self._enable_plan_caching = enable

    @property
    def _cached_plans_key(self) -> str:
        """Under which name plans are remembered: that of the class or the one that was set, and the ranks if any."""
        name = self._plans_name or type(self).__name__
        return name if self.peers == SavePlanner.peers else f"{name}@{','.join(map(str, self.peers))}"

    @_cached_plans_key.setter
    def _cached_plans_key(self, name: str) -> None:
        self._plans_name = name

    @property
    def _cache(self) -> plan_cache.PlanCache:
        return plan_cache.PlanCache(self._cached_plans_key)

    def _on_mismatch(self) -> OnFinding:
        return self.replica_mismatch or settings.current().replica_mismatch

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        settled = settle_differences(all_plans, self._on_mismatch())
        global_plan, metadata = create_default_global_save_plan(self._dedup_save_plans(settled))
        if self.flatten_state_dict:
            metadata.planner_data = merge_planner_data(global_plan)
        refuse_invalid_plan(global_plan, metadata)
        return global_plan, metadata

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        """Leave every item with one rank."""
        return dedup_save_plans(all_plans, self.dedup_save_to_lowest_rank)

    def _with_fingerprints(self, plan: SavePlan) -> SavePlan:
        """Add the digests of what other ranks may hold too, and the sizes of values on the way."""
        digests: dict[MetadataIndex, bytes] = {}
        items = []
        for item in plan.items:
            # A tensor that lists its items itself may name them differently from its key.
            if item.index.fqn in self.state_dict and may_be_replicated(self.state_dict[item.index.fqn]):
                print_ = fingerprint(find_state_dict_object(self.state_dict, item.index))
                digests[item.index] = print_.digest
                if item.type == WriteItemType.BYTE_IO:
                    item = replace(item, bytes_io_data=BytesIOWriteData(print_.nbytes))
            items.append(item)
        return replace(plan, items=items, replica_digests=digests)


def create_default_local_save_plan(state_dict: dict[str, Any], is_coordinator: bool) -> SavePlan:
    """What this rank could write of a flat state: its chunks of every tensor, and every value."""
    items: list[WriteItem] = []
    for fqn, value in state_dict.items():
        if not isinstance(fqn, str):
            raise InvalidPlanError(
                f"key {fqn!r} is a {type(fqn).__name__}; without flattening, keys must be strings",
                problems=[repr(fqn)],
            )
        items.extend(create_write_items(fqn, value))
    return SavePlan(items)
