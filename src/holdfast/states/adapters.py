"""Which adapter fits a live object."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.compat.modules import is_flat_parameter
from holdfast.errors import UnsupportedStateError
from holdfast.formats.native.values import Path
from holdfast.states.context import Context
from holdfast.states.contract import Adapter
from holdfast.states.fsdp1_modules import contains_fsdp1
from holdfast.states.modules import ModuleAdapter
from holdfast.states.optimizers import OptimizerAdapter
from holdfast.states.per_rank import PerRank
from holdfast.states.rng import RngAdapter, RngState
from holdfast.states.stateful import StatefulAdapter, is_stateful
from holdfast.states.unwrapping import bare_module, bare_optimizer

__all__ = ["Adapter", "Context", "Path", "adapter_for", "is_live", "per_rank_of"]


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
        from holdfast.states.fsdp1_optimizers import Fsdp1OptimizerAdapter

        return Fsdp1OptimizerAdapter(optimizer, model)
    if any(is_flat_parameter(parameter) for parameter in parameters):
        raise UnsupportedStateError(
            f"'{'.'.join(map(str, path))}' is an optimizer of flat parameters, as FullyShardedDataParallel makes them, "
            "which mean nothing without their model. Put the model into the state beside its optimizer",
            kind=type(optimizer).__name__,
        )
    return OptimizerAdapter(optimizer, context)


def per_rank_of(value: Any) -> PerRank | None:
    """The value as a state that every rank has its own of; None if it is none.

    >>> isinstance(per_rank_of(RngState()), PerRank)
    True
    """
    if isinstance(value, RngState):
        return value.as_per_rank()
    return value if isinstance(value, PerRank) else None
