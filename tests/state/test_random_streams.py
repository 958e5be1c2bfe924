"""Random streams: the same numbers follow; other numbers of ranks get streams that are distinct and reproducible."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._formats.native.refs import ANYTHING, TensorRef
from holdfast._state import random_streams as device_streams
from holdfast._state.expanding import adapter_for, per_rank_of
from holdfast._state.random_streams import RngState, derive
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.state.memory_checkpoint import MemoryCheckpoint


@pytest.fixture(autouse=True)
def _streams_of_other_tests():
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draws() -> list[Any]:
    """Of every kind, and an odd number of Gaussian ones, which come in pairs."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        np.random.standard_normal(3).tolist(),
        np.random.randint(0, 1 << 30),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        torch.randperm(9).tolist(),
    ]


def through_a_checkpoint(captured: Any) -> Any:
    checkpoint = MemoryCheckpoint.of(captured)
    template = adapter_for(RngState()).template(checkpoint.tree)
    loaded = checkpoint.fill(template)
    assert (checkpoint.missing, checkpoint.unexpected) == ([], [])
    return loaded


@settings(max_examples=examples(25))
@given(st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_the_same_numbers_follow_after_a_restore(seed: int, before: int):
    seed_all(seed)
    for _ in range(before):
        draws()
    streams = RngState()
    captured = streams.capture()
    expected = [draws(), draws()]
    loaded = through_a_checkpoint(captured)
    for _ in range(2):  # restoring uses nothing up
        streams.restore(loaded)
        assert [draws(), draws()] == expected


def test_a_capture_is_a_copy():
    captured = RngState().capture()
    tree = MemoryCheckpoint.of(captured)
    draws()
    again = MemoryCheckpoint.of(captured)
    assert all((tree.tensors[key] == again.tensors[key]).all() for key in tree.tensors)


def test_a_capture_is_made_of_plain_values_arrays_and_tensors():
    checkpoint = MemoryCheckpoint.of(RngState().capture())  # which refuses all else
    assert isinstance(checkpoint.tree["python"]["numbers"], TensorRef)
    assert checkpoint.tree["python"]["numbers"].shape == (625,)
    assert checkpoint.tree["numpy"]["numbers"].shape == (624,)
    assert checkpoint.tree["torch"].dtype == torch.uint8


def test_capturing_draws_nothing():
    seed_all(1)
    expected = draws()
    seed_all(1)
    RngState().capture()
    assert draws() == expected


def test_another_bit_generator_of_numpy_comes_back():
    ours = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        captured = through_a_checkpoint(RngState().capture())
        expected = np.random.standard_normal(5).tolist()
        RngState().restore(captured)
        assert np.random.standard_normal(5).tolist() == expected
    finally:
        np.random.set_bit_generator(ours)


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
def test_a_malformed_capture_changes_no_stream(part: str):
    captured = RngState().capture()
    broken = {**captured, part: torch.zeros(3, dtype=torch.uint8) if part == "torch" else {**captured[part]}}
    if part != "torch":
        broken[part]["numbers"] = captured[part]["numbers"][:-1]
    before = RngState().capture()
    with pytest.raises(ValueError, match="No stream was changed"):
        RngState().restore(broken)
    after = RngState().capture()
    assert (after["python"]["numbers"] == before["python"]["numbers"]).all()
    assert (after["numpy"]["numbers"] == before["numpy"]["numbers"]).all()
    assert after["torch"].equal(before["torch"])


# --- other numbers of ranks ----------------------------------------------------------------------------------------


def draws_after(captured: Any) -> list[Any]:
    RngState().restore(captured)
    return draws()


def test_derived_streams_are_distinct_and_reproducible():
    captured = RngState().capture()
    seen: list[Any] = [draws_after(captured)]
    for world_size in (1, 2, 3):
        for rank in range(world_size):
            seen.append(draws_after(derive(captured, rank, world_size)))
            assert draws_after(derive(through_a_checkpoint(captured), rank, world_size)) == seen[-1]
    for column in zip(*seen, strict=True):  # no stream of any kind begins like another one
        assert len({repr(numbers) for numbers in column}) == len(seen)


def test_derived_streams_depend_on_each_of_the_stored_ones():
    streams = RngState()
    seed_all(1)
    found = [draws_after(derive(streams.capture(), 0, 2))]
    for change in (lambda: random.seed(2), lambda: np.random.seed(2), lambda: torch.manual_seed(2)):
        seed_all(1)
        change()
        found.append(draws_after(derive(streams.capture(), 0, 2)))
    assert len({repr(numbers) for numbers in found}) == 4


def test_other_numbers_of_ranks_get_derived_streams_and_a_warning():
    captured = RngState().capture()
    per_rank = per_rank_of(RngState())
    assert per_rank is not None
    assert per_rank.sources("rng", 8, 3, 4) == [0]
    assert per_rank.needs_values(8, 4)
    chosen = per_rank.chosen([captured], 8, 3, 4)
    adapter = adapter_for(per_rank.value)
    with pytest.warns(UserWarning, match="derived from those of rank 0"):
        adapter.apply(chosen)
    assert draws() == draws_after(derive(captured, 3, 4))
    assert "derived from those of rank 0" in adapter.notes()[0]


def test_as_many_ranks_as_before_get_their_own_streams_without_a_word():
    captured = RngState().capture()
    expected = draws()
    per_rank = per_rank_of(RngState())
    assert per_rank.sources("rng", 4, 3, 4) == [3]
    adapter = adapter_for(per_rank.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.apply(per_rank.chosen([captured], 4, 3, 4))
    assert draws() == expected
    assert adapter.notes() == []


def test_rules_for_other_numbers_of_ranks_are_checked():
    with pytest.raises(ValueError, match="on_resize must be"):
        RngState(on_resize="last")  # type: ignore[arg-type]


def test_nothing_stored_makes_everything_missing():
    assert adapter_for(RngState()).template(None) == {"python": ANYTHING, "numpy": ANYTHING, "torch": ANYTHING}


# --- devices -------------------------------------------------------------------------------------------------------


class Machine:
    """Accelerators of which only the random streams are real: generators of the CPU stand in for them."""

    def __init__(self, devices: int, current: int = 0) -> None:
        self.streams = [torch.Generator().manual_seed(100 + index) for index in range(devices)]
        self.current = current

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Machine:
        for name, value in {
            "is_available": lambda: bool(self.streams),
            "current_accelerator": lambda: torch.device("cuda"),
            "device_count": lambda: len(self.streams),
            "current_device_index": lambda: self.current,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, value)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: {"cuda": self}[kind])
        return self

    def get_rng_state(self, index: int) -> torch.Tensor:
        return self.streams[index].get_state()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.streams[index].set_state(state)

    def draw(self, index: int) -> list[float]:
        return torch.rand(4, generator=self.streams[index]).tolist()


def test_streams_of_all_devices_come_back(monkeypatch):
    machine = Machine(3).install(monkeypatch)
    captured = through_a_checkpoint(RngState().capture())
    assert list(captured["devices"]) == ["cuda:0", "cuda:1", "cuda:2"]
    expected = [machine.draw(index) for index in range(3)]
    RngState().restore(captured)
    assert [machine.draw(index) for index in range(3)] == expected


def test_the_stream_in_use_goes_to_the_device_in_use(monkeypatch):
    """Otherwise a rank that is placed on another device gets a stream that nobody has drawn from."""
    machine = Machine(2, current=1).install(monkeypatch)
    machine.draw(1)
    captured = RngState().capture()
    expected = machine.draw(1)
    machine = Machine(2, current=0).install(monkeypatch)
    RngState().restore(captured)
    assert machine.draw(0) == expected
    assert machine.draw(1) != expected


def test_a_rank_that_sees_one_device_takes_the_stream_of_the_one_it_used_before(monkeypatch):
    machine = Machine(4, current=3).install(monkeypatch)
    captured = RngState().capture()
    expected = machine.draw(3)
    machine = Machine(1).install(monkeypatch)
    RngState().restore(captured)
    assert machine.draw(0) == expected


def test_stored_streams_without_a_device_are_mentioned(monkeypatch):
    Machine(1).install(monkeypatch)
    captured = RngState().capture()
    Machine(0).install(monkeypatch)
    with pytest.warns(UserWarning, match="stored random stream of cuda:0 is left out"):
        RngState().restore(captured)


def test_a_device_without_a_stored_stream_is_mentioned(monkeypatch):
    captured = RngState().capture()
    machine = Machine(1).install(monkeypatch)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(100)).tolist()
    with pytest.warns(UserWarning, match="No random stream is stored for cuda:0"):
        RngState().restore(captured)
    assert machine.draw(0) == expected


