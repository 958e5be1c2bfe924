"""The state of models and optimizers with names instead of numbers: torch's own helpers, under the drop-in's name.

They turn modules and optimizers into dicts and back. No checkpoint is involved: they know the insides of torch's
parallel wrappers, change with them, and belong to torch. So a program that changes its import finds them here, and gets
the very objects of ``torch.distributed.checkpoint.state_dict``. Nothing else in Holdfast imports from there.

>>> import torch
>>> from holdfast.dcp.state_dict import get_model_state_dict
>>> list(get_model_state_dict(torch.nn.Linear(2, 3)))
['weight', 'bias']
"""

from __future__ import annotations

from torch.distributed.checkpoint.state_dict import (
    _EXTRA_STATE,
    _FLAT_PARAM,
    _PARAMS,
    _PG,
    _STATE,
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    StateDictOptions,
    ValueType,
    _flatten_optim_state_dict,
    _gc_context,
    _get_fqns,
    _get_fsdp_process_group,
    _get_model_state_dict,
    _get_optim_state_dict,
    _init_optim_state,
    _iterate_valid_model_state,
    _load_model_state_dict,
    _load_optim_state_dict,
    _maybe_full_or_cpu_state_dict,
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
    _split_optim_state_dict,
    _state_dict_fn,
    _StateDictInfo,
    _unflatten_model_state_dict,
    _unflatten_optim_state_dict,
    _verify_options,
    _verify_state_dict,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "FQNS_T",
    "_EXTRA_STATE",
    "_FLAT_PARAM",
    "_PARAMS",
    "_PG",
    "_STATE",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "_StateDictInfo",
    "_flatten_optim_state_dict",
    "_gc_context",
    "_get_fqns",
    "_get_fsdp_process_group",
    "_get_model_state_dict",
    "_get_optim_state_dict",
    "_init_optim_state",
    "_iterate_valid_model_state",
    "_load_model_state_dict",
    "_load_optim_state_dict",
    "_maybe_full_or_cpu_state_dict",
    "_patch_model_state_dict",
    "_patch_optimizer_state_dict",
    "_split_optim_state_dict",
    "_state_dict_fn",
    "_unflatten_model_state_dict",
    "_unflatten_optim_state_dict",
    "_verify_options",
    "_verify_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
