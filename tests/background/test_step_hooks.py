"""Optimizers that wait for copies of what they change."""

from __future__ import annotations

import copy
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

from holdfast._background.arenas import ArenaPool
from holdfast._background.copy_jobs import Copies
from holdfast._background.step_hooks import changed_only_by, checked_optimizers, hold_steps_back
from tests.save.overlapping import PATIENCE


def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.ones(100, 200))
    weight.grad = torch.ones(100, 200)
    return weight, torch.optim.SGD([weight], lr=1.0)


def held(weight: torch.Tensor, gate: threading.Event) -> Copies:
    """A copy that is not made before the gate is open."""
    copies = Copies()
    copies.add("weight", weight.detach())
    copies.begin(ArenaPool())
    work = copies._work
    copies._work = lambda: (gate.wait(PATIENCE), work())  # type: ignore[method-assign]
    copies.copy_later()
    return copies


def test_ctrl_c_ends_a_wait_and_the_next_step_waits_again() -> None:
    weight, optimizer = make()
    gate, stalls = threading.Event(), []
    copies = held(weight, gate)
    wait_until_copied, is_waiting = copies.wait_until_copied, threading.Event()
    copies.wait_until_copied = lambda: (is_waiting.set(), wait_until_copied())  # type: ignore[method-assign]
    hold_steps_back([optimizer], copies, stalls.append)

    def interrupt() -> None:
        is_waiting.wait(PATIENCE)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    interrupter.join()
    assert weight.eq(1).all()
    assert not copies.done.done()
    opener = threading.Thread(target=lambda: (is_waiting.wait(PATIENCE), gate.set()))
    is_waiting.clear()
    opener.start()
    optimizer.step()
    opener.join()
    assert copies.done.result(0) is None  # no change came before the copy was complete
    assert weight.eq(0).all()
    assert len(stalls) == 1


def test_a_hook_stays_and_costs_nothing_when_nothing_is_copied(monkeypatch) -> None:
    weight, optimizer = make()
    for _ in range(3):
        gate = threading.Event()
        gate.set()
        copies = held(weight, gate)
        hold_steps_back([optimizer], copies, lambda seconds: None)
        copies.done.result(PATIENCE)
    monkeypatch.setattr(Copies, "wait_until_copied", lambda copies: pytest.fail("there is nothing to wait for"))
    optimizer.step()
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_copied_optimizer_waits_for_its_own_copies() -> None:
    weight, optimizer = make()
    gate = threading.Event()
    copies = held(weight, gate)
    hold_steps_back([optimizer], copies, lambda seconds: None)
    twin = copy.deepcopy(optimizer)
    twin.step()  # has parameters of its own, and need not wait
    gate.set()
    copies.done.result(PATIENCE)
    hold_steps_back([twin], copies, lambda seconds: None)
    assert len(twin._optimizer_step_pre_hooks) == 1


def test_which_tensors_are_changed_by_steps_alone() -> None:
    memory = torch.zeros(300, 10)
    weight, bias = nn.Parameter(memory[100:200]), nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.Adam([weight, bias])
    weight.grad, bias.grad = torch.ones(100, 10), torch.ones(10)
    optimizer.step()
    optimizer.state["elsewhere"] = 3
    answer = changed_only_by([optimizer])
    of_steps = [weight, bias, weight[20:30], weight.detach().T, optimizer.state[weight]["exp_avg"]]
    others: list[Any] = [memory, memory[:100], memory[200:], memory[150:250], memory[100::2], torch.zeros(3)]
    assert [answer(tensor) for tensor in of_steps] == [True] * 5
    assert [answer(tensor) for tensor in others] == [False] * 6
    assert not answer(torch.empty(0))


def test_what_lies_in_the_gaps_of_a_parameter_is_something_else() -> None:
    memory = torch.zeros(100, 8)
    columns, image = (
        nn.Parameter(memory[:, :4]),
        nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    )
    answer = changed_only_by([torch.optim.SGD([columns, image])])
    assert [answer(tensor) for tensor in (columns, columns.detach(), image, image[1])] == [True] * 4
    assert [answer(tensor) for tensor in (memory[:-1, 4:], memory[0], memory[3, 4:])] == [False] * 3


def test_optimizers_may_be_one_or_any_number() -> None:
    _, optimizer = make()
    for given in (optimizer, [optimizer], (optimizer,), iter([optimizer])):
        assert checked_optimizers(given) == [optimizer]
    assert checked_optimizers(()) == []
    for wrong in ([optimizer, None], 3, None, "adam"):
        with pytest.raises(TypeError, match=r"optimizers must be .*staged\.result"):
            checked_optimizers(wrong)
