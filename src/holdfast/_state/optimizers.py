"""Optimizers: their state by the names of the parameters, and nothing of it ever invented."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast._compat.modules import has_loading_hooks
from holdfast._formats.native.refs import ANYTHING, TensorRef
from holdfast._formats.native.torch_elements import torch_dtype
from holdfast._state.contract import Context
from holdfast._state.destinations import fits, like, shape_of, with_present
from holdfast._state.flat_optimizer_states import FlatKeys, is_flat
from holdfast._state.optimizer_kinds import ComparedOptimizer, changed_settings
from holdfast._state.optimizer_matching import (
    Name,
    is_optimizer_state,
    match,
    refuse_state_without_group,
    take_settings,
    without_anything,
)
from holdfast._state.parameter_names import strip_wrapper_names
from holdfast._state.stateful import StatefulAdapter, merged
from holdfast._state.unwrapping import refuse_if_it_cannot_be_loaded, was_constructed

# Loading an optimizer without what torch does on the way: it turns moments into the element type of their parameters.
#
# Moments and master weights have their own types on purpose. So what torch would turn is put back afterwards; and
# where nobody looks at it in between, torch does not get to see it, which spares the memory for a second copy.


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


# Stored is ``{"state": {name: {…}}, "param_groups": [{…, "params": [names]}]}``. Whatever is not there when an
# optimizer is saved is not there after a load either; no step is taken to make it.


_SHAPED_LIKE_PARAMETERS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "ax", "prev", "step_size"}
)
"""What torch's optimizers keep per element of a parameter. If the shape of one of these is another, it is a mistake."""


class OptimizerAdapter(ComparedOptimizer):
    """Saves and loads a ``torch.optim.Optimizer``."""

    def __init__(self, optimizer: Optimizer, context: Context) -> None:
        super().__init__(optimizer)
        self._context = context
        self._flat_keys: FlatKeys | None = None
        self._stored: Mapping[str, Any] = {}

    def saved(self) -> Any:
        raw = self._optimizer.state_dict()
        if not _has_usual_shape(raw, self._optimizer):
            return raw
        names = self._names()
        by_number = dict(zip(_flat_params(raw), _flat(names), strict=True))
        groups = [
            {**{key: value for key, value in group.items() if key != "param_names"}, "params": list(group_names)}
            for group, group_names in zip(raw["param_groups"], names, strict=True)
        ]
        state = {by_number.get(number, number): entry for number, entry in raw["state"].items()}
        return {**raw, "state": state, "param_groups": groups}

    def template(self, stored: Any) -> Any:
        refuse_if_it_cannot_be_loaded(self._optimizer)
        raw = self._optimizer.state_dict()
        if not _has_usual_shape(raw, self._optimizer):
            return StatefulAdapter(self._optimizer).template(stored)
        if is_flat(stored):
            self._flat_keys = FlatKeys(stored)
            return self._flat_keys.flattened(self.template(self._flat_keys.nested(stored)))
        if isinstance(stored, Mapping) and "param_groups" in stored:
            stored = {"state": {}, **stored}  # DCP keeps nothing of an empty dict
        if not is_optimizer_state(stored):
            return self.saved()
        self._stored = stored
        names = self._names()
        self.compare(stored, match(names, stored["param_groups"]), is_flat=self._flat_keys is not None)
        template = {key: merged(raw.get(key), value) for key, value in stored.items()}
        template["state"] = self._state_template(raw, stored, _flat(names))
        template["param_groups"] = [dict.fromkeys(group, ANYTHING) for group in stored["param_groups"]]
        return template

    def _state_template(self, raw: Mapping[str, Any], stored: Mapping[str, Any], names: list[Name]) -> dict[Any, Any]:
        assert self._match is not None
        parameters = self._parameters()
        live = dict(enumerate(raw["state"].get(number, {}) for number in _flat_params(raw)))
        known = {name for group in stored["param_groups"] for name in group["params"]}
        template: dict[Any, Any] = {}
        refuse_state_without_group(stored["state"], known, names)
        for key, entry in stored["state"].items():
            name = _parameter_name(key, known)
            if name in self._match.parameters:
                number = self._match.parameters[name]
                template[key] = _entry_template(parameters[number], live[number], entry)
            elif name not in known:  # not of a parameter at all
                template[key] = ANYTHING
        found = set(self._match.parameters.values())
        template.update({name: ANYTHING for number, name in enumerate(names) if number not in found})
        return template

    def completed(self, loaded: Any) -> Any:
        if not isinstance(loaded, Mapping) or "state" not in loaded:
            return loaded
        # Settings that were not loaded stay open until `apply`: the groups may be in another order there.
        return {**loaded, "state": with_present(loaded["state"], lambda: self.saved().get("state"))}

    def apply(self, loaded: Any) -> None:
        if self._match is None:
            self._optimizer.load_state_dict(loaded)
            return
        if self._flat_keys is not None:
            loaded = self._flat_keys.nested(loaded)
        raw = self._optimizer.state_dict()
        numbers = _flat_params(raw)
        known = {name for group in self._stored["param_groups"] for name in group["params"]}
        state: dict[Any, Any] = {}
        for key, entry in loaded["state"].items():
            name = _parameter_name(key, known)
            if name in self._match.parameters:
                state[numbers[self._match.parameters[name]]] = without_anything(entry)
            elif key in self._stored["state"] and entry is not ANYTHING:
                state[key] = entry
        found = set(self._match.parameters.values())
        state.update({n: raw["state"][n] for i, n in enumerate(numbers) if i not in found and n in raw["state"]})
        groups = take_settings(raw["param_groups"], loaded["param_groups"], self._match)
        others = {key: value for key, value in loaded.items() if key not in ("state", "param_groups")}
        parameters = dict(zip(numbers, self._parameters(), strict=True))
        given = stand_ins(self._optimizer, parameters, state)
        self._changes = changed_settings(raw["param_groups"], groups)
        self._optimizer.load_state_dict(
            {**others, "state": given, "param_groups": quick_groups(self._optimizer, groups)}
        )
        for number, parameter in parameters.items():
            put_back(self._optimizer.state.get(parameter), state.get(number, {}))

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _names(self) -> list[list[Name]]:
        """What the parameters are called, group by group."""
        in_models = iter(self._context.names_of(self._parameters()))
        number = 0
        names: list[list[Name]] = []
        for group in self._optimizer.param_groups:
            own = group.get("param_names") or [None] * len(group["params"])
            names.append([])
            for name in own:
                found = next(in_models) or (None if name is None else strip_wrapper_names(name))
                names[-1].append(number if found is None else found)
                number += 1
        if len(set(_flat(names))) == number:
            return names
        numbers = iter(range(number))
        return [[next(numbers) for _ in group] for group in names]


