"""Puts stored elements into the tensors that a load fills, in the same way whatever they were read from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.errors import HoldfastError


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The part of a tensor at these offsets.

    >>> narrowed(torch.arange(6).view(2, 3), (0, 1), (2, 1)).tolist()
    [[1], [4]]
    """
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def fill(target: torch.Tensor, stored: torch.Tensor, key: str) -> None:
    """Copy, converting if the dtypes differ. ``key`` is how errors call the target.

    >>> target = torch.zeros(2)
    >>> fill(target, torch.tensor([1, 2]), "weight")
    >>> target
    tensor([1., 2.])
    """
    try:
        if target.is_quantized and stored.is_quantized and _scale(target) != _scale(stored):
            # Copying would bring the integers without the scale that gives them their meaning.
            raise RuntimeError(f"it was saved with {_scale(stored)}, and the tensor to load into has {_scale(target)}")
        if target.dtype == stored.dtype and stored.dtype.itemsize == 1 and not stored.is_quantized:
            # Bits, whatever they mean: torch has no copy for some of these dtypes, but views all of them as bytes.
            target, stored = target.view(torch.uint8), stored.view(torch.uint8)
        target.copy_(stored)
    except RuntimeError as error:
        raise HoldfastError(
            f"'{key}' cannot be filled: {str(error).rstrip('.')}. Load into a tensor of the kind that was saved."
        ) from error


def _scale(tensor: torch.Tensor) -> str:
    """How the integers of a quantized tensor are meant."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"scale {tensor.q_scale()} and zero point {tensor.q_zero_point()}"
    scales, zeros = tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()
    return f"scales {scales} and zero points {zeros} along dimension {tensor.q_per_channel_axis()}"
