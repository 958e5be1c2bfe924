"""Models: the state dict under names that do not depend on wrappers, loaded into the model's own memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from holdfast.formats.native.refs import ANYTHING, TensorRef
from holdfast.planning.materialize import is_meta, with_memory
from holdfast.states.contract import Adapter
from holdfast.states.destinations import fits, is_distributed
from holdfast.states.fsdp1_modules import contains_fsdp1, sharded_states
from holdfast.states.module_names import canonical_name
from holdfast.states.stateful import merged

_EXTRA_STATE = "_extra_state"


class ModuleAdapter(Adapter):
    """Saves and loads an ``nn.Module``, wrapped or not."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._raw_names: dict[str, str] = {}

    @property
    def from_first_rank(self) -> frozenset[str]:  # type: ignore[override]
        """Buffers of ``DistributedDataParallel``, which takes those of rank 0 before it uses them."""
        names = set()
        for prefix, part in self._module.named_modules(remove_duplicate=False):
            if isinstance(part, nn.parallel.DistributedDataParallel) and part.broadcast_buffers:
                for name, _ in part.named_buffers(prefix, remove_duplicate=False):
                    names.add(canonical_name(self._module, name))
        return frozenset(names)

    def saved(self) -> Any:
        return self._canonical_state()

    def template(self, stored: Any) -> Any:
        beside = stored if isinstance(stored, Mapping) else {}
        memory: dict[int, torch.Tensor] = {}
        return {name: _target(name, value, beside, memory) for name, value in self._canonical_state().items()}

    def apply(self, loaded: Any) -> None:
        given = {self._raw_names[name]: value for name, value in loaded.items() if value is not ANYTHING}
        with sharded_states(self._module):
            _load(self._module, given)

    def _canonical_state(self) -> dict[str, Any]:
        with sharded_states(self._module):
            raw = _state_dict(self._module)
        self._raw_names = {canonical_name(self._module, name): name for name in raw}
        return dict(zip(self._raw_names, raw.values(), strict=True))


def _target(name: str, value: Any, stored: Mapping[str, Any], memory: dict[int, torch.Tensor]) -> Any:
    found = stored.get(name)
    if name.rpartition(".")[2] == _EXTRA_STATE:
        return _extra_target(value, found)
    if isinstance(value, UninitializedTensorMixin):  # it gets its shape when it is loaded
        return ANYTHING
    if isinstance(value, torch.Tensor):
        if is_meta(value):
            # Tied parameters are one object here, and one piece of memory afterwards.
            if id(value) not in memory:
                memory[id(value)] = with_memory(name, value)
            return memory[id(value)]
        return value
    return value if found is None else merged(value, found)


def _extra_target(value: Any, stored: Any) -> Any:
    if isinstance(value, torch.Tensor) and is_distributed(value):
        return value
    if isinstance(stored, TensorRef) and fits(value, stored):
        return value.clone()  # the module decides in set_extra_state what becomes of it
    return ANYTHING


def _state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict, with one object for every tensor however many names it has."""
    if type(module).state_dict is not nn.Module.state_dict or contains_fsdp1(module):
        return dict(module.state_dict())
    detached: dict[int, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and not isinstance(value, UninitializedTensorMixin):
            state[name] = detached.setdefault(id(value), value.detach())
        else:
            state[name] = value
    return state


def _load(module: nn.Module, given: dict[str, Any]) -> None:
    """Give a model its state. Copying a tensor onto itself costs nothing, so what was read in place stays there."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        module.load_state_dict(given)
        return
    state: OrderedDict[str, Any] = OrderedDict(given)
    # Legacy conversions depend on versions of classes; these keys are those of the classes as they are now.
    state._metadata = _versions(module)  # type: ignore[attr-defined]
    live = {} if contains_fsdp1(module) else module.state_dict(keep_vars=True)
    bare = [name for name, value in live.items() if isinstance(value, torch.Tensor) and is_meta(value)]
    for name in bare:
        if name in given:
            _give_memory(live[name], given[name])
    if bare:
        state.update({name: live[name] for name in live if name in given and isinstance(live[name], torch.Tensor)})
    module.load_state_dict(state, strict=False, assign=bool(bare))


def _give_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Turn a meta tensor into a real one which is the same object, so that optimizers still know it."""
    if not is_meta(tensor):  # done already, under another name
        return
    if isinstance(tensor, nn.Parameter) and not isinstance(memory, nn.Parameter):
        memory = nn.Parameter(memory, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, memory)  # type: ignore[no-untyped-call]


def _versions(module: nn.Module) -> OrderedDict[str, dict[str, int]]:
    return OrderedDict(
        (name, {"version": part._version}) for name, part in module.named_modules(remove_duplicate=False)
    )
