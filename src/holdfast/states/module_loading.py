"""Giving a model what was loaded, with all that it wants to do about it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from holdfast.compat.modules import loading_code_of, version_of
from holdfast.planning.materialize import is_meta
from holdfast.states.fsdp1_modules import contains_fsdp1


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
