"""Snapshots: equal to the source when they are taken, and deaf to everything that happens to it afterwards."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from holdfast._background.arenas import ArenaPool, Lease
from holdfast._background.snapshots import Snapshot, take_snapshot
from holdfast.errors import SnapshotError
from tests.rank_pool import RankPool
from tests.sharding import mesh_of_all_ranks


class MyTensor(torch.Tensor):
    """An ordinary subclass, with an attribute."""


def my_tensor() -> torch.Tensor:
    made = torch.arange(4.0).as_subclass(MyTensor)
    made.note = "kept"
    return made


def quantized() -> torch.Tensor:
    return torch._make_per_tensor_quantized_tensor(torch.tensor([1, 2, 3], dtype=torch.int8), 0.5, 0)


KINDS = {
    "vector": lambda: torch.arange(6.0),
    "0-d": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 4),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "rows of a larger one": lambda: torch.arange(40.0).reshape(10, 4)[3:5],
    "columns": lambda: torch.arange(40.0).reshape(10, 4)[:, 1:3],
    "every other": lambda: torch.arange(10.0)[::2],
    "expanded": lambda: torch.ones(1).expand(3),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.arange(5.0).bfloat16(),
    "float8": lambda: torch.arange(5.0).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j]),
    "conjugated": lambda: torch.tensor([1 + 2j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "four bits": lambda: torch.arange(4, dtype=torch.uint8).view(torch.uint4),
    "parameter": lambda: torch.nn.Parameter(torch.arange(4.0)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.arange(4.0), requires_grad=False),
    "with gradient": lambda: torch.arange(4.0, requires_grad=True),
    "computed": lambda: torch.arange(4.0, requires_grad=True) * 2,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": quantized,
    "subclass": my_tensor,
    "wrapper": lambda: TwoTensor(torch.arange(3.0), torch.arange(3.0) + 10),
}


def bits(tensor: torch.Tensor) -> Any:
    """The elements, comparable."""
    if isinstance(tensor, TwoTensor):
        return bits(tensor.a), bits(tensor.b)
    plain = tensor.detach()
    if isinstance(plain, MyTensor):
        plain = plain.as_subclass(torch.Tensor)
    if plain.layout is torch.sparse_coo:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.dtype is torch.uint4:
        plain = plain.view(torch.uint8)
    if plain.dtype is torch.float8_e4m3fn:
        plain = plain.view(torch.uint8)
    return plain.tolist()


def spoil(tensor: torch.Tensor) -> None:
    """Change the elements in place, whatever it takes."""
    with torch.no_grad():
        if isinstance(tensor, TwoTensor):
            spoil(tensor.a)
            spoil(tensor.b)
        elif tensor.layout is torch.sparse_coo:
            tensor._values().fill_(5)
        elif tensor.is_quantized or tensor.dtype is torch.uint4:
            tensor.untyped_storage().fill_(77)
        else:
            tensor.untyped_storage().fill_(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_is_copied_with_all_that_is_saved_of_it(kind: str) -> None:
    source = KINDS[kind]()
    expected = bits(source)

    staged = take_snapshot({"x": source})["x"]
    spoil(source)

    assert bits(staged) == expected
    assert type(staged) is type(source)
    assert (staged.dtype, staged.size(), staged.requires_grad) == (source.dtype, source.size(), source.requires_grad)
    assert staged.is_leaf
    if kind != "empty":
        assert bits(source) != expected, "the test did not change anything"


def test_a_dense_layout_is_kept() -> None:
    for kind in ("channels last", "transposed"):
        source = KINDS[kind]()
        assert take_snapshot({"x": source})["x"].stride() == source.stride()


def test_the_attributes_of_a_subclass_come_along() -> None:
    assert take_snapshot({"x": my_tensor()})["x"].note == "kept"


def test_a_meta_tensor_has_nothing_to_copy() -> None:
    source = torch.empty(3, device="meta")
    assert take_snapshot({"x": source})["x"] is source


@st.composite
def strided_views(draw: st.DrawFn) -> torch.Tensor:
    """A view of a larger tensor: sliced, stepped, transposed."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    view = torch.arange(float(torch.Size(sizes).numel())).reshape(sizes)
    for dim in range(view.dim()):
        start = draw(st.integers(0, view.size(dim)))
        view = view.narrow(dim, start, draw(st.integers(0, view.size(dim) - start)))
        if view.size(dim):
            index = [slice(None)] * view.dim()
            index[dim] = slice(None, None, draw(st.integers(1, 3)))
            view = view[tuple(index)]
    return view.permute(draw(st.permutations(range(view.dim()))))


