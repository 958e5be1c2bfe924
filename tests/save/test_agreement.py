"""Who writes what: everything once, evenly, and only if it is complete."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._base.boxes import Box
from holdfast._layout.descriptions import TensorDescription
from holdfast._ranks.differences import Differing, refuse_differing
from holdfast._save.agreement import agree
from holdfast.errors import InvalidPlanError, ReplicaMismatchError


def whole(key: str, *shape: int, **more: object) -> TensorDescription:
    return TensorDescription(key, "float32", shape, "replicated", (Box((0,) * len(shape), shape),), **more)


def rows(key: str, height: int, *spans: tuple[int, int], width: int = 2) -> TensorDescription:
    boxes = tuple(Box((start, 0), (end - start, width)) for start, end in spans)
    return TensorDescription(key, "float32", (height, width), "sharded", boxes)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[list[list[TensorDescription]], dict[str, int]]:
    """Tensors cut into rows, each of which some ranks hold."""
    world_size = draw(st.integers(1, 4))
    held: list[list[TensorDescription]] = [[] for _ in range(world_size)]
    heights = {}
    for number in range(draw(st.integers(0, 6))):
        height = draw(st.integers(0, 8))
        heights[f"t{number}"] = height
        cuts = sorted({0, height, *draw(st.lists(st.integers(0, height), max_size=4))})
        spans: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
        for span in itertools.pairwise(cuts):
            for rank in draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
                spans[rank].append(span)
        for rank in range(world_size):
            held[rank].append(rows(f"t{number}", height, *spans[rank]))
    return held, heights


@given(cut_tensors())
def test_every_element_is_written_once_by_a_rank_that_holds_it(case):
    held, heights = case
    agreed = agree(held)
    assert [tensor.key for tensor in agreed.tensors] == list(heights)
    covered: dict[str, list[int]] = {key: [] for key in heights}
    for rank, chunks in enumerate(agreed.chunks):
        assert list(chunks) == sorted(chunks, key=lambda chunk: (chunk.tensor, chunk.offsets))
        for chunk in chunks:
            assert agreed.tensors[chunk.tensor].key == chunk.key
            assert any(
                description.key == chunk.key and Box(chunk.offsets, chunk.sizes) in description.boxes
                for description in held[rank]
            )
            covered[chunk.key].extend(range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]))
    assert {key: sorted(numbers) for key, numbers in covered.items()} == {
        key: list(range(height)) for key, height in heights.items()
    }


def test_what_all_hold_is_shared_out_evenly():
    sizes = [100, 70, 60, 30, 20, 10, 1, 1]
    held = [[whole(f"t{n}", size) for n, size in enumerate(sizes)] for _ in range(3)]
    written = [sum(math.prod(chunk.sizes) for chunk in chunks) for chunks in agree(held).chunks]
    assert sum(written) == sum(sizes)
    assert max(written) <= 100


def test_who_writes_alone_is_given_less_of_the_rest():
    held = [[whole("own", 100), whole("a", 50), whole("b", 50)], [whole("a", 50), whole("b", 50)]]
    assert [[chunk.key for chunk in chunks] for chunks in agree(held).chunks] == [["own"], ["a", "b"]]


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        ([[rows("w", 8, (0, 4))]], r"8 of its 16 elements .* offsets \[4, 0\] of sizes \[4, 2\]"),
        (
            [[rows("w", 8, (0, 4))], [rows("w", 8, (5, 8))]],
            r"14 of its 16 .* offsets \[4, 0\] of sizes \[1, 2\]",
        ),
        (
            [[rows("w", 8, (0, 5))], [rows("w", 8, (4, 8))]],
            r"chunks \[offsets \[0, 0\], .* and .* overlap",
        ),
        ([[rows("w", 8, (0, 4))], [rows("w", 8, (4, 9))]], "outside"),
        ([[rows("w", 8)], [rows("w", 8)]], "0 of its 16 elements"),
    ],
)
def test_chunks_must_tile_their_tensor(held, problem):
    with pytest.raises(InvalidPlanError, match=problem) as caught:
        agree(held)
    assert caught.value.problems
    assert "'w'" in str(caught.value)


def test_copies_are_compared_box_by_box():
    one = rows("w", 8, (0, 4), (4, 8))
    held = [
        [one._replace(digests=(b"a", b"b"))],
        [one._replace(digests=(b"a", b"c"))],
        [rows("w", 8, (4, 8))._replace(digests=(b"b",))],
    ]
    agreed = agree(held)
    assert list(agreed.differing) == [Differing("w", ((0, 2), (1,)))]
    assert [len(chunks) for chunks in agreed.chunks] == [2, 0, 0]
    with pytest.raises(ReplicaMismatchError, match=r"'w': ranks 0,2 != ranks 1") as caught:
        refuse_differing(agreed.differing, "Do something.")
    assert caught.value.keys == {"w": "ranks 0,2 != ranks 1"}
    refuse_differing([], "Do something.")


def test_the_first_ranks_copy_counts_where_that_is_the_contract():
    held = [[whole("w", 4, from_first_rank=True)] for _ in range(3)]
    held[0].insert(0, whole("own", 100))  # it has more to write than the others, who would be asked otherwise
    agreed = agree(held)
    assert [len(chunks) for chunks in agreed.chunks] == [2, 0, 0]
    assert list(agreed.differing) == []


def test_ties_need_all_ranks_that_hold_the_tensor():
    tied = [whole("a", 4), whole("b", 4, tied_to="a"), whole("c", 4, tied_to="a")]
    untied = [whole("a", 4), whole("b", 4), whole("c", 4, tied_to="a")]
    assert agree([tied, tied]).ties == {"b": "a", "c": "a"}
    assert agree([tied, untied]).ties == {"c": "a"}
    assert agree([tied, [whole("b", 4)]]).ties == {"c": "a"}
    assert agree([tied, [whole("a", 4)]]).ties == {"c": "b"}
    from_behind = [whole("c", 4), whole("b", 4, tied_to="c"), whole("a", 4, tied_to="c")]
    assert agree([tied, from_behind]).ties == {"b": "a", "c": "a"}
    assert [tensor.key for tensor in agree([tied, untied]).tensors] == ["a", "b"]
    cast = [whole("a", 4), whole("b", 4, tied_to="a")._replace(dtype="bfloat16")]
    assert agree([cast]).ties == {}


def test_a_rank_whose_part_has_no_elements_agrees_with_any_tie():
    def part(key: str, *boxes: Box, tied_to: str | None = None) -> TensorDescription:
        return TensorDescription(key, "float32", (4,), "sharded", boxes, tied_to=tied_to)

    full, half = Box((0,), (4,)), Box((2,), (2,))
    tied = [part("a", full), part("b", full, tied_to="a")]
    nothing = [part("a"), part("b")]
    assert agree([tied, nothing]).ties == {"b": "a"}
    assert agree([nothing, tied, nothing]).ties == {"b": "a"}
    assert agree([nothing, [part("a", full), part("b", full)]]).ties == {}
    parts = [[part("a", Box((0,), (2,))), part("b", Box((0,), (2,)), tied_to="a")], [part("a", half), part("b", half)]]
    assert agree([*parts, nothing]).ties == {}  # one rank that has elements of both says that they are two


def test_the_other_name_of_a_tensor_need_not_be_known_to_all():
    assert agree([[], [whole("head", 4, tied_to="embed")]]).ties == {}


@pytest.mark.parametrize("other", [whole("w", 5), whole("w", 4)._replace(dtype="int32"), whole("w", 4, numpy="<f4")])
def test_one_key_is_one_kind_of_tensor(other):
    with pytest.raises(ReplicaMismatchError, match=r"'w'.*on ranks 0; .* on ranks 1,2") as caught:
        agree([[whole("w", 4)], [other], [other]])
    assert list(caught.value.keys) == ["w"]


def test_all_tensors_that_are_not_whole_are_named_together():
    with pytest.raises(InvalidPlanError, match="do not tile") as caught:
        agree([[rows("v", 8, (0, 4)), rows("w", 8, (0, 8)), rows("x", 8, (0, 5), (4, 8))]])
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["'v'", "'x'"]


def test_a_box_of_the_whole_size_at_another_place_is_outside():
    moved = TensorDescription("w", "float32", (8,), "sharded", (Box((2,), (8,)),))
    with pytest.raises(InvalidPlanError, match="outside"):
        agree([[moved], [moved]])


def test_copies_with_other_digests_differ_and_the_lowest_rank_writes_its_own():
    held = [[whole("w", 4, digests=(digest,))] for digest in (b"a", b"b", b"a")]
    agreed = agree(held)
    assert agreed.differing == [Differing("w", ((0, 2), (1,)))]
    assert [len(chunks) for chunks in agreed.chunks] == [1, 0, 0]
    assert agree([[whole("w", 4, digests=(b"a",))]] * 3).differing == []


def test_a_key_that_is_sharded_on_one_rank_and_whole_on_another_is_refused():
    with pytest.raises(ReplicaMismatchError, match=r"replicated tensor .* on ranks 0; a sharded tensor .* on ranks 1"):
        agree([[whole("w", 4, 2)], [rows("w", 4, (0, 4))]])
