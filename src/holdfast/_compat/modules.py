"""The private names of modules and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""The classes of torch that wrap a model, and by which name they have it."""


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The modules directly inside a module by name. Those of scripted modules have no ``get``."""
    return module._modules


def loading_code_of(module: nn.Module) -> Iterable[Callable[..., Any]]:
    """The methods and hooks that see a state when it is loaded."""
    yield type(module).load_state_dict
    yield type(module)._load_from_state_dict
    yield from module._load_state_dict_pre_hooks.values()
    yield from module._load_state_dict_post_hooks.values()


def version_of(module: nn.Module) -> int:
    """Which version of its class's state a module has."""
    return module._version


def has_loading_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks see what an optimizer loads."""
    return bool(optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks)


def is_flat_parameter(parameter: Any) -> bool:
    """Whether FSDP1 made the parameter by joining others."""
    return bool(getattr(parameter, "_is_flat_param", False))