def test_devices_get_derived_streams_too(monkeypatch):
    machine = Machine(2).install(monkeypatch)
    monkeypatch.setattr(device_streams, "_new_generator", lambda _device: torch.Generator())
    captured = RngState().capture()
    seen = []
    for rank in (0, 1, 0):
        RngState().restore(derive(captured, rank, 2))
        seen.append((machine.draw(0), machine.draw(1)))
    assert seen[0] == seen[2]
    assert len({tuple(numbers) for pair in seen[:2] for numbers in pair}) == 4


# --- live ranks ----------------------------------------------------------------------------------------------------


def capture_and_draw(rank_seed: int) -> tuple[Any, Any]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank_seed + rank)
    captured = RngState().capture()
    return captured, draws()


def resume(all_captured: list[Any]) -> Any:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    per_rank = per_rank_of(RngState())
    values = [all_captured[source] for source in per_rank.sources("rng", len(all_captured), rank, world_size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter_for(per_rank.value).apply(per_rank.chosen(values, len(all_captured), rank, world_size))
    return draws()


def test_every_rank_goes_on_with_its_own_stream(ranks: RankPool):
    captured, expected = zip(*ranks(2).run(capture_and_draw, 5), strict=True)
    assert ranks(2).run(resume, list(captured)) == list(expected)
    more = ranks(3).run(resume, list(captured))
    assert more == ranks(3).run(resume, list(captured))
    assert len({repr(numbers) for numbers in [*more, *expected]}) == 5
