"""Copies that ranks hold of one key: how they are compared, and what happens if they are not the same."""

from __future__ import annotations

import copy
import enum
import functools
import logging
import random
import re
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast._dcp.replicas import fingerprint, settle_differences
from holdfast._dcp.save_planner import DefaultSavePlanner
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from holdfast._formats.dcp.plan import SavePlan, TensorWriteData, WriteItem, WriteItemType
from holdfast.errors import ReplicaMismatchError
from tests.properties import examples
from tests.rank_pool import RankPool

# --- fingerprints ------------------------------------------------------------------------------------------------


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("content",)

    def __init__(self, content):
        self.content = content


@dataclass
class Record:
    name: str
    parts: list[Any] = field(default_factory=list)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Celsius(float):
    pass


def _has_operations(dtype: torch.dtype) -> bool:
    """Not those that torch knows by name only: integers below a byte, bits, packed and quantized numbers."""
    return not re.search(r"\.(u?int[1-7]|bits\w+|q\w+|float4\w+)$", str(dtype))


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and _has_operations(d)}, key=str)

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from([Colour.RED, Colour.BLUE, torch.float32, torch.int8, torch.device("cpu"), Celsius(1.5), 1j])
)
tensors = st.lists(st.integers(-5, 5), max_size=4).map(torch.tensor)
arrays = st.lists(st.integers(-5, 5), max_size=4).map(np.array)
hashables = st.text(max_size=3) | st.integers(0, 9).map(lambda n: n * 8) | st.tuples(st.integers(0, 3), st.text("ab"))
values = st.recursive(
    atoms | tensors | arrays | st.sets(hashables, max_size=4) | st.frozensets(hashables, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.dictionaries(hashables, inner, max_size=3).map(OrderedDict)
        | inner.map(lambda content: Plain(content=content, other=1))
        | inner.map(Slotted)
        | inner.map(lambda content: Record("name", [content]))
    ),
    max_leaves=8,
)


def rebuilt(value: Any) -> Any:
    """An equal value made anew, with sets and dicts filled in the opposite order."""
    if isinstance(value, (set, frozenset)):
        return type(value)(reversed([rebuilt(member) for member in value]))
    if isinstance(value, dict):
        return type(value)((rebuilt(key), rebuilt(child)) for key, child in reversed(value.items()))
    if isinstance(value, (list, tuple, deque)):
        return type(value)(rebuilt(child) for child in value)
    if isinstance(value, Slotted):
        return Slotted(rebuilt(value.content))
    if isinstance(value, Plain):
        return Plain(**rebuilt(vars(value)))
    if isinstance(value, Record):
        return Record(rebuilt(value.name), rebuilt(value.parts))
    return copy.deepcopy(value)


@settings(max_examples=examples(150))
@given(values)
def test_equal_values_have_equal_fingerprints_whatever_the_order_of_dicts_and_sets(value):
    assert fingerprint(value) == fingerprint(rebuilt(value))


def test_sets_that_iterate_in_another_order_are_equal():
    # Multiples of 8 fall into the same slot of a small set, which then keeps the order in which they came.
    one, other = (functools.reduce(lambda some, n: some | {n}, order, set()) for order in ([0, 8], [8, 0]))
    assert list(one) != list(other)
    assert fingerprint({"deep": [one]}) == fingerprint({"deep": [other]})


DIFFERENT = [
    (1, 2),
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ("a", b"a"),
    ("1", 1),
    (None, False),
    ([1, 2], [2, 1]),
    ([1, 2], (1, 2)),
    ([[1], 2], [[1, 2]]),
    (["ab", "c"], ["a", "bc"]),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    ({"a": {"b": 1}}, {"a": {"b": 2}}),
    ({1, 2}, {1, 3}),
    ({1, 2}, [1, 2]),
    ({1}, frozenset({1})),
    (Colour.RED, Colour.BLUE),
    (torch.float32, torch.float64),
    (Celsius(1.5), Celsius(2.5)),
    (Celsius(1.5), 1.5),
    (Plain(a=1), Plain(a=2)),
    (Plain(a=Plain(b=[1])), Plain(a=Plain(b=[2]))),
    (Plain(a=1), Plain(b=1)),
    (Slotted(1), Slotted(2)),
    (Record("a"), Record("b")),
    (Record("a", [torch.ones(1)]), Record("a", [torch.zeros(1)])),
    (deque([1, 2]), deque([2, 1])),
    (Counter("aab"), Counter("abb")),
    (defaultdict(int, a=1), defaultdict(int, a=2)),
    (range(5), range(6)),
    (slice(1), slice(2)),
    (ValueError("a"), ValueError("b")),
    (functools.partial(int, 1), functools.partial(int, 2)),
    (random.Random(1), random.Random(2)),
    (np.random.default_rng(1), np.random.default_rng(2)),
    (np.random.RandomState(1), np.random.RandomState(2)),
    (np.float32(1), np.float32(2)),
    (np.float32(1), np.float64(1)),
    (np.array([1, 2]), np.array([1, 3])),
    (np.array([1, 2]), np.array([[1, 2]])),
    (np.array([1, 2]), np.array([1, 2], dtype=np.int32)),
    (np.array([{1}, None], dtype=object), np.array([{2}, None], dtype=object)),
    (np.array(["a"]), np.array(["b"])),
    ((torch.eye(3).to_sparse(),), ((2 * torch.eye(3)).to_sparse(),)),
    ((torch.empty(2, device="meta"),), (torch.empty(3, device="meta"),)),
    (torch.Size([1, 2]), torch.Size([2, 1])),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_values_have_different_fingerprints(one, other):
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint({"deep": [one]}) != fingerprint({"deep": [other]})
    assert fingerprint(one) == fingerprint(copy.deepcopy(one))


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """A tensor of any bits; not-a-number included."""
    numel = int(np.prod(shape, dtype=int))
    highest = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, highest, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)


