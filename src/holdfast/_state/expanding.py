"""A live state as plain nested containers: every model, optimizer or other live object replaced by what it saves."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast._compat.modules import is_flat_parameter
from holdfast._formats.native.refs import Slot
from holdfast._formats.native.values import Path, key_of
from holdfast._state.contract import DEEPEST, NEVER_LIVE, Adapter, Context
from holdfast._state.modules import ModuleAdapter
from holdfast._state.optimizers import OptimizerAdapter
from holdfast._state.parameter_names import contains_fsdp1
from holdfast._state.per_rank import PerRank
from holdfast._state.random_streams import RngAdapter, RngState
from holdfast._state.stateful import StatefulAdapter, is_stateful
from holdfast._state.unwrapping import bare_module, bare_optimizer
from holdfast.errors import UnsupportedStateError

__all__ = ["Adapter", "Context", "Path", "adapter_for", "is_live", "per_rank_of"]


# Which adapter fits a live object.


def is_live(value: Any) -> bool:
    """Whether a value speaks for itself, so that there is an adapter for it, or a reason why it cannot be stored.

    >>> is_live(torch.nn.Linear(1, 2)), is_live(3)
    (True, False)
    """
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer, RngState)) or is_stateful(value)


def adapter_for(value: Any, path: Path = (), context: Context | None = None) -> Adapter | None:
    """How to save and load a live object; None if the value is not one.

    >>> adapter_for(torch.nn.Linear(1, 2)).saved()["weight"].shape
    torch.Size([2, 1])
    >>> adapter_for(3) is None
    True
    """
    if isinstance(value, torch.nn.Module):
        return ModuleAdapter(bare_module(value))
    value = bare_optimizer(value)
    if isinstance(value, torch.optim.Optimizer):
        return _optimizer_adapter(value, path, context or Context())
    if isinstance(value, RngState):
        return RngAdapter(value)
    return StatefulAdapter(value) if is_stateful(value) else None


def _optimizer_adapter(optimizer: torch.optim.Optimizer, path: Path, context: Context) -> Adapter:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    model = context.module_of(parameters)
    if model is not None and contains_fsdp1(model):
        from holdfast._state.fsdp1_optimizers import Fsdp1OptimizerAdapter

        return Fsdp1OptimizerAdapter(optimizer, model)
    if any(is_flat_parameter(parameter) for parameter in parameters):
        raise UnsupportedStateError(
            f"'{'.'.join(map(str, path))}' is an optimizer of flat parameters, as FullyShardedDataParallel makes them, "
            "which mean nothing without their model. Put the model into the state beside its optimizer",
            kind=type(optimizer).__name__,
        )
    return OptimizerAdapter(optimizer, context)


def per_rank_of(value: Any) -> PerRank | None:
    """The value as per-rank state; None if it is none.

    >>> isinstance(per_rank_of(RngState()), PerRank)
    True
    """
    if isinstance(value, RngState):
        return value.as_per_rank()
    return value if isinstance(value, PerRank) else None


_MAPPINGS = frozenset({OrderedDict, defaultdict, Counter})
"""Those that can be stored, besides dicts."""


@dataclass
class Expanded:
    """A state without live objects."""

    tree: Any = None
    slots: dict[str, tuple[Path, Any]] = field(default_factory=dict)
    """The per-rank state, by name: where it is, and this rank's value. The tree has only the name there."""
    from_first_rank: set[Path] = field(default_factory=set)
    """Places of tensors whose copy on the first rank counts."""
    kinds: dict[Path, str] = field(default_factory=dict)
    """What is to be noted about live objects, by their places."""


def expand(state: Any) -> Expanded:
    """Replace all live objects of a state by what they save.

    >>> import torch
    >>> expand({"model": torch.nn.Linear(1, 1, bias=False), "step": 3}).tree
    {'model': {'weight': tensor(...)}, 'step': 3}
    """
    expander = _Expander(Context.of(state))
    expander.result.tree = expander.visit(state, ())
    return expander.result


class _Expander:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.result = Expanded()
        self._around: set[int] = set()
        """The containers that we are in."""

    def visit(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind in NEVER_LIVE:
            return value
        if id(value) in self._around or len(path) > DEEPEST:
            return value  # it contains itself, or is nested too deep: whoever stores it will say so
        self._around.add(id(value))
        expanded = self._visited(value, kind, path)
        self._around.discard(id(value))
        return expanded

    def _visited(self, value: Any, kind: Any, path: Path) -> Any:
        if kind is dict:
            return self._children(value, path)
        if kind is list or kind is tuple:
            return kind([self.visit(child, (*path, position)) for position, child in enumerate(value)])
        per_rank = per_rank_of(value)
        if per_rank is not None:
            return self._slot(per_rank.value, path)
        adapter = adapter_for(value, path, self.context)
        if adapter is not None:
            self.result.from_first_rank.update((*path, key) for key in adapter.from_first_rank)
            self._note(adapter, path)
            return self.visit(adapter.saved(), path)
        if kind in _MAPPINGS:
            return self._other_mapping(value, path)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return kind(*(self.visit(child, (*path, name)) for name, child in zip(kind._fields, value, strict=True)))
        return value

    def _note(self, adapter: Adapter, path: Path) -> None:
        if adapter.kind is not None:
            self.result.kinds[path] = adapter.kind

    def _children(self, mapping: Mapping[Any, Any], path: Path) -> dict[Any, Any]:
        visit = self.visit
        return {
            key: child if type(child) in NEVER_LIVE else visit(child, (*path, key)) for key, child in mapping.items()
        }

    def _other_mapping(self, mapping: Any, path: Path) -> Any:
        children = self._children(mapping, path)
        if all(children[key] is child for key, child in mapping.items()):
            return mapping
        rebuilt = copy.copy(mapping)
        for key, child in children.items():  # not `update`: a Counter would add up
            rebuilt[key] = child
        return rebuilt

    def _slot(self, value: Any, path: Path) -> Slot:
        inner = _Expander(self.context)
        adapter = adapter_for(value, path, self.context)
        tree = inner.visit(value if adapter is None else adapter.saved(), path)
        self.result.kinds.update(inner.result.kinds)
        if adapter is not None:
            self._note(adapter, path)
        name = key_of(path)
        if inner.result.slots:
            raise ValueError(f"'{name}' is per rank, and something in it is per rank again; wrap it once")
        while name in self.result.slots:  # two places can have one key, as ["a.b"] and ["a"]["b"]
            name += "#"
        self.result.slots[name] = (path, tree)
        return Slot(name)
