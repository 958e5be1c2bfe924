"""What other libraries wrap around models and optimizers, and how to get at what they wrap.

Wrappers are known by the names of their classes, so that nothing is imported that the program does not use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast._compat.modules import WRAPPERS
from holdfast.errors import UnsupportedStateError

_LIGHTNING = ("lightning.fabric", "lightning_fabric")
_LIGHTNING_TRAINERS = ("lightning.pytorch", "pytorch_lightning")

_OUTER_MODELS = {
    **{f"{package}.wrappers._FabricModule": "_forward_module" for package in _LIGHTNING},
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
}
"""Those that come around all others, and have methods of their own for saving and loading."""

_MODELS = {**WRAPPERS, **_OUTER_MODELS}

_OPTIMIZERS = {
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    **{f"{package}.wrappers._FabricOptimizer": "optimizer" for package in _LIGHTNING},
    **{f"{package}.core.optimizer.LightningOptimizer": "optimizer" for package in _LIGHTNING_TRAINERS},
}
"""They call the constructor of ``torch.optim.Optimizer`` not at all, and so lack what its methods need."""

COMPONENTS = frozenset(_MODELS.values())
"""What wrappers add to the names of parameters."""


def attribute_of_wrapped(cls: type[torch.nn.Module]) -> str | None:
    """By which name a wrapper of this class has what it wraps; None if it is not a class of wrappers of models."""
    return _attribute(cls, _MODELS)


def bare_module(module: torch.nn.Module) -> torch.nn.Module:
    """A model without the wrappers of trainers. Those of torch stay: they say how the model is spread over ranks."""
    while (attribute := _attribute(type(module), _OUTER_MODELS)) is not None:
        inside = getattr(module, attribute, None)
        if not isinstance(inside, torch.nn.Module) or inside is module:
            break
        module = inside
    return module


def bare_optimizer(value: Any) -> Any:
    """An optimizer without its wrappers; the value itself if it is not wrapped, or no optimizer at all.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)])
    >>> bare_optimizer(optimizer) is optimizer
    True
    """
    seen: set[int] = set()
    while isinstance(value, Optimizer) and id(value) not in seen:
        seen.add(id(value))
        inside = _inside(value)
        value = value if inside is None else inside
    return value


def _inside(value: Optimizer) -> Any:
    attribute = _attribute(type(value), _OPTIMIZERS)
    if attribute is not None:
        return getattr(value, attribute, None)
    if not was_constructed(value):
        # A wrapper that nobody has heard of. One with a state of its own is not to be taken off.
        inside = getattr(value, "optimizer", None)
        if isinstance(inside, Optimizer) and _shows_only(value, inside):
            return inside
    return None


def _shows_only(wrapper: Optimizer, inside: Optimizer) -> bool:
    """Whether a wrapper has nothing to save but what is in it."""
    return (
        getattr(wrapper, "state", None) is inside.state
        and getattr(wrapper, "param_groups", None) is inside.param_groups
        and set(wrapper.state_dict()) == set(inside.state_dict())
    )


def optimizers_in(state: Any, _around: tuple[int, ...] = ()) -> list[Optimizer]:
    """All optimizers among the values of a state, however nested, without their wrappers."""
    bare = bare_optimizer(state)
    if isinstance(bare, Optimizer):
        return [bare]
    if not isinstance(state, (Mapping, list, tuple)) or id(state) in _around:
        return []
    children = state.values() if isinstance(state, Mapping) else state
    return [found for value in children for found in optimizers_in(value, (*_around, id(state)))]


def was_constructed(optimizer: Optimizer) -> bool:
    """Whether the constructor of the base class was called, which makes what hooks and loads need."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def refuse_if_it_cannot_be_loaded(optimizer: Optimizer) -> None:
    """Raise for an optimizer whose ``load_state_dict`` would fail, while nothing has been changed."""
    if not was_constructed(optimizer) and type(optimizer).load_state_dict is Optimizer.load_state_dict:
        kind = type(optimizer).__qualname__
        raise UnsupportedStateError(
            f"{kind} is a subclass of torch.optim.Optimizer that does not call its constructor, and has no "
            "load_state_dict of its own, so that it cannot be loaded. Put the optimizer that it wraps into the state, "
            f"or call super().__init__ in {kind}",
            kind=kind,
        )


def refresh(wrapper: Any) -> None:
    """Have a wrapper take over what was loaded into what it wraps, if it keeps a copy of that."""
    if _attribute(type(wrapper), _OPTIMIZERS) is not None and callable(getattr(type(wrapper), "_refresh", None)):
        wrapper._refresh()


def _attribute(cls: type, known: Mapping[str, str]) -> str | None:
    for base in cls.__mro__:
        attribute = known.get(f"{base.__module__}.{base.__qualname__}")
        if attribute is not None:
            return attribute
    return None
