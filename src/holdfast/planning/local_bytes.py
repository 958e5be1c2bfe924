"""The elements of a tensor as bytes in row-major order, whatever it looks like in memory."""

from __future__ import annotations

import torch


def as_plain_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as a contiguous, ordinary CPU tensor; the very same memory where it already is one."""
    plain = tensor.detach()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    if plain.is_quantized:
        plain = plain.int_repr()
    return plain.cpu().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements as bytes. A view where possible, so the tensor must not change while it is in use."""
    plain = as_plain_cpu(tensor)
    if plain.numel() == 0:
        return memoryview(b"")
    return plain.reshape(-1).view(torch.uint8).numpy().data
