"""The way of bytes through a tree of groups: all receivers get them once, from somebody that they are connected to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._ranks.tree_routes import Route, route_of
from holdfast._ranks.trees import groups_of, strides_of


def routes(size: int, origin: int, receivers: list[int], strides: list[int], turn: int = 0) -> dict[int, Route]:
    found = {rank: route_of(rank, origin, receivers, strides, turn) for rank in range(size)}
    return {rank: route for rank, route in found.items() if route is not None}


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[int]]:
    size = draw(st.integers(1, 90))
    return size, strides_of(size, draw(st.none() | st.integers(0, 8)), draw(st.sampled_from([2, 3, 4, 8, 32])))


@given(trees(), st.data())
def test_whoever_wants_it_gets_it_once_over_a_connection_that_exists(tree, data):
    size, strides = tree
    origin = data.draw(st.integers(0, size - 1))
    receivers = sorted(data.draw(st.sets(st.integers(0, size - 1))) | {origin})
    found = routes(size, origin, receivers, strides, data.draw(st.integers(0, 100)))
    assert set(receivers) <= set(found)
    assert found[origin].comes_from is None
    sent = {rank: [*route.passes_on, *route.serves] for rank, route in found.items()}
    came = [(to, rank) for rank, others in sent.items() for to in others]
    assert sorted(came) == sorted((rank, route.comes_from) for rank, route in found.items() if rank != origin)
    for to, rank in came:
        assert any(to in group.members for group in groups_of(rank, size, strides)), (rank, to)
        assert found[to].stage == found[rank].stage + 1
        assert found[to].is_last == (to in found[rank].serves)
    assert all(rank in receivers for rank, route in found.items() if route.is_last)


@pytest.mark.parametrize("size", [64, 1024, 16384])
def test_no_leader_sends_everything_to_all_of_its_group(size):
    strides = strides_of(size)
    leader = size // 2 // strides[1] * strides[1]
    route = route_of(leader, 1, range(size), strides)
    assert route is not None
    assert len(route.passes_on) + len(route.serves) <= 32
    assert not route.serves  # one of its group does


def test_the_ranks_of_one_group_get_it_from_its_reader():
    assert routes(4, 2, [0, 1, 2, 3], [1, 4]) == {
        0: Route(1, 2),
        1: Route(1, 2),
        2: Route(0, None, (), (0, 1, 3)),
        3: Route(1, 2),
    }


def test_nobody_sends_more_often_than_it_has_connections():
    strides = strides_of(4096, 8)
    sent = [len(route.passes_on) + len(route.serves) for route in routes(4096, 77, list(range(4096)), strides).values()]
    assert max(sent) <= 64
