"""Whatever a state is made of: a background save stores what a save at the moment of the call would have stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast
from tests.properties import examples
from tests.save.overlapping import held_back, scribble
from tests.save.random_states import Drawn, Settings, difference, states, ties_are_kept

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of rare dtypes


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from tensors_in(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from tensors_in(child)
    elif isinstance(value, Settings):
        yield from tensors_in(vars(value))


def saved_both_ways(state: Any, **options: Any) -> tuple[Any, holdfast.PendingSave]:
    """What a save stores now, and a background save that has begun now."""
    holdfast.save(state, "memory://random/now", overwrite=True)
    return holdfast.open("memory://random/now").read(), holdfast.async_save(
        state, "memory://random/later", overwrite=True, **options
    )


def assert_stored(pending: holdfast.PendingSave, expected: Any, state: Any) -> None:
    pending.result(60)
    found = holdfast.open("memory://random/later").read()
    assert difference(found, expected) is None
    assert ties_are_kept(found, state)


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.too_slow])
@given(drawn=states(), check=st.booleans())
def test_a_background_save_stores_what_a_save_would(drawn: Drawn, check: bool) -> None:
    expected, pending = saved_both_ways(drawn.state, check_tearing=check)
    unique = {tensor.data_ptr(): tensor for tensor in tensors_in(drawn.state)}
    scribble(list(unique.values()))
    assert_stored(pending, expected, drawn.state)


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.too_slow])
@given(drawn=states(), chosen=st.randoms(use_true_random=False))
def test_a_background_save_stores_what_a_save_would_if_steps_wait_for_it(drawn: Drawn, chosen: Any) -> None:
    unique = {tensor.data_ptr(): tensor for tensor in tensors_in(drawn.state) if tensor.numel()}
    held = {at: nn.Parameter(tensor, requires_grad=False) for at, tensor in unique.items() if chosen.random() < 0.5}
    if not held:
        held = {0: nn.Parameter(torch.ones(2))}
    optimizer = torch.optim.SGD(list(held.values()))
    with held_back() as copying:
        expected, pending = saved_both_ways(drawn.state, optimizers=optimizer)
        scribble([tensor for at, tensor in unique.items() if at not in held])
        optimizer.step()
        assert pending.staged.done()
        assert copying.waits == any(at for at in held)
        scribble([tensor for at, tensor in unique.items() if at in held])
    assert_stored(pending, expected, drawn.state)
