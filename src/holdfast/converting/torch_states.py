"""What the targets that torch reads have in common: stand-ins for tensors, and what neither of them can hold."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from holdfast.converting.outgoing import Outgoing, OutTensor
from holdfast.converting.target import refuse_values
from holdfast.errors import UnsupportedValueError
from holdfast.formats.native.keys import readable
from holdfast.formats.native.refs import PickledValue, UndeclaredValue, UnknownValue
from holdfast.formats.native.torch_elements import torch_dtype
from holdfast.formats.native.trees import children_of

Path = tuple[Any, ...]

UNPICKLABLE = (TypeError, AttributeError, RecursionError, pickle.PicklingError)
"""How pickle says that it cannot store something."""

LEAVE_OUT = "Leave these out (exclude=...), or all values (only_tensors=True)"
"""What to do about values that a format cannot hold; more follows."""


def stand_ins_for(tensors: Iterable[tuple[str, OutTensor]]) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes and dtypes without elements, by name."""
    return {name: torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device="meta") for name, tensor in tensors}


def refuse_what_torch_lacks(outgoing: Outgoing, format_name: str) -> None:
    """Raise for a state that is no dict, for elements that are none of torch, and for values that nobody has made."""
    if not isinstance(outgoing.tree, Mapping):
        raise UnsupportedValueError(
            f"{outgoing.source.location} holds a {type(outgoing.tree).__name__} and no dict of names, which "
            f"{format_name} must have. Convert it to the native format, or save it under a name.",
            key="",
        )
    elements = {
        name: f"elements of type {tensor.dtype}, as {tensor.numpy} of numpy"
        for name, tensor in outgoing.names.items()
        if torch_dtype(tensor.dtype) is None
    }
    refuse_values(outgoing, format_name, elements, "Torch has no such elements. Leave these arrays out (exclude=...).")
    unmade = dict(_unmade(outgoing.tree, ()))
    refuse_values(outgoing, format_name, unmade, f"{LEAVE_OUT}, or make them readable as told.")


def _unmade(value: Any, path: Path) -> Iterator[tuple[str, str]]:
    """Values that could not be made when they were read: something stands in their place."""
    if isinstance(value, PickledValue):
        yield readable(path), "a pickle, which is only loaded with allow_pickle=True"
    elif isinstance(value, UnknownValue):
        yield readable(path), f"a {value.type}, which cannot be read as a value"
    elif isinstance(value, UndeclaredValue):
        yield readable(path), f"a {value.type}, which is only made after holdfast.declare of that class"
    else:
        for name, child in children_of(value) or ():
            yield from _unmade(child, (*path, name))
