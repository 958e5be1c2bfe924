"""What the parameters of a model are called, whatever the model is wrapped in.

Data parallelism, ``torch.compile`` and activation checkpointing put a model into another one, and so lengthen the
names of everything inside. A checkpoint should not depend on that.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from holdfast.compat.modules import children_of


class _Wrapper(NamedTuple):
    module: str
    name: str
    attribute: str
    """Where the wrapped model is."""


_WRAPPERS = (
    _Wrapper("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    _Wrapper("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    _Wrapper("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    _Wrapper(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"
    ),
    _Wrapper("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
)
_COMPONENTS = frozenset(wrapper.attribute for wrapper in _WRAPPERS)


def strip_wrapper_names(key: str) -> str:
    """Leave out all parts of a key that wrappers are known to add.

    It goes by names alone, since checkpoints of other programs say nothing of their models, and is for comparing keys
    that differ otherwise.

    >>> strip_wrapper_names("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    *parents, last = key.split(".")
    return ".".join([*(part for part in parents if part not in _COMPONENTS), last])


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
        _seen[cls] = _look_up(cls)
    return _seen[cls]


_seen: WeakKeyDictionary[type[torch.nn.Module], str | None] = WeakKeyDictionary()


def _look_up(cls: type[torch.nn.Module]) -> str | None:
    for wrapper in _WRAPPERS:
        # If nobody has imported it so far, nothing can be an instance of it.
        known = getattr(sys.modules.get(wrapper.module), wrapper.name, None)
        if known is not None and issubclass(cls, known):
            return wrapper.attribute
    return None


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