@given(st.lists(strided_views(), max_size=6))
def test_any_views_are_copied_exactly(views: list[torch.Tensor]) -> None:
    expected = [view.tolist() for view in views]
    staged = take_snapshot({"views": views})["views"]
    for view in views:
        view.fill_(-1)
    assert [view.tolist() for view in staged] == expected


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Custom:
    values: list[int] = field(default_factory=lambda: [1])
    tensor: torch.Tensor = field(default_factory=lambda: torch.zeros(2))


def test_containers_keep_their_types_and_nothing_is_shared() -> None:
    state: dict[str, Any] = {
        "ordered": OrderedDict(b=torch.zeros(1), a=[1]),
        "default": defaultdict(list, {"k": [torch.zeros(1)]}),
        "user": UserDict({"k": torch.zeros(1)}),
        "point": Point(torch.zeros(1), [2]),
        "tuple": (torch.zeros(1), {"deep": [3]}),
        "set": {1},
        "custom": Custom(),
        1: {2: "int keys"},
    }
    staged = take_snapshot(state)
    assert [type(value) for value in staged.values()] == [type(value) for value in state.values()]
    assert list(staged["ordered"]) == ["b", "a"]
    assert staged["default"]["new"] == []
    assert staged[1] == {2: "int keys"}

    state["ordered"]["a"].append(9)
    state["ordered"]["b"].fill_(9)
    state["default"]["k"][0].fill_(9)
    state["user"]["k"].fill_(9)
    state["point"].x.fill_(9)
    state["point"].y.append(9)
    state["tuple"][0].fill_(9)
    state["tuple"][1]["deep"].append(9)
    state["set"].add(9)
    state["custom"].values.append(9)
    state["custom"].tensor.fill_(9)

    assert staged["ordered"]["a"] == [1]
    assert staged["point"].y == [2]
    assert staged["tuple"][1] == {"deep": [3]}
    assert staged["set"] == {1}
    assert staged["custom"].values == [1]
    zeros = [staged["ordered"]["b"], staged["default"]["k"][0], staged["user"]["k"], staged["point"].x]
    assert [tensor.sum().item() for tensor in (*zeros, staged["tuple"][0], staged["custom"].tensor)] == [0] * 6


class Facade(MutableMapping[str, Any]):
    """A mapping around another one, which a shallow copy would share."""

    def __init__(self, inner: dict[str, Any]) -> None:
        self.inner = inner

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.inner[key] = value

    def __delitem__(self, key: str) -> None:
        del self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class MyList(list[Any]):
    """A list with an attribute."""


@pytest.mark.parametrize("make", [Facade, lambda inner: MyList(inner.values()), UserDict, MappingProxyType])
def test_the_source_is_never_touched(make: Any) -> None:
    tensor, numbers = torch.zeros(3, requires_grad=True) * 1, [1]
    source = make({"tensor": tensor, "numbers": numbers})
    values = source if isinstance(source, list) else list(source.values())
    staged = take_snapshot({"x": source})["x"]
    copies = staged if isinstance(staged, list) else list(staged.values())
    assert values[0] is tensor
    assert values[1] is numbers
    assert type(staged) is (dict if make is MappingProxyType else type(source))
    with torch.no_grad():
        tensor.fill_(9)
    numbers.append(2)
    assert (copies[0].tolist(), copies[1]) == ([0.0] * 3, [1])


def test_tied_tensors_stay_tied_and_take_memory_once() -> None:
    model = torch.nn.Linear(16, 16, bias=False)
    lent: list[int] = []

    class Counting(ArenaPool):
        def lend(self, size: int) -> Lease:
            lent.append(size)
            return super().lend(size)

    state = {"a": model.state_dict()["weight"], "b": model.state_dict()["weight"]}
    staged = Snapshot(state, Counting()).fill()
    assert staged["a"].data_ptr() == staged["b"].data_ptr()
    assert lent == [16 * 16 * 4]


def test_only_the_elements_of_a_view_are_copied() -> None:
    first, second = take_snapshot({"x": [torch.zeros(5), torch.zeros(1_000_000)[5:10]]})["x"]
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 20


