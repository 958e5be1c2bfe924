"""Loading an optimizer without what torch does on the way: it turns moments into the element type of their parameters.

Moments and master weights have their own types on purpose. So what torch would turn is put back afterwards; and where
nobody looks at it in between, torch does not get to see it, which spares the memory for a second copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.compat.modules import has_loading_hooks
from holdfast.states.unwrapping import was_constructed


def stand_ins(optimizer: Optimizer, parameters: Mapping[Any, torch.Tensor], state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state to give to ``load_state_dict``, by number: empty tensors in place of those that it would copy."""
    if _somebody_looks(optimizer):
        return dict(state)
    return {
        number: _stand_in(entry, parameters[number]) if number in parameters else entry
        for number, entry in state.items()
    }


def quick_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups in which torch finds a parameter at once. It searches them for every value that it loads."""
    if _somebody_looks(optimizer):
        return groups
    return [{**group, "params": _as_range(group["params"])} for group in groups]


def _as_range(numbers: list[Any]) -> Any:
    consecutive = range(numbers[0], numbers[0] + len(numbers)) if numbers and type(numbers[0]) is int else range(0)
    return consecutive if list(consecutive) == numbers else numbers


def _somebody_looks(optimizer: Optimizer) -> bool:
    """Whether code that is not of torch sees what is loaded."""
    if not was_constructed(optimizer):
        return True
    methods = (type(optimizer).load_state_dict, type(optimizer).__setstate__)
    return has_loading_hooks(optimizer) or any(method.__module__.partition(".")[0] != "torch" for method in methods)


def _stand_in(entry: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    given = dict(entry)
    for key, value in entry.items():
        if _is_mistaken(value):
            given[key] = None
        elif key != "step" and _would_be_copied(value, parameter):
            given[key] = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return given


def _would_be_copied(value: Any, parameter: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and parameter.is_floating_point()
        and value.dtype != parameter.dtype
    )


def _is_mistaken(value: Any) -> bool:
    """Whether torch would take it for a collection of values and fail to build it again: texts, numpy arrays."""
    return isinstance(value, Iterable) and not isinstance(value, (torch.Tensor, Mapping, list, tuple))


def put_back(theirs: Any, ours: Mapping[str, Any]) -> None:
    """Replace what became of a parameter's state by what it was, where torch changed its type."""
    if not isinstance(theirs, dict) or not isinstance(ours, Mapping):
        return
    for key, value in ours.items():
        if key in theirs and key != "step":  # torch knows best where and as what it counts
            theirs[key] = _original(value, theirs[key])


def _original(ours: Any, theirs: Any) -> Any:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        changed = ours.dtype != theirs.dtype or ours.shape != theirs.shape
        return ours.to(theirs.device) if changed else theirs
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {key: _original(ours[key], value) if key in ours else value for key, value in theirs.items()}
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [_original(*pair) for pair in zip(ours, theirs, strict=True)]
    return ours if _is_mistaken(ours) else theirs