def flip_bit(tensor: torch.Tensor, position: int) -> torch.Tensor:
    raw = tensor.flatten().view(torch.uint8).clone()
    raw[position % raw.numel()] ^= 1
    return raw.view(tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_changes_the_fingerprint_of_a_tensor(dtype):
    for seed, shape in enumerate([[], [1], [7], [2, 3], [3, 1, 4]]):
        tensor = random_tensor(dtype, shape, seed)
        whole = fingerprint(tensor)
        assert whole == fingerprint(tensor.clone())
        assert whole.nbytes == tensor.numel() * dtype.itemsize
        for position in (0, 5, tensor.numel() * dtype.itemsize - 1):
            assert fingerprint(flip_bit(tensor, position)) != whole


@settings(max_examples=examples(50))
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([torch.int8, torch.int32, torch.bfloat16]))
def test_tensors_of_the_same_bytes_but_another_shape_or_dtype_differ(shape, dtype):
    tensor = random_tensor(dtype, shape, 0)
    reshaped = [tensor.unsqueeze(0), tensor.unsqueeze(-1), tensor.flatten(), tensor.reshape(shape[::-1])]
    same_bytes = tensor.flatten().view({1: torch.uint8, 2: torch.int16, 4: torch.float32}[dtype.itemsize])
    for other in [*reshaped, same_bytes.reshape(shape)]:
        if (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            assert fingerprint(tensor) != fingerprint(other)


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 4), min_size=2, max_size=4), st.data())
def test_only_the_elements_of_a_tensor_count_and_not_how_they_lie_in_memory(shape, data):
    tensor = torch.complex(torch.rand(shape), torch.rand(shape))
    order = data.draw(st.permutations(range(len(shape))))
    moved = tensor.permute(order)
    assert fingerprint(moved) == fingerprint(moved.contiguous())
    assert fingerprint(tensor.conj()) == fingerprint(tensor.conj().resolve_conj())
    assert fingerprint(tensor[..., ::2]) == fingerprint(tensor[..., ::2].clone())
    assert fingerprint(tensor.conj().imag) == fingerprint(tensor.conj().imag.resolve_neg().contiguous())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.complex128])
def test_a_single_element_of_any_stride_is_compared_by_its_bytes(dtype):
    column = torch.ones(1, 4, dtype=dtype)[:, 0]
    assert column.stride() == (4,)
    assert fingerprint(column) == fingerprint(torch.ones(1, dtype=dtype))
    assert fingerprint(column) != fingerprint(torch.zeros(1, dtype=dtype))


def test_empty_tensors_and_arrays_have_fingerprints_by_shape():
    assert fingerprint(torch.empty(0, 3)) != fingerprint(torch.empty(3, 0))
    assert fingerprint(np.empty((0, 3))) != fingerprint(np.empty((3, 0)))
    assert fingerprint(torch.empty(0, 3)) == fingerprint(torch.empty(0, 3))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["sparse", "meta", "jagged"],
)
def test_tensors_without_plain_bytes_inside_of_a_value_can_be_compared(tensor):
    assert fingerprint((tensor,)) == fingerprint((tensor,))


def test_objects_are_compared_by_what_is_stored_of_them():
    class Sampler:
        def __init__(self, epoch):
            self.epoch = epoch
            self.cache = object()

        def __getstate__(self):
            return {"epoch": self.epoch}

    assert fingerprint(Sampler(1)) == fingerprint(Sampler(1))
    assert fingerprint(Sampler(1)) != fingerprint(Sampler(2))


