"""Who reads what for whom: random layouts on simulated ranks, which exchange bytes between threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast._base.boxes import Box, cut, place_of, volume
from holdfast._base.tuning import SHARED_PART_BYTES, SMALLEST_SHARED_READ
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import ChunkPlace, ReadRequest, Source
from holdfast._load.cooperative_reading import Buffers, CooperativeReading, Delivered
from holdfast._load.filling import Converted
from holdfast._load.shared_reads import SharedReads, plan_shared_reads
from holdfast._load.shared_wants import Want, encode_wants
from holdfast._ranks.transfers import Parcel
from holdfast._ranks.trees import groups_of, strides_of
from tests.properties import examples


class ArraySource(Source):
    """Arrays as a checkpoint, stored in any boxes; notes what is read."""

    location, format, identity = "arrays", "native", "one"

    def __init__(self, arrays: Mapping[str, np.ndarray], chunks: Mapping[str, Sequence[Box]], whole: bool) -> None:
        self.arrays, self._chunks = arrays, chunks
        self.checks_parts = not whole
        self.requests: list[tuple[str, Box]] = []
        self.read_bytes = 0
        self.damaged: set[str] = set()
        self.lock = threading.Lock()

    @property
    def tensors(self) -> Mapping[str, TensorRef]:
        return {key: TensorRef(key, dtype_named("float32"), array.shape) for key, array in self.arrays.items()}

    @property
    def tree(self) -> Any:
        return dict(self.tensors)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return {}

    def chunks(self, key: str) -> Sequence[Box]:
        return self._chunks[key]

    def chunk_places(self, key: str) -> Sequence[ChunkPlace]:
        return [ChunkPlace(*box, "file", 0, volume(box.sizes) * 4, None) for box in self._chunks[key]]

    def files(self) -> list[tuple[str, int]]:
        return []

    def read(self, requests: Sequence[ReadRequest], *, verify: bool = True, memory: int | None = None) -> int:
        total = 0
        for request in requests:
            with self.lock:
                self.requests.append((request.key, Box(request.offsets, request.sizes)))
            if request.key in self.damaged:
                raise OSError(f"{request.key} is damaged")
            elements = self.arrays[request.key].view("<u4")[place_of(request.offsets, request.sizes)]
            request.into[...] = elements
            total += elements.nbytes
        with self.lock:
            self.read_bytes += total
        return total


class Bus:
    """Queues between simulated ranks."""

    def __init__(self, size: int, largest: int = 32) -> None:
        """``largest`` is the size of the groups of the tree of ranks."""
        self.size = size
        self.strides = strides_of(size, largest=largest)
        self.queues = {(a, b): queue.Queue[bytes]() for a in range(size) for b in range(size)}

    def are_connected(self, one: int, other: int) -> bool:
        return any(other in group.members for group in groups_of(one, self.size, self.strides))

    def of(self, rank: int) -> Any:
        bus = self

        class OfRank:
            strides = bus.strides

            def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
                for to, content in sends:
                    assert bus.are_connected(rank, to)
                    bus.queues[rank, to].put(content.tobytes())
                for sender, content in receives:
                    content[:] = np.frombuffer(bus.queues[sender, rank].get(timeout=20), np.uint8)

        return OfRank()


def planned(
    source: Source, wants: Mapping[tuple[int, ...], Sequence[Want]], rank: int, part: int = SHARED_PART_BYTES
) -> SharedReads:
    messages = {ranks: encode_wants(wanted) for ranks, wanted in wants.items()}
    return plan_shared_reads(source, messages, rank, part)


def place_for(box: Box, kind: str) -> tuple[Any, Any]:
    """Memory for a box, and what is read into."""
    if kind == "dense":
        array = np.full(box.sizes, -1, np.float32)
        return array, array.view("<u4")
    if kind == "transposed":
        array = np.full(box.sizes[::-1], -1, np.float32).T
        return array, array.T.view("<u4").T
    tensor = torch.full(box.sizes, -1, dtype=torch.float64)
    return tensor, Converted(tensor, TensorRef("", dtype_named("float32"), box.sizes))


def load_on(
    source: ArraySource, wanted: Sequence[Sequence[tuple[int, Box, str]]], buffers: Buffers, largest: int = 32
) -> tuple[list[Any], list[list[tuple[int, Box, Any]]]]:
    """Load on simulated ranks; the outcome and the filled memory of each."""
    keys = sorted(source.arrays)
    bus = Bus(len(wanted), largest)
    states = [[(tensor, box, *place_for(box, kind)) for tensor, box, kind in of_rank] for of_rank in wanted]
    places: list[dict[tuple[int, Box], list[Any]]] = [{} for _ in wanted]
    for rank, state in enumerate(states):
        for tensor, box, _, into in state:
            places[rank].setdefault((tensor, box), []).append(into)
    wants = {
        (rank,): [
            Want(*key, len(into) == 1 and isinstance(into[0], np.ndarray) and into[0].flags.c_contiguous)
            for key, into in sorted(places[rank].items(), key=lambda item: item[0])
        ]
        for rank in range(len(wanted))
    }

    def one(rank: int) -> Any:
        plan = planned(source, wants, rank, buffers.part)
        done = Delivered()
        try:
            if not plan.is_empty:
                done = CooperativeReading(plan, source, rank, places[rank], bus.of(rank), buffers).run()
        except OSError as error:
            return error
        for key, into in places[rank].items():
            for place in into:
                for box in plan.alone.get(key, [key[1]]):
                    inside = place_of(*box, origin=key[1].offsets)
                    source.read([ReadRequest(keys[key[0]], *box, place[inside])])
                    done.elements += volume(box.sizes)
        return done

    with ThreadPoolExecutor(len(wanted)) as pool:
        outcomes = list(pool.map(one, range(len(wanted))))
    return outcomes, [[(tensor, box, memory) for tensor, box, memory, _ in state] for state in states]


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - at)) for at, size in zip(offsets, shape, strict=True)]
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def layouts(draw: st.DrawFn, most: int = 4) -> tuple[ArraySource, list[list[tuple[int, Box, str]]], Buffers]:
    arrays, chunks = {}, {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        arrays[f"t{number}"] = np.arange(volume(shape), dtype=np.float32).reshape(shape) + 1000 * number
        chunks[f"t{number}"] = list(cut(Box((0,) * len(shape), shape), draw(st.integers(1, max(1, volume(shape))))))
    source = ArraySource(arrays, chunks, draw(st.booleans()))
    popular = {key: draw(st.lists(boxes_in(array.shape), min_size=1, max_size=3)) for key, array in arrays.items()}
    kinds = st.sampled_from(["dense", "transposed", "cast"])
    wanted = [
        [
            (number, draw(st.one_of(st.sampled_from(popular[key]), boxes_in(arrays[key].shape))), draw(kinds))
            for number, key in enumerate(sorted(arrays))
            for _ in range(draw(st.integers(0, 2)))
        ]
        for _ in range(draw(st.integers(2, most)))
    ]
    part = draw(st.sampled_from([4, 16, 64, 4096]))
    return source, wanted, Buffers(part, draw(st.integers(1, 2)), draw(st.integers(1, 3)), 1 << 20)


def _two_places_for_a_part_of_what_is_read_whole() -> Any:
    first, both = Box((0,), (1,)), Box((0,), (2,))
    source = ArraySource({"t0": np.arange(2, dtype=np.float32)}, {"t0": [both]}, True)
    return source, [[(0, first, "dense")], [(0, first, "dense"), (0, both, "dense")]], Buffers(4, 1, 1, 1 << 20)


@example(_two_places_for_a_part_of_what_is_read_whole())
@given(layouts())
@settings(max_examples=examples(600))
def test_every_rank_gets_every_element_it_wants_from_whoever_reads_it(layout):
    source, wanted, buffers = layout
    outcomes, states = load_on(source, wanted, buffers)
    keys = sorted(source.arrays)
    for outcome, state in zip(outcomes, states, strict=True):
        for tensor, box, memory in state:
            expected = source.arrays[keys[tensor]][place_of(*box)]
            np.testing.assert_array_equal(np.asarray(memory), expected)
        assert outcome.elements == sum(volume(box.sizes) for _, box, _ in state)
    directly = sum(volume(box.sizes) for of_rank in wanted for _, box, _ in of_rank) * 4
    assert source.read_bytes <= 1.05 * directly


@given(layouts(most=9), st.sampled_from([2, 3, 4]))
@settings(max_examples=examples(150))
def test_what_is_read_reaches_ranks_in_other_groups_of_the_tree(layout, largest):
    source, wanted, buffers = layout
    outcomes, states = load_on(source, wanted, buffers, largest)
    keys = sorted(source.arrays)
    for outcome, state in zip(outcomes, states, strict=True):
        for tensor, box, memory in state:
            np.testing.assert_array_equal(np.asarray(memory), source.arrays[keys[tensor]][place_of(*box)])
        assert outcome.elements == sum(volume(box.sizes) for _, box, _ in state)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_all_ranks_want_is_read_once_by_all_of_them_alike(size):
    shape = (4 * size, SMALLEST_SHARED_READ // 16)
    source = ArraySource({"w": np.random.rand(*shape).astype(np.float32)}, {"w": [Box((0, 0), shape)]}, False)
    whole = Box((0, 0), shape)
    outcomes, states = load_on(source, [[(0, whole, "dense")] for _ in range(size)], Buffers.within(None))
    nbytes = volume(shape) * 4
    assert source.read_bytes == nbytes
    assert [done.bytes_read for done in outcomes] == [nbytes // size] * size
    assert [done.bytes_received for done in outcomes] == [nbytes - nbytes // size] * size
    assert all((memory == source.arrays["w"]).all() for state in states for _, _, memory in state)


def test_small_tensors_are_read_by_one_rank_and_sent_together():
    arrays = {f"t{number:03}": np.full(7, number, np.float32) for number in range(50)}
    source = ArraySource(arrays, {key: [Box((0,), (7,))] for key in arrays}, False)
    wants = {(0, 1, 2): [Want(number, Box((0,), (7,)), True) for number in range(50)]}
    (batches,) = planned(source, wants, 0).batches.values()
    assert [len(batch.units) for batch in batches] == [50]


def test_ranks_that_want_different_things_read_them_themselves():
    shape = (8, 1 << 20)
    source = ArraySource({"w": np.zeros(shape, np.float32)}, {"w": [Box((0, 0), shape)]}, False)
    wants = {(rank,): [Want(0, Box((4 * rank, 0), (4, 1 << 20)), True)] for rank in range(2)}
    assert planned(source, wants, 0).is_empty


def test_columns_of_one_chunk_are_read_as_rows_by_one_and_sent_to_those_who_want_them():
    shape = (64, 1 << 12)
    source = ArraySource({"w": np.random.rand(*shape).astype(np.float32)}, {"w": [Box((0, 0), shape)]}, False)
    wanted = [[(0, Box((0, 1 << 11 if rank else 0), (64, 1 << 11)), "dense")] for rank in range(2)]
    _, states = load_on(source, wanted, Buffers.within(None))
    assert source.read_bytes == volume(shape) * 4
    assert all(box.sizes[1] == 1 << 12 for _, box in source.requests)
    for rank, ((_, _, memory),) in enumerate(states):
        assert (memory == source.arrays["w"][:, rank << 11 : (rank + 1) << 11]).all()


def test_who_reads_much_alone_reads_less_for_others():
    shape = (64, 1 << 18)
    arrays = {"own": np.zeros(shape, np.float32), "all": np.zeros(shape, np.float32)}
    whole = Box((0, 0), shape)
    source = ArraySource(arrays, {key: [whole] for key in arrays}, False)
    wants = {(0,): [Want(0, whole, True), Want(1, whole, True)], (1, 2): [Want(0, whole, True)]}
    batches = planned(source, wants, 0).batches
    read = {rank: sum(unit.nbytes for batch in of_rank for unit in batch.units) for rank, of_rank in batches.items()}
    assert read == {1: 32 << 20, 2: 32 << 20}


def test_chunks_that_have_one_digest_are_read_whole_by_a_rank_with_memory_for_them():
    shape = (64, 1 << 15)
    source = ArraySource({"w": np.random.rand(*shape).astype(np.float32)}, {"w": [Box((0, 0), shape)]}, True)
    whole = Box((0, 0), shape)
    wanted = [[(0, whole, kind)] for kind in ("cast", "transposed", "dense")]
    outcomes, states = load_on(source, wanted, Buffers(1 << 20, 2, 2, 1 << 20))
    assert source.requests == [("w", whole)]
    assert [done.bytes_read for done in outcomes] == [0, 0, volume(shape) * 4]
    assert all((np.asarray(memory) == source.arrays["w"]).all() for state in states for _, _, memory in state)


def test_a_chunk_with_one_digest_that_nobody_has_memory_for_is_not_shared():
    shape = (64, 1 << 15)
    whole = Box((0, 0), shape)
    source = ArraySource({"w": np.zeros(shape, np.float32)}, {"w": [whole]}, True)
    assert planned(source, {(0, 1): [Want(0, whole, False)]}, 0, 1 << 20).is_empty


def test_after_damage_all_rounds_are_gone_through_and_the_reader_raises():
    arrays = {f"t{number}": np.random.rand(4, 1 << 18).astype(np.float32) for number in range(6)}
    whole = Box((0, 0), (4, 1 << 18))
    source = ArraySource(arrays, {key: [whole] for key in arrays}, False)
    source.damaged = {"t1"}
    wanted = [[(number, whole, "dense") for number in range(6)] for _ in range(3)]
    outcomes, _ = load_on(source, wanted, Buffers(1 << 20, 2, 2, 1 << 20))
    failed = [isinstance(outcome, OSError) for outcome in outcomes]
    assert failed.count(True) in (1, 2)  # whoever reads parts of that tensor; nobody waits for ever
    assert len([key for key, _ in source.requests if key == "t1"]) <= 4
