"""Walking through nested state."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from holdfast._base.nested import (
    ObjectPath,
    PathItem,
    get_element,
    set_element,
    traverse_state_dict,
    traverse_state_dict_v_2_3,
)
from holdfast._base.nested import is_tensor as _keep_visiting_tensors

__all__ = [
    "CONTAINER_TYPE",
    "OBJ_PATH",
    "PATH_ITEM",
    "_keep_visiting_tensors",
    "get_element",
    "print_tensor",
    "set_element",
    "traverse_state_dict",
    "traverse_state_dict_v_2_3",
]

OBJ_PATH = ObjectPath
PATH_ITEM = PathItem
CONTAINER_TYPE = Mapping[Any, Any] | list[Any]


def print_tensor(path: ObjectPath, value: Any, print_fun: Callable[[str], Any] = print) -> None:
    """Print one leaf: its path and, for a tensor, its shape and dtype. Use it as a visitor.

    >>> traverse_state_dict({"layer": {"weight": torch.ones(2, 3)}, "step": 7}, print_tensor)
    ['layer']['weight']: Tensor (2, 3) torch.float32
    ['step']: int
    """
    name = "".join(f"[{item!r}]" for item in path)
    if isinstance(value, torch.Tensor):
        print_fun(f"{name}: {type(value).__name__} {tuple(value.shape)} {value.dtype}")
    elif isinstance(value, Collection) and not isinstance(value, (str, bytes)):
        print_fun(f"{name}: {type(value).__name__} of {len(value)}")
    else:
        print_fun(f"{name}: {type(value).__name__}")
