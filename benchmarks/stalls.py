"""What a training loop feels of saves in the background: how long the call takes, and how much slower training gets.

Everybody has saved once before anything is measured: the memory for copies is there then, for those who keep it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import OURS, OURS_DCP, STOCK
from benchmarks.quiet import quietly
from benchmarks.rounds import Turn, measure
from benchmarks.suite import Suite, remove

COPY = "probe: one memory copy"
OVERLAPPED = "holdfast, overlapped"
BY_PROCESS = "holdfast, writer process"
NO_SAVES = "probe: no saves"

_STEPS = 18
_STEPS_BETWEEN_SAVES = 6

Begin = Callable[[dict[str, Any], Path], Callable[[], object]]
"""Begins a save, and returns what waits for its end."""


def measure_stalls(suite: Suite) -> None:
    """The time inside the call, and the time of a training loop."""
    folder = suite.place("stalls")
    with quietly():
        suite.log("stalls: the call")
        _measure_calls(suite, folder)
        suite.log("stalls: a training loop")
        _measure_loops(suite, folder)


def _measure_calls(suite: Suite, folder: Path) -> None:
    training = _Training(suite.scale.stalled_bytes, suite.scale.stalled_tensors)
    copies = [torch.ones_like(tensor) for tensor in training.tensors()]

    def copy() -> None:
        for tensor, into in zip(training.tensors(), copies, strict=True):
            into.copy_(tensor)

    turns = [Turn(COPY, timed=copy)]
    for name, begin in _contenders(training).items():
        turns.append(Turn(name, timed=_call_of(begin, training, folder), after=lambda: remove(folder)))
        _call_of(begin, training, folder)()
        remove(folder)
    suite.measures["stalls call"] = measure(
        "time inside the call of a background save", training.nbytes(), turns, suite.allowance(0.1)
    )

    behind = [
        Turn(name, timed=_behind(begin, training, folder), after=lambda: remove(folder))
        for name, begin in _contenders(training).items()
        if name in (OURS, STOCK)
    ]
    suite.measures["stalls behind"] = measure(
        "processor time behind the call of a background save", training.nbytes(), behind, suite.allowance(0.03)
    )


def _behind(begin: Begin, training: _Training, folder: Path) -> Callable[[], float]:
    """The processor time of this process from the end of the call to the end of the save."""

    def used() -> float:
        wait = begin(training.state, folder)
        began = time.process_time()
        wait()
        return time.process_time() - began

    return used


def _call_of(begin: Begin, training: _Training, folder: Path) -> Callable[[], float]:
    def timed() -> float:
        began = time.perf_counter()
        wait = begin(training.state, folder)
        seconds = time.perf_counter() - began
        wait()
        return seconds

    return timed


def _measure_loops(suite: Suite, folder: Path) -> None:
    training = _Training(suite.scale.trained_bytes, 24)

    def run(begin: Begin | None) -> None:
        pending: Callable[[], object] | None = None
        for step in range(1, _STEPS + 1):
            training.step()
            if begin is not None and step % _STEPS_BETWEEN_SAVES == 0:
                if pending is not None:
                    pending()
                pending = begin(training.state, folder / str(step))
        if pending is not None:
            pending()

    turns = [Turn(NO_SAVES, timed=lambda: run(None))]
    for name, begin in _contenders(training).items():
        turns.append(Turn(name, timed=_bound(run, begin), after=lambda: remove(folder)))
        begin(training.state, folder)()
        remove(folder)
    suite.measures["stalls loop"] = measure(
        f"{_STEPS} steps of training with a save after every {_STEPS_BETWEEN_SAVES}", 0, turns, suite.allowance(0.1)
    )


def _bound(run: Callable[[Begin | None], None], begin: Begin) -> Callable[[], None]:
    return lambda: run(begin)


class _Training:
    """A real one: linear layers, Adam, gradients."""

    def __init__(self, nbytes: int, tensors: int) -> None:
        layers = max(1, tensors // 3)
        width = max(8, int((nbytes / 12 / layers) ** 0.5))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, foreach=True)
        self._input = torch.randn(64, width)
        self.step()
        states = {str(number): state for number, state in enumerate(self.optimizer.state.values())}
        self.state: dict[str, Any] = {"model": self.model.state_dict(), "optim": states}

    def step(self) -> None:
        """Forward, backward, and the step of the optimizer."""
        self.optimizer.zero_grad()
        self.model(self._input).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> Iterable[torch.Tensor]:
        """All that are saved."""
        yield from self.state["model"].values()
        for state in self.state["optim"].values():
            yield from state.values()

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


def _contenders(training: _Training) -> dict[str, Begin]:
    import torch.distributed.checkpoint as stock

    import holdfast
    import holdfast.dcp

    return {
        OURS: lambda state, folder: holdfast.async_save(state, folder).result,
        OVERLAPPED: lambda state, folder: holdfast.async_save(state, folder, optimizers=training.optimizer).result,
        BY_PROCESS: lambda state, folder: holdfast.async_save(state, folder, writer="process").result,
        OURS_DCP: lambda state, folder: holdfast.dcp.async_save(state, checkpoint_id=folder).result,
        STOCK: lambda state, folder: stock.async_save(state, checkpoint_id=folder).result,
    }
