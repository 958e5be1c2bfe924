"""Small tensors by the thousands: gathered by address, and yet the very bytes that they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast._base.tuning import SMALL_TENSOR as SMALL
from holdfast._formats.tensor_bytes import SmallTensors, digest_of_small, is_plain_contiguous, plain_addresses
from tests.dcp.states import bits
from tests.save.random_states import Drawn, tensors


def gather(tensors, first: int, room: np.ndarray) -> tuple[int, int]:
    """Of pairs of a tensor and the bytes that it is to take."""
    values = [tensor for tensor, _ in tensors]
    nbytes = np.array([planned for _, planned in tensors], np.int64)
    return SmallTensors(values, plain_addresses(values), nbytes).gather(first, room)


def content(tensor: torch.Tensor) -> bytes:
    return bits(tensor) if tensor.numel() else b""


@given(
    st.lists(tensors(), max_size=8).map(lambda drawn: Drawn({str(n): tensor for n, tensor in enumerate(drawn)})),
    st.integers(0, 300),
    st.integers(0, 8),
)
def test_what_is_gathered_are_the_bytes_of_the_next_tensors_and_nothing_else_is_touched(drawn, space, first):
    state = list(drawn.state.values())
    first = min(first, len(state))
    memory = np.full(space + 32, 0xA5, np.uint8)
    room = memory[16 : 16 + space]
    count, filled = gather([(tensor, len(content(tensor))) for tensor in state], first, room)
    taken, rest = state[first : first + count], state[first + count :]
    assert room[:filled].tobytes() == b"".join(map(content, taken))
    assert set(memory[:16]) | set(memory[16 + filled :]) <= {0xA5}
    if rest:  # it ended for a reason
        is_taken = is_plain_contiguous(rest[0]) and rest[0].numel()
        assert not is_taken or filled + len(content(rest[0])) > space


@given(tensors().map(lambda tensor: Drawn({"tensor": tensor})))
def test_a_tensor_lies_ready_exactly_if_its_memory_holds_its_bytes(drawn):
    tensor = drawn.state["tensor"]
    assert is_plain_contiguous(tensor) == (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())
    digest = digest_of_small(tensor)
    assert digest == (xxhash.xxh3_128_digest(content(tensor)) if is_plain_contiguous(tensor) else None)


class Special(torch.Tensor):
    """Whoever makes a class of tensors may mean something else by their memory."""


@example(torch.ones(4, dtype=torch.complex64).conj())
@example(torch.ones(4, dtype=torch.complex64).conj().imag)
@example(torch._neg_view(torch.ones(4)))
@example(torch.ones(4, 4).T)
@example(torch.ones(4).as_subclass(Special))
@example(torch.ones(4, device="meta"))
@given(st.sampled_from([torch.ones(2, 3)[:, ::2], torch.ones(1).expand(5), np.ones(4), None, [1]]))
def test_what_does_not_lie_ready_is_left_to_others(value):
    room = np.zeros(64, np.uint8)
    nbytes = getattr(value, "nbytes", 8)
    assert gather([(torch.ones(1), 4), (value, nbytes), (torch.ones(1), 4)], 0, room) == (1, 4)
    assert not room[4:].any()


def test_parameters_that_want_gradients_are_taken_too():
    room = np.zeros(8, np.uint8)
    assert gather([(torch.nn.Parameter(torch.tensor([1.0, 2.0])), 8)], 0, room) == (1, 8)
    assert room.view(np.float32).tolist() == [1.0, 2.0]


def test_a_tensor_that_has_become_larger_or_smaller_since_it_was_planned_is_not_taken():
    room = np.zeros(64, np.uint8)
    for planned in (4, 12):
        assert gather([(torch.ones(2), planned)], 0, room) == (0, 0)
    assert not room.any()


@pytest.mark.parametrize("left", [0, 4, 11])
def test_a_tensor_whose_memory_was_given_back_is_not_taken(left):
    tensor, room = torch.ones(4)[1:3], np.zeros(64, np.uint8)
    tensor.untyped_storage().resize_(left)
    assert gather([(tensor, 8)], 0, room) == (0, 0)
    assert digest_of_small(tensor) is None


@given(st.lists(tensors(), max_size=8).map(lambda drawn: Drawn({str(n): tensor for n, tensor in enumerate(drawn)})))
def test_many_tensors_are_looked_at_as_one_is(drawn):
    state = list(drawn.state.values())
    expected = [tensor.data_ptr() if is_plain_contiguous(tensor) and tensor.numel() else 0 for tensor in state]
    assert plain_addresses(state) == expected


@pytest.mark.parametrize("left", [0, 4, 11, 12])
def test_many_tensors_are_only_taken_with_all_their_memory(left):
    tensor = torch.ones(4)[1:3]
    tensor.untyped_storage().resize_(left)
    assert bool(plain_addresses([tensor])[0]) == (left == 12)


@pytest.mark.parametrize("change", [lambda tensor: tensor.untyped_storage().resize_(0), lambda tensor: tensor.set_()])
def test_memory_that_was_given_back_after_it_was_looked_at_is_not_taken(change):
    tensors, room = [torch.ones(1), torch.ones(2), torch.ones(1)], np.zeros(64, np.uint8)
    small = SmallTensors(tensors, plain_addresses(tensors), np.array([4, 8, 4]))
    change(tensors[1])
    assert small.gather(0, room) == (1, 4)
    assert not room[4:].any()


def test_large_tensors_are_left_to_others():
    room = np.zeros(4 * SMALL, np.uint8)
    assert gather([(torch.ones(SMALL, dtype=torch.uint8), SMALL)], 0, room) == (1, SMALL)
    assert gather([(torch.ones(SMALL + 1, dtype=torch.uint8), SMALL + 1)], 0, room) == (0, 0)
    assert digest_of_small(torch.ones(SMALL + 1, dtype=torch.uint8)) is None