def _has_usual_shape(raw: Any, optimizer: Optimizer) -> bool:
    """Whether a state dict is made like those of ``torch.optim``, with numbers for the parameters."""
    if not is_optimizer_state(raw) or len(raw["param_groups"]) != len(optimizer.param_groups):
        return False
    numbers = _flat_params(raw)
    return len(set(numbers)) == len(numbers) and all(
        len(group["params"]) == len(live["params"])
        for group, live in zip(raw["param_groups"], optimizer.param_groups, strict=True)
    )


def _entry_template(parameter: torch.Tensor, live: Mapping[str, Any], stored: Any) -> Any:
    if not isinstance(stored, Mapping):
        return ANYTHING
    return {key: _destination(key, parameter, live.get(key), value) for key, value in stored.items()}


def _destination(key: str, parameter: torch.Tensor, live: Any, stored: Any) -> Any:
    if not isinstance(stored, TensorRef):
        return merged(live, stored)
    if fits(live, stored):
        return live
    if key == "step" or stored.numpy is not None or torch_dtype(stored.dtype) is None:
        return ANYTHING  # where counters live is for torch to decide
    if shape_of(parameter) == tuple(stored.shape) or key in _SHAPED_LIKE_PARAMETERS:
        return like(parameter, stored)
    return ANYTHING


def _parameter_name(key: Any, known: set[Name]) -> Any:
    """The name of the parameter that a stored entry is of. DCP turns numbers into texts, but only in keys."""
    if key not in known and isinstance(key, str) and key.isdecimal() and int(key) in known:
        return int(key)
    return key


def _flat_params(raw: Mapping[str, Any]) -> list[Any]:
    return [number for group in raw["param_groups"] for number in group["params"]]


def _flat(names: list[list[Name]]) -> list[Name]:
    return [name for group in names for name in group]
