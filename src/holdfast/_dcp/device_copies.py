"""Tensors on their way from devices to host memory, some of them ahead of the one that is being written.

On a machine without an accelerator there is nothing to get ahead of; the classes work there all the same.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


class TensorLoader(abc.ABC):
    """Brings tensors to the host: ``add`` all of them, ``start_loading``, then take them from ``values``."""

    @abc.abstractmethod
    def add(self, size: int, obj: object) -> None:
        """Announce a tensor of about ``size`` bytes, which the resolver finds by ``obj``."""

    @abc.abstractmethod
    def start_loading(self) -> None:
        """All are announced; copies may begin."""

    @abc.abstractmethod
    def values(self) -> Iterator[tuple[torch.Tensor, object]]:
        """Each tensor in host memory with its ``obj``, in the order of ``add``."""


class SerialCpuLoader(TensorLoader):
    """Copies a tensor when it is asked for."""

    def __init__(self, resolve_fun: Callable[[Any], torch.Tensor]) -> None:
        self.resolve_fun = resolve_fun
        self.items: list[object] = []

    def add(self, size: int, obj: object) -> None:
        """Announce a tensor."""
        self.items.append(obj)

    def start_loading(self) -> None:
        """Nothing happens before a tensor is asked for."""

    def values(self) -> Iterator[tuple[torch.Tensor, object]]:
        """Resolve and copy one by one."""
        for obj in self.items:
            yield without_surplus(self.resolve_fun(obj).detach().cpu()), obj


class OverlappingCpuLoader(TensorLoader):
    """Copies tensors ahead on a stream of their own, up to ``inflight_threshhold`` bytes of them at a time."""

    def __init__(
        self,
        resolve_fun: Callable[[Any], torch.Tensor],
        stream: torch.Stream | None = None,
        inflight_threshhold: int = 1_000_000,
    ) -> None:
        self.resolve_fun = resolve_fun
        self.inflight_threshhold = inflight_threshhold
        self._streams: dict[torch.device, torch.Stream | None] = {} if stream is None else {stream.device: stream}
        self._announced: deque[object] = deque()
        self._under_way: deque[tuple[HostCopy, object]] = deque()
        self._bytes_under_way = 0

    def add(self, size: int, obj: object) -> None:
        """Announce a tensor."""
        self._announced.append(obj)

    def start_loading(self) -> None:
        """Begin the first copies."""
        self._refill()

    def values(self) -> Iterator[tuple[torch.Tensor, object]]:
        """Wait for the oldest copy, begin others in its place, and hand it out."""
        self._refill()
        while self._under_way:
            copy, obj = self._under_way.popleft()
            host = copy.wait()
            self._bytes_under_way -= copy.nbytes
            self._refill()
            yield without_surplus(host), obj

    def _refill(self) -> None:
        # One copy is always under way, however large it is.
        while self._announced and (not self._under_way or self._bytes_under_way < self.inflight_threshhold):
            obj = self._announced.popleft()
            tensor = self.resolve_fun(obj).detach()
            if tensor.device not in self._streams:
                self._streams[tensor.device] = stream_for_copies(tensor.device)
            copy = begin_copy(tensor, self._streams[tensor.device])
            self._under_way.append((copy, obj))
            self._bytes_under_way += copy.nbytes


@dataclass
class HostCopy:
    """A copy that may still be under way."""

    host: torch.Tensor
    source: torch.Tensor | None = None
    """Kept until the copy is done: its memory must not be given to anyone else before."""
    done: torch.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are being moved; none for a tensor that is on the host anyway."""
        return 0 if self.source is None else self.host.nbytes

    def wait(self) -> torch.Tensor:
        """The copy, complete."""
        if self.done is not None:
            self.done.synchronize()
        self.source = None
        return self.host


def stream_for_copies(device: torch.device) -> torch.Stream | None:
    """A stream of its own for copies from ``device``; None where it has none, or no pinned memory to copy into."""
    if device.type == "cpu":
        return None
    try:
        torch.empty(1, pin_memory=True)
        return torch.Stream(device=device)
    except RuntimeError:  # how backends say that they have no such thing
        return None


def begin_copy(tensor: torch.Tensor, stream: torch.Stream | None) -> HostCopy:
    """Begin to copy a tensor to the host on ``stream``; tensors in host memory are taken as they are."""
    if tensor.device.type == "cpu":
        return HostCopy(tensor)
    if stream is None or tensor.is_quantized:
        return HostCopy(tensor.cpu())
    source = tensor.resolve_conj().resolve_neg().contiguous()
    # Only copies into pinned memory run beside other work.
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    # What computes the tensor was queued on the current stream and comes first.
    stream.wait_stream(torch.accelerator.current_stream(source.device))
    with stream:
        host.copy_(source, non_blocking=True)
    return HostCopy(host, source, stream.record_event())


def without_surplus(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own size: ``torch.save`` would write all of a larger buffer that it is a view of."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone()