def test_what_an_object_merely_refers_to_does_not_make_it_different():
    logger = logging.getLogger("tests.replicas")
    holder = Plain(logger=logger, step=1)
    before = fingerprint(holder)
    logger.isEnabledFor(logging.DEBUG)  # loggers remember what they were asked
    logger.setLevel(logging.ERROR)
    assert fingerprint(holder) == before


def test_a_value_that_contains_itself_can_be_compared():
    def circle(content):
        ring: list[Any] = [content]
        ring.append(ring)
        return Plain(ring=ring)

    assert fingerprint(circle(1)) == fingerprint(circle(1))
    assert fingerprint(circle(1)) != fingerprint(circle(2))


def iter_of_nothing():
    yield from ()


def test_what_cannot_be_pickled_can_still_be_looked_at():
    assert fingerprint(lambda: None).digest
    assert fingerprint(iter_of_nothing()) == fingerprint(iter_of_nothing())


def test_a_huge_range_is_not_walked_through():
    assert fingerprint(range(10**15)) != fingerprint(range(10**15 + 1))


# --- settling ----------------------------------------------------------------------------------------------------


def value_item(key: str) -> WriteItem:
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)


def tensor_item(key: str, size=(2,), dtype=torch.float32, offset=0) -> WriteItem:
    offsets = torch.Size([offset] + [0] * (len(size) - 1))
    data = TensorWriteData(ChunkStorageMetadata(offsets, torch.Size(size)), TensorProperties(dtype), torch.Size(size))
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.TENSOR, tensor_data=data)


def plan_with(digests: dict[str, bytes]) -> SavePlan:
    items = [value_item(key) for key in digests]
    return SavePlan(items, replica_digests={MetadataIndex(key): digest for key, digest in digests.items()})


def keys_of(plan: SavePlan) -> list[str]:
    return [item.index.fqn for item in plan.items]


copies = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([b"1", b"2"]), max_size=4), min_size=1, max_size=4
)


def differing_keys(per_rank: list[dict[str, bytes]]) -> set[str]:
    return {key for key in "abcd" if len({held[key] for held in per_rank if key in held}) > 1}


@settings(max_examples=examples(50))
@given(copies, st.sampled_from(["warn", "ignore"]))
def test_of_copies_that_differ_the_lowest_rank_keeps_its_own_and_the_rest_stays(per_rank, on_mismatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settled = settle_differences([plan_with(held) for held in per_rank], on_mismatch)
    differing = differing_keys(per_rank)
    for rank, (plan, held) in enumerate(zip(settled, per_rank, strict=True)):
        lower = {key for other in per_rank[:rank] for key in other}
        assert keys_of(plan) == [key for key in held if key not in differing or key not in lower]


@settings(max_examples=examples(50))
@given(copies)
def test_copies_that_differ_are_an_error_that_names_every_key_if_asked_to(per_rank):
    plans, differing = [plan_with(held) for held in per_rank], differing_keys(per_rank)
    if not differing:
        assert settle_differences(plans, "error") == plans
        return
    with pytest.raises(ReplicaMismatchError, match="Nothing was saved") as error:
        settle_differences(plans, "error")
    assert error.value.keys.keys() == differing
    for key in differing:
        assert f"'{key}'" in str(error.value)
        assert " != " in error.value.keys[key]


def test_a_warning_names_keys_and_ranks_and_what_to_do():
    plans = [plan_with({"same": b"0", "step": digest}) for digest in (b"1", b"2", b"1", b"3")]
    with pytest.warns(UserWarning, match="different values under 1 key") as caught:
        settle_differences(plans, "warn")
    text = str(caught[0].message)
    assert "'step': ranks 0,2 != ranks 1 != ranks 3" in text
    assert "'same'" not in text
    assert "lowest rank is saved" in text
    assert "HOLDFAST_REPLICA_MISMATCH" in text


def test_nothing_is_said_when_it_is_off_or_when_copies_are_equal():
    different = [plan_with({"step": b"1"}), plan_with({"step": b"2"})]
    equal = [plan_with({"step": b"1"}), plan_with({"step": b"1"})]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [keys_of(plan) for plan in settle_differences(different, "ignore")] == [["step"], []]
        assert settle_differences(equal, "warn") == equal
        assert settle_differences(equal, "error") == equal


def test_long_lists_of_keys_and_ranks_are_cut():
    plans = [plan_with({f"key{n}": bytes([rank != 5]) for n in range(50)}) for rank in range(30)]
    with pytest.raises(ReplicaMismatchError, match="50 key") as error:
        settle_differences(plans, "error")
    text = str(error.value)
    assert "and 30 more" in text
    assert "(29 in all)" in text
    assert len(text) < 5000


@pytest.mark.parametrize("on_mismatch", ["ignore", "warn", "error"])
@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (value_item("key"), tensor_item("key"), ["a value", "a tensor of shape [2]"]),
        (tensor_item("key", (2, 3)), tensor_item("key", (3, 2)), ["[2, 3]", "[3, 2]"]),
        (tensor_item("key"), tensor_item("key", dtype=torch.float64), ["torch.float32", "torch.float64"]),
        (tensor_item("key", (4,)), tensor_item("key", (8,), offset=4), ["[4]", "[8]"]),
    ],
    ids=["kind", "shape", "dtype", "shards-of-different-tensors"],
)
def test_different_kinds_of_things_under_one_key_are_always_an_error(on_mismatch, one, other, shown):
    plans = [SavePlan([value_item("fine"), item]) for item in (one, other, one)]
    with pytest.raises(ReplicaMismatchError, match="'key'") as error:
        settle_differences(plans, on_mismatch)
    text = str(error.value)
    assert list(error.value.keys) == ["key"]
    assert "'fine'" not in text
    assert "on ranks 0,2" in text
    assert "on ranks 1" in text
    for part in shown:
        assert part in text


