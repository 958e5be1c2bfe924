"""Optimizers that wait: while parameters are being copied, no step may change them.

One hook per optimizer stays for good, since hooks must not come and go while an optimizer goes through them. It does
nothing unless something is being copied.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from holdfast._background.copy_jobs import Copies
from holdfast._base.box_bytes import span_of
from holdfast._compat.tensors import local_part
from holdfast._layout.tensor_kinds import is_dtensor
from holdfast._state.unwrapping import bare_optimizer
from holdfast.errors import UnsupportedStateError

_awaited: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[_Awaited]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Awaited:
    """Copies that an optimizer must wait for, and who wants to know how long that took."""

    def __init__(self, copies: Copies, waited: Callable[[float], None]) -> None:
        self.copies = copies
        self.waited = waited


def checked_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """What the user calls optimizers, as a list, without the wrappers of other libraries.

    >>> checked_optimizers(7)
    Traceback (most recent call last):
    TypeError: optimizers must be torch.optim.Optimizer objects, not 7...
    """
    one = isinstance(bare_optimizer(optimizers), torch.optim.Optimizer) or not isinstance(optimizers, Iterable)
    given = [bare_optimizer(each) for each in ([optimizers] if one else optimizers)]
    for each in given:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"optimizers must be torch.optim.Optimizer objects, not {each!r}. With another kind, leave them out "
                "and call pending.staged.result() before its step."
            )
    return given


def hold_steps_back(
    optimizers: Iterable[torch.optim.Optimizer], copies: Copies, waited: Callable[[float], None]
) -> None:
    """Let no step begin before all is copied. ``waited`` gets the seconds for which one was held back."""
    for optimizer in optimizers:
        with _lock:
            _watch(optimizer)
            _awaited[optimizer] = [*_still_awaited_by(optimizer), _Awaited(copies, waited)]


def watch_steps(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make sure that steps can be held back, before anything depends on it."""
    for optimizer in optimizers:
        with _lock:
            _watch(optimizer)


def _watch(optimizer: torch.optim.Optimizer) -> None:
    if optimizer in _awaited:
        return
    try:
        optimizer.register_step_pre_hook(_wait_for_copies)
    except Exception as error:
        kind = type(optimizer).__qualname__
        raise UnsupportedStateError(
            f"no hook can be put before the steps of {kind} ({type(error).__name__}: {error}), so that nothing would "
            "keep it from changing what is being copied. Leave it out of `optimizers` (of a CheckpointManager: "
            "overlap=False), or give the optimizer that it wraps. Nothing was saved",
            kind=kind,
        ) from error
    _awaited[optimizer] = []  # not before: without the hook nothing would wait


def _wait_for_copies(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for each in _still_awaited_by(optimizer):
        began = time.perf_counter()
        each.copies.wait_until_copied()
        each.waited(time.perf_counter() - began)
    with _lock:  # not before: if Ctrl-C has ended the wait, the next step waits again
        _awaited[optimizer] = _still_awaited_by(optimizer)


def _still_awaited_by(optimizer: torch.optim.Optimizer) -> list[_Awaited]:
    return [each for each in _awaited.get(optimizer, ()) if not each.copies.done.done()]


def changed_only_by(optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[torch.Tensor], bool]:
    """Says whether a tensor is a parameter or a state of these optimizers, which nothing but a step changes.

    So is a part of one, but not what else may be in the same storage, or in its gaps.
    """
    lengths: dict[int, int] = {}
    with_gaps: set[Any] = set()
    for optimizer in optimizers:
        for tensor in _tensors_of(optimizer):
            begin, length = _extent_of(tensor)
            if begin and length > _local(tensor).nbytes:
                with_gaps.add((begin, *_layout_of(tensor)))
            else:
                lengths[begin] = max(length, lengths.get(begin, 0))
    lengths.pop(0, None)
    begins = sorted(lengths)

    def is_changed_by_them_alone(tensor: torch.Tensor) -> bool:
        begin, length = _extent_of(tensor)
        if with_gaps and (begin, *_layout_of(tensor)) in with_gaps:
            return True
        before = bisect_right(begins, begin)
        return before > 0 and begin + length <= begins[before - 1] + lengths[begins[before - 1]]

    return is_changed_by_them_alone


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        if isinstance(state, Mapping):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _extent_of(tensor: Any) -> tuple[int, int]:
    """Where the elements begin and how many bytes they are spread over. Of this rank's part, if there are others.

    Begins at zero if there is no such place.
    """
    local = _local(tensor)
    try:
        begin = int(local.data_ptr())
        if local.is_contiguous():
            return begin, int(local.nbytes)
        elements = span_of(local.shape, local.stride(), 1)
    except (RuntimeError, NotImplementedError):
        return 0, 0
    return begin, elements * local.element_size()


def _local(tensor: Any) -> Any:
    """This rank's part."""
    return local_part(tensor) if is_dtensor(tensor) else tensor


def _layout_of(tensor: Any) -> tuple[Any, ...]:
    local = _local(tensor)
    return local.dtype, local.shape, local.stride()


def _let_steps_go_in_forked_child() -> None:
    """The threads that copy are the parent's, and so is what they copy."""
    global _lock
    _lock = threading.Lock()
    for awaited in _awaited.values():
        awaited.clear()


os.register_at_fork(after_in_child=_let_steps_go_in_forked_child)
