"""Optimizers of FSDP1, whose parameters are pieces of flat ones: torch translates to the parameters of the model.

Both directions of that translation are collective: all ranks save or load together.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from holdfast._compat.sharded_tensors import ShardedTensor, group_of_sharded
from holdfast._formats.dcp.metadata import TensorProperties
from holdfast._formats.native.refs import ANYTHING, TensorRef
from holdfast._formats.native.torch_elements import torch_dtype
from holdfast._layout.materialize import empty_row_shards
from holdfast._state.destinations import like, shape_of
from holdfast._state.optimizer_kinds import ComparedOptimizer, changed_settings
from holdfast._state.optimizer_matching import is_optimizer_state, match, take_settings, without_anything
from holdfast._state.parameter_names import canonical_name, sharded_states
from holdfast._state.stateful import merged
from holdfast._state.unwrapping import refuse_if_it_cannot_be_loaded


class Fsdp1OptimizerAdapter(ComparedOptimizer):
    """Saves and loads an optimizer of a model that ``FullyShardedDataParallel`` has flattened."""

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        super().__init__(optimizer)
        self._module = module
        self._live: Mapping[str, Any] = {}
        self._raw_names: dict[str, str] = {}

    def saved(self) -> Any:
        with sharded_states(self._module), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            raw = FullyShardedDataParallel.optim_state_dict(self._module, self._optimizer)
        groups = [{**group, "params": [self._name(name) for name in group["params"]]} for group in raw["param_groups"]]
        return {"state": {self._name(name): entry for name, entry in raw["state"].items()}, "param_groups": groups}

    def template(self, stored: Any) -> Any:
        refuse_if_it_cannot_be_loaded(self._optimizer)
        live = self.saved()
        if not is_optimizer_state(stored):
            return live
        names = [list(group["params"]) for group in live["param_groups"]]
        self._live, matched = live, match(names, stored["param_groups"])
        self.compare(stored, matched, is_flat=False)
        flat = [name for group in names for name in group]
        with sharded_states(self._module):
            examples = {canonical_name(self._module, key): value for key, value in self._module.state_dict().items()}
        state: dict[Any, Any] = {}
        for name, entry in stored["state"].items():
            if name in matched.parameters:
                example = examples[flat[matched.parameters[name]]]
                state[name] = {key: _destination(key, example, value) for key, value in entry.items()}
        found = set(matched.parameters.values())
        state.update({name: ANYTHING for number, name in enumerate(flat) if number not in found})
        return {
            **{key: merged(None, value) for key, value in stored.items()},
            "state": state,
            "param_groups": [dict.fromkeys(group, ANYTHING) for group in stored["param_groups"]],
        }

    def apply(self, loaded: Any) -> None:
        live, matched = self._live, self._match
        assert matched is not None, "a template comes first"
        flat = [self._raw_names[name] for group in live["param_groups"] for name in group["params"]]
        state = {
            self._raw_names[name]: entry for name, entry in live["state"].items() if name in loaded["state"]
        }  # of those that were not stored
        for name, entry in loaded["state"].items():
            if name in matched.parameters:
                state[flat[matched.parameters[name]]] = without_anything(entry)
        groups = take_settings(live["param_groups"], loaded["param_groups"], matched)
        self._changes = changed_settings(live["param_groups"], groups)
        for group in groups:
            group["params"] = [self._raw_names[name] for name in group["params"]]
        with sharded_states(self._module), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            flattened = FullyShardedDataParallel.optim_state_dict_to_load(
                self._module, self._optimizer, {"state": state, "param_groups": groups}
            )
        self._optimizer.load_state_dict(flattened)

    def _name(self, raw: str) -> str:
        name = canonical_name(self._module, raw)
        self._raw_names[name] = raw
        return name


def _destination(key: str, example: torch.Tensor, stored: Any) -> Any:
    if not isinstance(stored, TensorRef) or key == "step":
        return ANYTHING
    dtype = torch_dtype(stored.dtype)
    if dtype is None or stored.numpy is not None or (not stored.shape and shape_of(example)):
        return ANYTHING
    if isinstance(example, ShardedTensor):
        group: dist.ProcessGroup = group_of_sharded(example)
        return empty_row_shards(example.size(), TensorProperties(dtype=dtype), group)
    return like(example, stored)