def test_chunks_of_one_tensor_and_a_list_of_keys_per_rank_are_fine():
    plans = [SavePlan([tensor_item("t", offset=2 * rank), value_item(f"only{rank}")]) for rank in range(3)]
    assert settle_differences(plans, "error") == plans


# --- on ranks ----------------------------------------------------------------------------------------------------


def planned(make_state, on_mismatch):
    """Plan as the save flow does: the keys that each rank is left with, and the warnings of the coordinator."""
    planner = DefaultSavePlanner(replica_mismatch=on_mismatch)
    planner.peers = tuple(range(dist.get_world_size()))
    planner.set_up_planner(make_state(dist.get_rank()), None, is_coordinator=dist.get_rank() == 0)
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, planner.create_local_plan())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            global_plan, _ = planner.create_global_plan(plans)
        except ReplicaMismatchError as error:
            return "error", error.keys
    return [keys_of(plan) for plan in global_plan], [str(warning.message) for warning in caught]


def state_in_any_order(rank):
    order = [0, 8, 16, 24] if rank % 2 else [24, 16, 8, 0]
    return {
        "tensor": torch.arange(4.0).reshape(2, 2).t() if rank % 2 else torch.arange(4.0).reshape(2, 2).t().contiguous(),
        "config": ({str(n): {n} for n in order}, set(order)),
        "object": Record("name", [set(order)]),
        "nan": float("nan"),
    }


def test_ranks_that_hold_equal_values_in_different_order_agree(ranks: RankPool):
    for kept, told in ranks(3).run(planned, state_in_any_order, "warn"):
        assert told == []
        assert sorted(key for keys in kept for key in keys) == ["config", "nan", "object", "tensor"]


def state_that_differs(rank):
    return {"step": min(rank, 1), "tensor": torch.full((2,), float(rank == 2)), "same": "same"}


def test_ranks_that_hold_different_values_are_told_apart(ranks: RankPool):
    for kept, told in ranks(3).run(planned, state_that_differs, "warn"):
        assert {"step", "tensor"} <= set(kept[0])
        assert len(told) == 1
        assert "'step': ranks 0 != ranks 1,2" in told[0]
        assert "'tensor': ranks 0,1 != ranks 2" in told[0]
    for _, named in ranks(3).run(planned, state_that_differs, "error"):
        assert named.keys() == {"step", "tensor"}
    for kept, told in ranks(3).run(planned, state_that_differs, "ignore"):
        assert told == []
        assert sorted(key for keys in kept for key in keys) == ["same", "step", "tensor"]


def replicated_shards(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    sharded = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])
    replicated = distribute_tensor(torch.arange(3.0), mesh, [Replicate(), Replicate()])
    if rank == 3:
        sharded.to_local()[0] += 1
    assert isinstance(sharded, DTensor)
    return {"sharded": sharded, "replicated": replicated}


def test_replicas_of_shards_that_differ_are_noticed(ranks: RankPool):
    for kept, told in ranks(4).run(planned, replicated_shards, "warn"):
        assert len(told) == 1
        assert "'sharded': ranks 1 != ranks 3" in told[0]
        assert "'replicated'" not in told[0]
        assert sorted(key for keys in kept for key in keys) == ["replicated", "sharded", "sharded"]
        assert "sharded" in kept[1]
