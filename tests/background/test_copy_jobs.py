"""Private copies of tensors, made at once or while the program goes on."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._background.arenas import ArenaPool, Memory
from holdfast._background.copy_jobs import Copies, Copy
from holdfast._base.tuning import COPY_AT_ONCE
from holdfast.errors import TornSnapshotError
from tests.dcp.states import same_bits
from tests.properties import examples
from tests.save.overlapping import held_back
from tests.save.random_states import tensors


def copies_of(*tensors: torch.Tensor, check: bool = False) -> tuple[Copies, list[Copy]]:
    copies = Copies()
    made = [copies.add(str(number), tensor) for number, tensor in enumerate(tensors)]
    copies.begin(ArenaPool(), check=check)
    return copies, made


@settings(max_examples=examples(60))
@given(drawn=st.lists(tensors(), max_size=6), later=st.booleans(), check=st.booleans())
def test_copies_have_all_bits_and_share_no_memory(drawn: list[torch.Tensor], later: bool, check: bool) -> None:
    copies, made = copies_of(*drawn, check=check)
    if later:
        copies.copy_now(lambda tensor: tensor.dim() == 1)
        copies.copy_later()
    else:
        copies.copy_now()
    copies.done.result(60)
    for tensor, copy in zip(drawn, made, strict=True):
        assert same_bits(copy.twin, tensor)
        assert not tensor.numel() or copy.twin.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert copy.source is None
    spans = sorted({(copy.twin.data_ptr(), copy.twin.numel() * copy.twin.element_size()) for copy in made})
    spans = [(begin, length) for begin, length in spans if length]
    assert all(begin + length <= after for (begin, length), (after, _) in itertools.pairwise(spans))


def test_a_tensor_larger_than_a_part_is_copied_by_several_threads() -> None:
    large = -1 - torch.arange(3 * COPY_AT_ONCE // 4 + 5, dtype=torch.int32)  # no byte is zero, as fresh memory is
    copies, (copy,) = copies_of(large)
    workers = set()
    move, both = Copy.move, threading.Barrier(2, timeout=60)

    def noting(self: Copy, begin: int, nbytes: int) -> None:
        if threading.current_thread().name not in workers:
            workers.add(threading.current_thread().name)
            both.wait()  # neither goes on before the other has begun
        move(self, begin, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copy, "move", noting)
        patch.setattr(Copies, "_start_a_thread", named_thread)
        copies.copy_later()
        copies.wait_until_copied()
    assert workers == {"copying-1", "copying-2"}
    assert torch.equal(copy.twin, large)


def named_thread(copies: Copies) -> bool:
    number = sum(thread.name.startswith("copying-") for thread in threading.enumerate()) + 1
    threading.Thread(target=copies._work, name=f"copying-{number}", daemon=True).start()
    return True


def test_same_elements_are_copied_once() -> None:
    weight = torch.ones(1000)
    copies, made = copies_of(weight, weight, weight[:500], weight.view(10, 100))
    assert made[0] is made[1]
    assert len({id(copy) for copy in made}) == 3
    copies.copy_now()
    assert copies.nbytes == 4 * (1000 + 500 + 1000)


def test_an_error_in_a_part_is_that_of_the_copy(monkeypatch) -> None:
    def fail(copy: Copy, begin: int, nbytes: int) -> None:
        raise MemoryError("a part of the memory is broken")

    monkeypatch.setattr(Copy, "move", fail)
    copies, _ = copies_of(torch.ones(100_000), torch.ones(100_000))
    copies.copy_later()
    copies.wait_until_copied()
    with pytest.raises(MemoryError, match="is broken"):
        copies.done.result()


def test_a_change_in_the_call_is_noticed_too() -> None:
    weight = torch.ones(1000)
    copies, _ = copies_of(weight)
    weight[3] = 0
    with pytest.raises(TornSnapshotError, match="'0' was changed"):
        copies.copy_now()


def test_a_copy_to_come_can_not_be_cancelled() -> None:
    with held_back():
        copies, _ = copies_of(torch.ones(3))
        copies.copy_later()
        assert not copies.done.cancel()
        assert not copies.done.done()
    copies.done.result(60)


def test_nothing_to_copy_is_done_at_once() -> None:
    copies, made = copies_of()
    copies.copy_now(lambda tensor: False)
    assert copies.done.done()
    copies.copy_later()
    assert made == []


def test_shared_memory_is_one_block() -> None:
    copies = Copies()
    made = [copies.add(str(number), torch.full((1000,), number)) for number in range(50)]
    copies.begin(ArenaPool(Memory.SHARED))
    copies.copy_now()
    assert len({copy.twin.untyped_storage().data_ptr() for copy in made}) == 1
    assert [int(copy.twin[0]) for copy in made] == list(range(50))
