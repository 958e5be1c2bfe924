"""Who takes an item that several could take: exactly one of them, and by bytes a fair one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from holdfast._layout.owners import balanced_owners


@st.composite
def offers(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    count = draw(st.integers(1, 5))
    items = draw(st.integers(0, 15))
    groups = draw(st.lists(st.sets(st.integers(0, count - 1), min_size=1).map(sorted), min_size=1, max_size=3))
    candidates = [draw(st.sampled_from(groups)) for _ in range(items)]
    return candidates, [draw(st.integers(0, 50)) for _ in range(items)], count


def loads_of(owners: list[int], sizes: list[int], count: int) -> list[int]:
    return [sum(size for owner, size in zip(owners, sizes, strict=True) if owner == one) for one in range(count)]


@given(offers())
def test_each_item_goes_to_the_candidate_with_least_at_its_turn_and_the_largest_come_first(offer):
    candidates, sizes, count = offer
    loads = [0] * count
    expected = dict[int, int]()
    for number, taking in enumerate(candidates):
        if len(taking) == 1:
            expected[number] = taking[0]
            loads[taking[0]] += max(1, sizes[number])
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        if number not in expected:
            expected[number] = min(candidates[number], key=lambda one: (loads[one], one))
            loads[expected[number]] += max(1, sizes[number])
    assert balanced_owners(candidates, sizes, count) == [expected[number] for number in range(len(sizes))]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 3))
def test_what_all_can_take_is_within_a_third_of_the_best_possible(sizes, count):
    loads = loads_of(balanced_owners([range(count)] * len(sizes), sizes, count), sizes, count)
    ways = itertools.product(range(count), repeat=len(sizes))
    best = min(max(loads_of(list(owners), sizes, count)) for owners in ways)
    assert sum(loads) == sum(sizes)
    # What is known of placing the largest first (Graham 1969).
    assert 3 * count * max(loads) <= (4 * count - 1) * best


def test_items_without_bytes_are_spread_too():
    assert sorted(balanced_owners([range(3)] * 6, [0] * 6, 3)) == [0, 0, 1, 1, 2, 2]
