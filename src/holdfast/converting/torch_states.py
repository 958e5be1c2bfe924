"""What the targets that torch reads have in common: stand-ins for tensors, and what neither of them can hold."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping

import torch

from holdfast.converting.outgoing import Outgoing, OutTensor
from holdfast.converting.target import refuse_values
from holdfast.errors import UnsupportedValueError
from holdfast.formats.native.torch_elements import torch_dtype

UNPICKLABLE = (TypeError, AttributeError, RecursionError, pickle.PicklingError)
"""How pickle says that it cannot store something."""

LEAVE_OUT = "Leave these out (exclude=...), or all values (only_tensors=True, --only-tensors)"
"""What to do about values that a format cannot hold; more follows."""


def stand_ins_for(tensors: Iterable[tuple[str, OutTensor]]) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes and dtypes without elements, by name."""
    return {name: torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device="meta") for name, tensor in tensors}


def refuse_what_torch_lacks(outgoing: Outgoing, format_name: str) -> None:
    """Raise for a state that is no dict, and for elements that are none of torch."""
    if not isinstance(outgoing.tree, Mapping):
        raise UnsupportedValueError(
            f"{outgoing.source.location} holds a {type(outgoing.tree).__name__} and no dict of names, which "
            f"{format_name} must have. Convert it to the native format, or save it under a name.",
            key="",
        )
    elements = {
        name: f"its elements are of numpy's type {tensor.numpy}"
        for name, tensor in outgoing.names.items()
        if torch_dtype(tensor.dtype) is None
    }
    refuse_values(outgoing, format_name, elements, "Torch has no such elements. Leave these arrays out (exclude=...).")
