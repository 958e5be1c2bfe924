"""Models: the state dict under names that do not depend on wrappers, loaded into the model's own memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from holdfast._compat.modules import loading_code_of, version_of
from holdfast._formats.native.refs import ANYTHING
from holdfast._layout.materialize import is_meta, with_memory
from holdfast._layout.tensor_kinds import is_partitioned
from holdfast._state.contract import Adapter
from holdfast._state.destinations import is_distributed
from holdfast._state.parameter_names import canonical_name, canonical_names, contains_fsdp1, sharded_states
from holdfast._state.stateful import merged

# Giving a model what was loaded, with all that it wants to do about it.


def heeds_loading(module: nn.Module) -> bool:
    """Whether a model has code of its own for loading, so that filling its memory is not all.

    What torch's own modules and wrappers do then (converting states of old versions, looking for parameters that were
    replaced) has no meaning for memory that was filled. ``load_state_dict`` is not called just for that, because it
    takes time with the square of the number of layers.
    """
    return any(not all(map(_is_of_torch, loading_code_of(part))) for part in module.modules())


def _is_of_torch(code: Any) -> bool:
    code = getattr(code, "hook", code)  # torch wraps some hooks
    return str(getattr(code, "__module__", "")).partition(".")[0] == "torch"


def load_module(module: nn.Module, given: dict[str, Any]) -> list[str]:
    """Give a model its state. Copying a tensor onto itself costs nothing, so what was read in place stays there.

    Returns the names of parameters that had no memory and had to be replaced.
    """
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        module.load_state_dict(given)
        return []
    state: OrderedDict[str, Any] = OrderedDict(given)
    # Legacy conversions depend on versions of classes; these keys are those of the classes as they are now.
    state._metadata = _versions(module)  # type: ignore[attr-defined]
    live = {} if contains_fsdp1(module) else module.state_dict(keep_vars=True)
    bare = [name for name, value in live.items() if isinstance(value, torch.Tensor) and is_meta(value)]
    replaced = [name for name in bare if name in given and not _give_memory(live[name], given[name])]
    if bare:  # tensors are assigned, so those that are in their place have to be given as what they are
        kept = [
            name for name in live if name in given and isinstance(live[name], torch.Tensor) and name not in replaced
        ]
        state.update({name: live[name] for name in kept})
    module.load_state_dict(state, strict=False, assign=bool(bare))
    return replaced


def _give_memory(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Turn a meta tensor into a real one which is the same object, so that optimizers still know it."""
    if not is_meta(tensor):  # done already, under another name
        return True
    if isinstance(tensor, nn.Parameter) and not isinstance(memory, nn.Parameter):
        memory = nn.Parameter(memory, tensor.requires_grad)
    try:
        torch.utils.swap_tensors(tensor, memory)  # type: ignore[no-untyped-call]
    except RuntimeError:  # somebody holds on to it in a way that forbids this, with a weak reference for example
        return False
    return True


def _versions(module: nn.Module) -> OrderedDict[str, dict[str, int]]:
    return OrderedDict(
        (name, {"version": version_of(part)}) for name, part in module.named_modules(remove_duplicate=False)
    )


_EXTRA_STATE = "_extra_state"


class ModuleAdapter(Adapter):
    """Saves and loads an ``nn.Module``, wrapped or not."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._raw_names: dict[str, str] = {}
        self._own: dict[str, torch.Tensor] = {}
        self._in_place: dict[str, torch.Tensor] = {}
        self._notes: list[str] = []

    @property
    def from_first_rank(self) -> frozenset[str]:
        """Buffers of ``DistributedDataParallel``, which takes those of rank 0 before it uses them."""
        names = set()
        for prefix, part in self._module.named_modules(remove_duplicate=False):
            if isinstance(part, nn.parallel.DistributedDataParallel) and part.broadcast_buffers:
                own = f"{prefix}.module." if prefix else "module."
                ignored = {own + name for name in part.parameters_to_ignore}
                for name, _ in part.named_buffers(prefix, remove_duplicate=False):
                    if name not in ignored:
                        names.add(canonical_name(self._module, name))
        return frozenset(names)

    def saved(self) -> Any:
        return self._canonical_state()

    def template(self, stored: Any) -> Any:
        beside = stored if isinstance(stored, Mapping) else {}
        memory: dict[int, torch.Tensor] = {}
        template = {name: _target(name, value, beside, memory) for name, value in self._canonical_state().items()}
        own = {name: self._own[raw] for name, raw in self._raw_names.items() if raw in self._own}
        self._in_place = {name: tensor for name, tensor in own.items() if template[name] is tensor}
        return template

    def apply(self, loaded: Any) -> None:
        stored = {name: value for name, value in loaded.items() if value is not ANYTHING}
        if self._is_in_place(stored) and not heeds_loading(self._module):
            return
        with sharded_states(self._module):
            replaced = load_module(self._module, {self._raw_names[name]: value for name, value in stored.items()})
        if replaced:
            self._notes.append(
                f"{len(replaced)} parameters on the meta device, such as '{replaced[0]}', became new objects; "
                "optimizers that were made before do not know them"
            )

    def _is_in_place(self, stored: Mapping[str, Any]) -> bool:
        return all(name in self._in_place and value is self._in_place[name] for name, value in stored.items())

    def notes(self) -> list[str]:
        return list(self._notes)

    def _canonical_state(self) -> dict[str, Any]:
        with sharded_states(self._module):
            raw, self._own = _state_dict(self._module)
        self._raw_names = dict(zip(canonical_names(self._module, raw), raw, strict=True))
        return dict(zip(self._raw_names, raw.values(), strict=True))


def _target(name: str, value: Any, stored: Mapping[str, Any], memory: dict[int, torch.Tensor]) -> Any:
    found = stored.get(name)
    if name.rpartition(".")[2] == _EXTRA_STATE:
        return value if isinstance(value, torch.Tensor) and is_distributed(value) else ANYTHING
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


def _state_dict(module: nn.Module) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The state dict, and the part of it which is the memory of the model itself, and no copy.

    There is one object for every tensor, however many names it has.
    """
    if type(module).state_dict is not nn.Module.state_dict or contains_fsdp1(module):
        given = dict(module.state_dict())
        # Torch gives what shares the memory of a parameter, without the marks that others have left on it.
        marked = {name: value for name, value in module.named_parameters() if name in given and is_partitioned(value)}
        return {**given, **marked}, {}
    with_grad = module.state_dict(keep_vars=True)
    members = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    detached: dict[int, torch.Tensor] = {}
    state: dict[str, Any] = {}
    own: dict[str, torch.Tensor] = {}
    for name, value in with_grad.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, UninitializedTensorMixin):
            state[name] = value
            continue
        if id(value) not in detached:
            detached[id(value)] = value if is_partitioned(value) else value.detach()
        state[name] = detached[id(value)]
        if id(value) in members:
            own[name] = state[name]
    return state, own
