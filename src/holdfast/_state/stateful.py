"""Any object with ``state_dict`` and ``load_state_dict``: learning rate schedulers, data loaders, classes of users."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from holdfast._formats.native.refs import ANYTHING, TensorRef
from holdfast._state.contract import Adapter
from holdfast._state.destinations import fits, is_distributed, like, with_present


def is_stateful(value: Any) -> bool:
    """Whether it is an object, and not a class, with the two methods."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


class StatefulAdapter(Adapter):
    """Goes by what ``state_dict`` returns and trusts ``load_state_dict`` with whatever was stored."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def saved(self) -> Any:
        return self._target.state_dict()

    def template(self, stored: Any) -> Any:
        live = self._target.state_dict()
        return live if stored is None else merged(live, stored)

    def completed(self, loaded: Any) -> Any:
        return with_present(loaded, self.saved)

    def apply(self, loaded: Any) -> None:
        self._target.load_state_dict(loaded)


def merged(live: Any, stored: Any) -> Any:
    """The structure of what is stored, with the object's own tensors as destinations where they fit.

    Entries that only the live state has stay, so that they are found missing.
    """
    if isinstance(stored, TensorRef):
        return _destination(live, stored)
    if is_stateful(live):
        return live
    if isinstance(stored, dict):
        known = live if isinstance(live, Mapping) else {}
        template = copy.copy(stored)  # of the same class, with the same default
        for key in [*stored, *(key for key in known if key not in stored)]:  # not `update`: a Counter would add up
            template[key] = merged(known.get(key), stored[key]) if key in stored else known[key]
        return template
    if type(stored) in (list, tuple):
        beside = live if isinstance(live, (list, tuple)) and len(live) == len(stored) else [None] * len(stored)
        return type(stored)(merged(*pair) for pair in zip(beside, stored, strict=True))
    return ANYTHING


def _destination(live: Any, stored: TensorRef) -> Any:
    if not isinstance(live, torch.Tensor) or stored.numpy is not None:
        return ANYTHING
    if fits(live, stored):
        return live
    if is_distributed(live):  # the whole of it might be too much for one rank, so a wrong shape has to be seen
        return like(live, stored) if tuple(live.shape) == stored.shape else live
    return ANYTHING
