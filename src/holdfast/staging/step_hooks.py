"""Optimizers that wait: while parameters are being copied, no step may change them.

One hook per optimizer stays for good, since hooks must not come and go while an optimizer goes through them. It does
nothing unless something is being copied.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from holdfast.staging.copying import Copies

_awaited: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[_Awaited]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Awaited:
    """Copies that an optimizer must wait for, and who wants to know how long that took."""

    def __init__(self, copies: Copies, waited: Callable[[float], None]) -> None:
        self.copies = copies
        self.waited = waited


def checked_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """What the user calls optimizers, as a list.

    >>> checked_optimizers(7)
    Traceback (most recent call last):
    TypeError: optimizers must be torch.optim.Optimizer objects, not 7...
    """
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for each in given if isinstance(given, Iterable) else [given]:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"optimizers must be torch.optim.Optimizer objects, not {each!r}. With another kind, leave them out "
                "and call pending.staged.result() before its step."
            )
    return list(given)


def hold_steps_back(
    optimizers: Iterable[torch.optim.Optimizer], copies: Copies, waited: Callable[[float], None]
) -> None:
    """Let no step begin before all is copied. ``waited`` is told for how many seconds one was held back."""
    for optimizer in optimizers:
        with _lock:
            if optimizer not in _awaited:
                _awaited[optimizer] = []
                optimizer.register_step_pre_hook(_wait_for_copies)
            _awaited[optimizer].append(_Awaited(copies, waited))


def _wait_for_copies(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with _lock:
        waiting, _awaited[optimizer] = _awaited[optimizer], []
    for each in waiting:
        if not each.copies.done.done():
            began = time.perf_counter()
            each.copies.help_and_wait()
            each.waited(time.perf_counter() - began)


def changed_only_by(optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[torch.Tensor], bool]:
    """Tells whether a tensor is a parameter or a state of these optimizers, which nothing but a step changes."""
    storages: set[int] = set()
    for optimizer in optimizers:
        tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        storages.update(map(_storage_of, tensors))
    storages.discard(0)
    return lambda tensor: _storage_of(tensor) in storages


def _storage_of(tensor: Any) -> int:
    """Where the memory of a tensor begins, of this rank's part if it is spread over ranks. Zero if that is unclear."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(local.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0
