"""Optimizer states without nesting, as DCP makes them with ``StateDictOptions(flatten_optimizer_state_dict=True)``.

Their keys are ``state.<parameter>.<key>`` and ``param_groups.<parameter>.<setting>``: each parameter is a group of its
own. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast._formats.native.refs import ANYTHING

_PARTS = ("state", "param_groups")


def is_flat(stored: Any) -> bool:
    """Whether all keys are of that kind.

    >>> is_flat({"state.layer.weight.exp_avg": 1, "param_groups.layer.weight.lr": 0.1})
    True
    """
    return isinstance(stored, Mapping) and bool(stored) and all(split_key(key) is not None for key in stored)


class FlatKeys:
    """The way from such a state to a nested one, and back."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self._places = {key: place for key in stored if (place := split_key(key)) is not None}
        names = dict.fromkeys(name for _, name, _ in self._places.values())
        self._groups = {name: index for index, name in enumerate(names)}

    def nested(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """As ``{"state": {name: {…}}, "param_groups": [{…, "params": [name]}]}``."""
        state: dict[str, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = [{"params": [name]} for name in self._groups]
        for key, value in flat.items():
            if key in self._places:
                part, name, last = self._places[key]
                into = state.setdefault(name, {}) if part == "state" else groups[self._groups[name]]
                into[last] = value
            else:  # what the checkpoint lacks
                state[key] = value
        return {"state": state, "param_groups": groups}

    def flattened(self, template: Mapping[str, Any]) -> dict[str, Any]:
        """A nested template, by the keys of the checkpoint. What the checkpoint lacks goes by its nested key."""
        flat: dict[str, Any] = {}
        for key, (part, name, last) in self._places.items():
            if part == "param_groups":
                flat[key] = ANYTHING
            elif name in template["state"]:
                entry = template["state"][name]
                flat[key] = ANYTHING if entry is ANYTHING else entry[last]
        stored = {name for part, name, _ in self._places.values() if part == "state"}
        lacking = [name for name in template["state"] if name not in stored]
        return flat | {f"state.{name}": template["state"][name] for name in lacking}


def split_key(key: Any) -> tuple[str, str, str] | None:
    """The part, the parameter and the last name of such a key; None if it is of another kind.

    >>> split_key("state.layer.weight.exp_avg")
    ('state', 'layer.weight', 'exp_avg')
    """
    if not isinstance(key, str):
        return None
    part, _, rest = key.partition(".")
    name, _, last = rest.rpartition(".")
    return (part, name, last) if part in _PARTS and name and last else None
