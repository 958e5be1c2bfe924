"""State per rank, and what becomes of it when the number of ranks changes."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._state.expanding import per_rank_of
from holdfast._state.per_rank import PerRank
from holdfast.errors import WorldSizeError

RANKS = st.integers(1, 20)


@given(RANKS, st.data(), st.sampled_from(["error", "first", lambda *_: "chosen"]))
def test_the_same_number_of_ranks_gets_its_own_values(world_size, data, on_resize):
    rank = data.draw(st.integers(0, world_size - 1))
    state = PerRank("live", on_resize)
    values = [f"of {source}" for source in range(world_size)]
    sources = state.sources("key", world_size, rank, world_size)
    assert state.chosen([values[source] for source in sources], world_size, rank, world_size) == f"of {rank}"
    assert not state.needs_values(world_size, world_size)


@given(RANKS.filter(lambda count: count != 7))
def test_another_number_of_ranks_is_refused_by_default(world_size):
    with pytest.raises(WorldSizeError) as raised:
        PerRank("live").sources("data.position", 7, 0, world_size)
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.key, error.saved, error.current) == ("data.position", 7, world_size)
    assert "'data.position' is stored per rank, by 7 ranks" in str(error)


def test_the_first_rank_may_stand_for_all():
    state = PerRank("live", "first")
    assert state.sources("key", 2, 3, 4) == [0]
    assert state.chosen(["of 0"], 2, 3, 4) == "of 0"
    assert not state.needs_values(2, 4)


def test_a_function_gets_all_values_the_rank_and_the_number_of_ranks():
    seen = []

    def choose(values, rank, world_size):
        seen.append((list(values), rank, world_size))
        return values[rank % len(values)]

    state = PerRank("live", choose)
    assert state.sources("key", 3, 4, 5) == [0, 1, 2]
    assert state.needs_values(3, 5)
    assert state.chosen(["a", "b", "c"], 3, 4, 5) == "b"
    assert seen == [(["a", "b", "c"], 4, 5)]


def test_other_rules_are_refused():
    with pytest.raises(ValueError, match="on_resize must be 'error', 'first' or a function, not 'derive'"):
        PerRank(1, on_resize="derive")  # type: ignore[arg-type]


def test_values_per_rank_are_recognised():
    state = PerRank(3)
    assert per_rank_of(state) is state
    assert per_rank_of(3) is None