def test_a_tensor_inside_of_an_object_is_the_copy_that_the_state_has() -> None:
    tensor = torch.zeros(2)
    staged = take_snapshot({"tensor": tensor, "custom": Custom(tensor=tensor)})
    assert staged["custom"].tensor is staged["tensor"]


def test_a_computed_tensor_inside_of_an_object_is_copied() -> None:
    computed = torch.zeros(2, requires_grad=True) * 2
    state = {"computed": Custom(tensor=computed), "both": [Custom(tensor=computed)]}
    staged = take_snapshot(state)
    with torch.no_grad():
        computed.fill_(9)
    assert staged["computed"].tensor.tolist() == staged["both"][0].tensor.tolist() == [0, 0]
    assert state["computed"].tensor is computed


def test_the_default_device_makes_no_difference() -> None:
    source = {"empty": torch.empty(0), "ones": torch.ones(2)}
    with torch.device("meta"):
        staged = take_snapshot(source)
    assert [tensor.device.type for tensor in staged.values()] == ["cpu", "cpu"]


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(SnapshotError, match=r"'a\.b\.1', a lock") as caught:
        take_snapshot({"a": {"b": [1, Lock()]}})
    assert caught.value.key == "a.b.1"


def test_elements_can_be_copied_later_and_all_else_is_copied_at_once() -> None:
    state = {"tensor": torch.zeros(2), "list": [1]}
    snapshot = Snapshot(state, ArenaPool())
    state["list"].append(2)
    state["tensor"].fill_(5)
    staged = snapshot.fill()
    assert staged["list"] == [1]
    assert staged["tensor"].tolist() == [5, 5]


def test_a_filled_snapshot_lets_go_of_the_source() -> None:
    import weakref

    source = torch.zeros(3)
    gone = weakref.ref(source)
    snapshot = Snapshot({"x": source}, ArenaPool())
    snapshot.fill()
    del source
    assert gone() is None


def snapshot_of_dtensors() -> list[Any]:
    mesh = mesh_of_all_ranks()
    rank = dist.get_rank()
    sources = {
        "sharded": distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)]),
        "replicated": distribute_tensor(torch.arange(3.0), mesh, [Replicate()]),
        "0-d": distribute_tensor(torch.tensor(4.0), mesh, [Replicate()]),
        "parameter": torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])),
    }
    expected = {key: value.to_local().tolist() for key, value in sources.items()}
    staged = take_snapshot(sources)
    with torch.no_grad():
        for value in sources.values():
            value.to_local().fill_(-7)
    assert {key: value.to_local().tolist() for key, value in staged.items()} == expected
    for key, value in staged.items():
        assert type(value) is type(sources[key]), key
        assert isinstance(value, DTensor)
        assert value.placements == sources[key].placements
        assert value.device_mesh == mesh
        assert value.requires_grad == sources[key].requires_grad
    return [rank, staged["sharded"].size(0)]


def test_dtensors_of_all_kinds_are_private(ranks: RankPool) -> None:
    assert ranks(2).run(snapshot_of_dtensors) == [[0, 5], [1, 5]]


def snapshot_of_sharded_tensor() -> list[Any]:
    rank = dist.get_rank()

    def part(row: int) -> LocalShard:
        where = ShardMetadata(shard_offsets=[row, 0], shard_sizes=[1, 2], placement=f"rank:{rank}/cpu")
        return LocalShard(torch.full((1, 2), float(row)), where)

    source = init_from_local_shards([part(2 * rank), part(2 * rank + 1)], 2 * dist.get_world_size(), 2)
    staged = take_snapshot({"x": source})["x"]
    for shard in source.local_shards():
        shard.tensor.fill_(-7)
    assert isinstance(staged, ShardedTensor)
    assert staged.metadata() == source.metadata()
    assert staged.sharding_spec() == source.sharding_spec()
    assert staged._process_group is source._process_group
    return [(shard.metadata.shard_offsets[0], shard.tensor.tolist()) for shard in staged.local_shards()]


def test_sharded_tensors_are_private(ranks: RankPool) -> None:
    first, second = ranks(2).run(snapshot_of_sharded_tensor)
    assert first == [(0, [[0.0, 0.0]]), (1, [[1.0, 1.0]])]
    assert second == [(2, [[2.0, 2.0]]), (3, [[3.0, 3.0]])]
