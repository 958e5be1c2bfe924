"""Classes and functions that the user has declared safe through ``torch.serialization.add_safe_globals``."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.formats.dcp.known_names import Known


def find_registered(module: str, name: str) -> Known | None:
    """The entry for something the user declared safe; None for everything else."""
    wanted = f"{module}.{name}"
    for entry in torch.serialization.get_safe_globals():
        value, full_name = entry if isinstance(entry, tuple) else (entry, _full_name(entry))
        if full_name == wanted:
            return known_class(value) if isinstance(value, type) else Known(value, call=value)
    return None


def known_class(cls: type) -> Known:
    """An entry that makes objects of ``cls`` the way pickle does."""

    def new(*arguments: Any, **keywords: Any) -> Any:
        return cls.__new__(cls, *arguments, **keywords)

    return Known(cls, call=cls, new=new, build=_set_state)


def _full_name(value: Any) -> str:
    return f"{value.__module__}.{getattr(value, '__qualname__', None) or value.__name__}"


def _set_state(target: Any, state: Any) -> Any:
    # Only reached for objects whose class is registered, never for the class itself: its type is `type`.
    own = getattr(target, "__setstate__", None)
    if own is not None:
        own(state)
        return target
    in_dict, in_slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if in_dict:
        vars(target).update(_named(in_dict))
    for name, value in _named(in_slots or {}).items():
        object.__setattr__(target, name, value)
    return target


def _named(attributes: Any) -> dict[str, Any]:
    if type(attributes) is not dict or any(type(name) is not str or name.startswith("__") for name in attributes):
        raise TypeError("a state that is not a dictionary of attributes")
    return attributes
