"""What the parameters of a model are called, whatever the model is wrapped in."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from holdfast._compat.modules import children_of
from holdfast._state.unwrapping import COMPONENTS, attribute_of_wrapped

# Models of FSDP1, spoken of by the parameters that they were made of.


def contains_fsdp1(module: nn.Module) -> bool:
    """Whether parameters are in the flat ones of ``FullyShardedDataParallel``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in module.modules())


@contextmanager
def sharded_states(module: nn.Module) -> Iterator[None]:
    """Have FSDP1 speak of its parameters by their own names, each rank of its part."""
    if not contains_fsdp1(module):
        yield
        return
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedOptimStateDictConfig, StateDictType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that FSDP1 is to go some day
        with FullyShardedDataParallel.state_dict_type(
            module, StateDictType.SHARDED_STATE_DICT, optim_state_dict_config=ShardedOptimStateDictConfig()
        ):
            yield


# Data parallelism, ``torch.compile`` and activation checkpointing put a model into another one, and so lengthen the
# names of everything inside. A checkpoint should not depend on that.


def strip_wrapper_names(key: str) -> str:
    """Leave out all parts of a key that wrappers are known to add.

    It goes by names alone, since checkpoints of other programs say nothing of their models, and is for comparing keys
    that differ otherwise.

    >>> strip_wrapper_names("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    *parents, last = key.split(".")
    return ".".join([*(part for part in parents if part not in COMPONENTS), last])


def canonical_name(root: torch.nn.Module, name: str) -> str:
    """The name of something in a model (a parameter, a key of its state dict) without the wrappers on the way to it.

    A child that merely has the name a wrapper would give it stays:

    >>> model = torch.nn.ModuleDict({"module": torch.nn.Linear(1, 1)})
    >>> canonical_name(torch.nn.DataParallel(model), "module.module.bias")
    'module.bias'
    """
    parts = name.split(".")
    kept: list[str] = []
    module = root
    for number, part in enumerate(parts):
        # Some wrappers leave themselves out of the names in state dicts. Those are passed through all the same.
        while (inside := wrapped_module(module)) is not None and part != wrapper_attribute(type(module)):
            module = inside
        if inside is not None:
            module = inside
            continue
        child = _child(module, part)
        if child is None:
            return ".".join(kept + parts[number:])
        kept.append(part)
        module = child
    return ".".join(kept)


def canonical_names(root: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """The canonical names of many things; those that would have the same one keep their own."""
    if not any(map(wrapper_attribute, {type(part) for part in root.modules()})):
        return list(names)
    pairs = [(name, canonical_name(root, name)) for name in names]
    count = Counter(short for _, short in pairs)
    return [short if count[short] == 1 else name for name, short in pairs]


def wrapped_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """What is in a wrapper; None if the module is none."""
    attribute = wrapper_attribute(type(module))
    return None if attribute is None else _child(module, attribute)


def _child(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    children = children_of(module)
    return children[name] if name in children else None  # noqa: SIM401 - those of scripted modules have no `get`


def wrapper_attribute(cls: type[torch.nn.Module]) -> str | None:
    """By which name a wrapper of this class has what it wraps; None if it is not a class of wrappers."""
    if cls not in _seen:
        _seen[cls] = attribute_of_wrapped(cls)
    return _seen[cls]


_seen: WeakKeyDictionary[type[torch.nn.Module], str | None] = WeakKeyDictionary()


def parameter_names(module: torch.nn.Module) -> dict[int, str]:
    """The canonical name of every parameter, by the parameter's identity. Of several names, the first one."""
    reshard(module)
    parameters = list(module.named_parameters(remove_duplicate=False))
    names: dict[int, str] = {}
    for (_, parameter), name in zip(parameters, canonical_names(module, [name for name, _ in parameters]), strict=True):
        names.setdefault(id(parameter), name)
    return names


def reshard(module: torch.nn.Module) -> None:
    """Have FSDP2 put the shards back in place of gathered parameters: they are what optimizers know."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()
