"""The state of models and optimizers with names instead of numbers: torch's own helpers, under the drop-in's name.

They turn modules and optimizers into dicts and back. No checkpoint is involved: they know the insides of torch's
parallel wrappers, change with them, and belong to torch. So a program that changes its import finds them here, and gets
the very objects of ``torch.distributed.checkpoint.state_dict``: those that the installed torch has. Nothing else in
Holdfast imports from there.

>>> import torch
>>> from holdfast.dcp.state_dict import get_model_state_dict
>>> list(get_model_state_dict(torch.nn.Linear(2, 3)))
['weight', 'bias']
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import state_dict as _torchs
from torch.distributed.checkpoint.state_dict import (
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    StateDictOptions,
    ValueType,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]


def __getattr__(name: str) -> Any:
    # The private helpers, which come and go with versions of torch.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_torchs, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torchs)})
