"""Every kind of tensor arrives as it was: from us to us, to stock and from stock, in one process and in several."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast.dcp as dcp
from holdfast.errors import UnsupportedTensorError
from tests.dcp.states import (
    DIRECTIONS,
    LAYOUTS,
    LIBRARIES,
    Layouts,
    blank,
    differing,
    distributed,
    load,
    numbered,
    parts,
    read_index,
    same_bits,
    same_parts,
    save,
    sharded_tensor,
)
from tests.rank_pool import RankPool
from tests.sharding import mesh_of_all_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

in_all_directions = pytest.mark.parametrize(("saver", "loader"), DIRECTIONS)


class Tagged(torch.Tensor):
    """A subclass that is an ordinary tensor otherwise."""


# --- one process ---------------------------------------------------------------------------------------------------

KINDS = {
    "plain": lambda: numbered(4, 6),
    "parameter": lambda: nn.Parameter(numbered(4, 6)),
    "buffer": lambda: nn.Buffer(numbered(4, 6)),
    "requires grad": lambda: numbered(4, 6).requires_grad_(),
    "result of a computation": lambda: numbered(4, 6).requires_grad_() * 2,
    "0-d": lambda: torch.tensor(3.5),
    "0-d parameter": lambda: nn.Parameter(torch.tensor(3.5)),
    "one element": lambda: torch.tensor([[[7.0]]]),
    "empty": lambda: torch.empty(0, 3),
    "empty at the end": lambda: torch.empty(2, 3, 0),
    "many dimensions": lambda: numbered(2, 1, 3, 1, 2, 1, 2),
    "transposed": lambda: numbered(4, 6).t(),
    "permuted": lambda: numbered(2, 3, 4).permute(2, 0, 1),
    "strided slice": lambda: numbered(8, 9)[1::3, 2::2],
    "view of a large buffer": lambda: numbered(100_000)[70_000:70_006].view(2, 3),
    "narrow column": lambda: numbered(500, 200)[:, 7],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "expanded scalar": lambda: torch.tensor(2.5).expand(2, 3),
    "overlapping windows": lambda: torch.arange(9.0).as_strided((4, 3), (2, 1)),
    "channels last": lambda: numbered(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: numbered(1, 2, 3, 2, 2).to(memory_format=torch.channels_last_3d),
    "conjugated": lambda: torch.complex(numbered(4, 6), numbered(4, 6, start=100)).conj(),
    "conjugated and transposed": lambda: torch.complex(numbered(4, 6), numbered(4, 6, start=100)).mH,
    "negated": lambda: torch.complex(numbered(4, 6), numbered(4, 6, start=100)).conj().imag,
    "negated in one stretch": lambda: torch._neg_view(numbered(4, 6)),
}


@in_all_directions
def test_every_kind_arrives_bit_by_bit(tmp_path, saver, loader):
    state = {name: make() for name, make in KINDS.items()}
    save(saver, state, tmp_path)
    target = {name: blank(tensor) for name, tensor in state.items()}
    load(loader, target, tmp_path)
    assert differing(target, state) == []


WRITABLE = [name for name in KINDS if name not in ("expanded", "expanded scalar", "overlapping windows")]


@in_all_directions
def test_destinations_of_every_kind_are_filled_in_place(tmp_path, saver, loader):
    expected = {name: KINDS[name]() for name in WRITABLE}
    save(saver, {name: tensor.detach().clone() for name, tensor in expected.items()}, tmp_path)
    target = {name: KINDS[name]() for name in WRITABLE}
    with torch.no_grad():
        for tensor in target.values():
            tensor.mul_(-3)
    given = dict(target)
    memory = {name: tensor.data_ptr() for name, tensor in target.items()}
    load(loader, target, tmp_path)
    assert differing(target, expected) == []
    for name in WRITABLE:
        assert target[name] is given[name]
        assert target[name].data_ptr() == memory[name]
        assert target[name].stride() == expected[name].stride()
        assert target[name].requires_grad == expected[name].requires_grad


@in_all_directions
def test_what_surrounds_a_view_stays_as_it_is(tmp_path, saver, loader):
    save(saver, {"view": numbered(2, 3)}, tmp_path)
    memory = torch.full((4, 6), -1.0)
    load(loader, {"view": memory[1::2, 1::2]}, tmp_path)
    expected = torch.full((4, 6), -1.0)
    expected[1::2, 1::2] = numbered(2, 3)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("kind", ["expanded", "expanded scalar"])
def test_a_destination_whose_elements_share_memory_is_refused_by_name(tmp_path, kind):
    save("ours", {"weight": torch.zeros(KINDS[kind]().shape)}, tmp_path)
    target = KINDS[kind]()
    with pytest.raises(
        dcp.CheckpointException, match=r"'weight' cannot be filled: .*refers to a single memory location"
    ):
        load("ours", {"weight": target}, tmp_path)
    assert torch.equal(target, KINDS[kind]())


def test_a_view_takes_no_more_room_than_its_own_elements(tmp_path):
    views = ["view of a large buffer", "narrow column", "strided slice"]
    save("ours", {name: KINDS[name]() for name in views}, tmp_path)
    stored = read_index(tmp_path).storage_data
    for index, place in stored.items():
        assert place.length < KINDS[index.fqn]().nbytes + 2000


def test_a_tensor_subclass_with_ordinary_memory_is_stored_as_an_ordinary_tensor(tmp_path):
    """Stock stores the class with it, and then cannot load it."""
    save("ours", {"tagged": numbered(3, 4).as_subclass(Tagged)}, tmp_path)
    for loader in LIBRARIES:
        target = {"tagged": torch.zeros(3, 4)}
        load(loader, target, tmp_path)
        assert torch.equal(target["tagged"], numbered(3, 4))


@pytest.mark.parametrize("saver", LIBRARIES)
def test_a_tensor_subclass_is_filled_and_stays_what_it_is(tmp_path, saver):
    save(saver, {"tagged": numbered(3, 4)}, tmp_path)
    target = {"tagged": torch.zeros(3, 4).as_subclass(Tagged)}
    load("ours", target, tmp_path)
    assert type(target["tagged"]) is Tagged
    assert torch.equal(target["tagged"].as_subclass(torch.Tensor), numbered(3, 4))


@in_all_directions
def test_tensors_that_share_memory_each_arrive(tmp_path, saver, loader):
    shared = numbered(4, 4)
    save(saver, {"tied": {"a": shared, "b": shared, "row": shared[1]}}, tmp_path)
    memory = torch.zeros(4, 4)
    target = {"tied": {"a": memory, "b": memory, "row": torch.zeros(4)}}
    load(loader, target, tmp_path)
    assert torch.equal(memory, shared)
    assert torch.equal(target["tied"]["row"], shared[1])


# --- what cannot be stored -----------------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} does not work on this class")

    def __repr__(self):
        return "Wrapper()"


class TraceableWrapper(Wrapper):
    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return TraceableWrapper(inner["inner"])


UNSUPPORTED = {
    "sparse": (lambda: numbered(3, 4).to_sparse(), "sparse_coo"),
    "sparse rows": (lambda: numbered(3, 4).to_sparse_csr(), "sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "jagged"),
    "mkldnn": (lambda: numbered(3, 4).to_mkldnn(), "mkldnn"),
    "meta": (lambda: torch.empty(3, 4, device="meta"), "meta device"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "lazy parameter"),
    "fake": (lambda: FakeTensorMode().from_tensor(numbered(3, 4)), "FakeTensor"),
    "wrapper": (lambda: Wrapper(numbered(3, 4)), "test_tensor_kinds.Wrapper"),
    "traceable wrapper": (lambda: TraceableWrapper(numbered(3, 4)), "test_tensor_kinds.TraceableWrapper"),
}


@pytest.mark.filterwarnings(
    "ignore:.*prototype", "ignore:Sparse .* tensor support", "ignore:.*Accessing the data pointer"
)
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_has_no_bytes_is_refused_by_name_and_nothing_is_written(tmp_path, kind):
    make, description = UNSUPPORTED[kind]
    with pytest.raises(dcp.CheckpointException) as caught:
        save("ours", {"good": numbered(2), "model": {"bad": make()}}, tmp_path)
    error = caught.value.failures[0][0]
    assert isinstance(error, UnsupportedTensorError)
    assert error.key == "model.bad"
    assert "'model.bad' is" in str(error)
    assert description in error.kind
    assert list(tmp_path.iterdir()) == []


def refuse_dtensors_that_cannot_be_stored(path):
    mesh = init_device_mesh("cpu", (2,))
    unreduced = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    without_data = DTensor.from_local(torch.empty(2, device="meta"), mesh, [Replicate()], run_check=False)
    misfit = DTensor.from_local(
        torch.ones(3 if dist.get_rank() else 1), mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,)
    )
    errors = []
    for bad in (unreduced, without_data, misfit):
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.save({"model": {"bad": bad}}, checkpoint_id=path)
        error = next(iter(caught.value.failures.values()))[0]
        errors.append((type(error), error.key, "'model.bad'" in str(error)))
    return errors


def test_dtensors_that_cannot_be_stored_are_refused_by_name(ranks: RankPool, tmp_path):
    refused = [(UnsupportedTensorError, "model.bad", True)] * 3
    assert ranks(2).run(refuse_dtensors_that_cannot_be_stored, tmp_path) == [refused] * 2


def refuse_to_load_into_an_unreduced_tensor(path):
    mesh = init_device_mesh("cpu", (2,))
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=path)
    local = torch.zeros(4)
    with pytest.raises(dcp.CheckpointException, match="'weight' has values that still have to be reduced"):
        dcp.load({"weight": DTensor.from_local(local, mesh, [Partial()], run_check=False)}, checkpoint_id=path)
    return local.sum().item()


def test_a_tensor_that_still_has_to_be_reduced_is_no_destination(ranks: RankPool, tmp_path):
    assert ranks(2).run(refuse_to_load_into_an_unreduced_tensor, tmp_path) == [0.0, 0.0]


# --- several processes: every kind on every rank ---------------------------------------------------------------------


def round_trip_of_kinds(path, saver, loader):
    """Every kind as a tensor that all ranks hold, and as the local data of a DTensor. The keys that did not arrive."""
    mesh = mesh_of_all_ranks()

    def spread(tensors):
        whole = {
            key: DTensor.from_local(t.detach(), mesh, [Replicate()], run_check=False) for key, t in tensors.items()
        }
        return {"plain": tensors, "local": whole}

    expected = {name: make() for name, make in KINDS.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Ranks hold different values")
        save(saver, spread(expected), path)
    target = spread({name: blank(tensor) for name, tensor in expected.items()})
    load(loader, target, path)
    arrived = {name: tensor.to_local() for name, tensor in target["local"].items()}
    return differing(target["plain"], expected) + differing(arrived, expected)


@in_all_directions
def test_every_kind_arrives_on_every_rank(ranks: RankPool, tmp_path, saver, loader):
    assert ranks(2).run(round_trip_of_kinds, tmp_path, saver, loader) == [[], []]


# --- several processes: DTensor and ShardedTensor --------------------------------------------------------------------


def round_trip_of_layouts(path, saver, loader, shapes):
    """Save and load a tensor of each shape in each layout; the keys that did not arrive on this rank."""
    layouts = Layouts()
    full = {f"{name} {shape}": (name, numbered(*shape)) for name in LAYOUTS for shape in shapes}
    save(saver, {key: layouts.lay_out(name, tensor) for key, (name, tensor) in full.items()}, path)
    target = {key: layouts.lay_out(name, blank(tensor)) for key, (name, tensor) in full.items()}
    load(loader, target, path)
    return [k for k, (name, tensor) in full.items() if not same_parts(target[k], layouts.lay_out(name, tensor))]


@in_all_directions
@pytest.mark.parametrize("world_size", [3, 4])
def test_every_layout_arrives_even_uneven_and_empty_on_some_ranks(ranks: RankPool, tmp_path, world_size, saver, loader):
    shapes = [(8, 12), (7, 5), (3, 2), (1, 9)]
    assert ranks(world_size).run(round_trip_of_layouts, tmp_path, saver, loader, shapes) == [[]] * world_size


def empty_and_scalar_dtensors(path, saver, loader):
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))

    def make(factor):
        return {
            "scalar": distributed(torch.tensor(7.5 * factor), line, [Replicate()]),
            "scalar on a grid": distributed(torch.tensor(7.5 * factor), grid, [Replicate(), Replicate()]),
            "no rows": distributed(torch.empty(0, 3), line, [Shard(0)]),
            "no columns": distributed(torch.empty(5, 0), grid, [Shard(0), Shard(1)]),
            "three dimensions": distributed(numbered(5, 3, 7, start=1) * factor, grid, [Shard(2), Shard(-3)]),
        }

    save(saver, make(1), path)
    target = make(0)
    load(loader, target, path)
    return [key for key, tensor in make(1).items() if not same_parts(tensor, target[key])]


@in_all_directions
def test_dtensors_with_no_or_many_dimensions_or_without_elements_arrive(ranks: RankPool, tmp_path, saver, loader):
    assert ranks(4).run(empty_and_scalar_dtensors, tmp_path, saver, loader) == [[]] * 4


def save_and_load_on_few_ranks(path, saver, loader):
    """A mesh of ranks 0 and 1 of 3. What rank 2, which holds nothing, is left with, and what the others got."""
    mesh = DeviceMesh("cpu", [0, 1])
    full = numbered(5, 2)
    save(saver, {"few": distributed(full, mesh, [Shard(0)])}, path)
    target = distributed(blank(full), mesh, [Shard(0)])
    load(loader, {"few": target}, path)
    everywhere = blank(full)
    load(loader, {"few": everywhere}, path)
    arrived = same_parts(target, distributed(full, mesh, [Shard(0)])) and same_bits(everywhere, full)
    return len(parts(target)), arrived


@in_all_directions
def test_a_rank_outside_of_the_mesh_takes_part_without_data(ranks: RankPool, tmp_path, saver, loader):
    inside, outside = (1, True), (0, True)
    assert ranks(3).run(save_and_load_on_few_ranks, tmp_path, saver, loader) == [inside, inside, outside]


def round_trip_of_a_flattened_view(path, loader):
    """Columns of a matrix, seen as one row: this rank's elements are several stretches of it."""
    mesh = init_device_mesh("cpu", (2,))
    full = numbered(3, 8)

    def flat(tensor):
        view = distributed(tensor, mesh, [Shard(1)]).view(-1)
        assert view.placements == (_StridedShard(0, split_factor=3),)
        return view

    save("ours", {"flat": flat(full)}, path)
    plain = blank(full.view(-1))
    load(loader, {"flat": plain}, path)
    target = flat(blank(full))
    load("ours", {"flat": target}, path)
    return same_bits(plain, full.view(-1)), same_parts(target, flat(full))


@pytest.mark.parametrize("loader", LIBRARIES)
def test_a_flattened_view_whose_parts_are_several_stretches_arrives(ranks: RankPool, tmp_path, loader):
    """Stock can load it, but records a wrong place when it saves such a tensor."""
    assert ranks(2).run(round_trip_of_a_flattened_view, tmp_path, loader) == [(True, True)] * 2


def save_while_gathering(path):
    """A DTensor whose ranks have not got all of its data yet."""
    mesh = init_device_mesh("cpu", (2,))
    gathering = distributed(numbered(8, 3), mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
    assert isinstance(gathering._local_tensor, AsyncCollectiveTensor)
    dcp.save({"weight": gathering}, checkpoint_id=path)
    loaded = {}
    for loader in LIBRARIES:
        loaded[loader] = blank(numbered(8, 3))
        load(loader, {"weight": loaded[loader]}, path)
    return differing(loaded, dict.fromkeys(LIBRARIES, numbered(8, 3)))


def test_a_dtensor_whose_data_is_still_on_its_way_is_waited_for(ranks: RankPool, tmp_path):
    """Stock stores the promise instead, and then cannot load it."""
    assert ranks(2).run(save_while_gathering, tmp_path) == [[], []]


def parts_of_a_nested_sharded_tensor(full):
    """Rows over pairs of ranks, columns within a pair: the outer shard is a ShardedTensor itself."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = 2 * (rank // 2), 3 * (rank % 2)
    local = full[row : row + 2, column : column + 3].clone()
    inner = init_from_local_shards(
        [LocalShard.from_tensor_and_offsets(local, [0, column], rank)], [2, 6], process_group=pairs[rank // 2]
    )
    shard = LocalShard(inner, ShardMetadata([row, 0], [2, 6], f"rank:{rank}/cpu"))
    return init_from_local_shards([shard], [4, 6], process_group=across[rank % 2])


def round_trip_of_nested(path, saver, loader):
    full = numbered(4, 6)
    save(saver, {"nested": parts_of_a_nested_sharded_tensor(full)}, path)
    target = parts_of_a_nested_sharded_tensor(blank(full))
    assert isinstance(target.local_shards()[0].tensor, ShardedTensor)
    load(loader, {"nested": target}, path)
    plain = blank(full)
    load(loader, {"nested": plain}, path)
    return same_parts(target, parts_of_a_nested_sharded_tensor(full)), same_bits(plain, full)


@in_all_directions
def test_nested_sharded_tensors_arrive(ranks: RankPool, tmp_path, saver, loader):
    assert ranks(4).run(round_trip_of_nested, tmp_path, saver, loader) == [(True, True)] * 4


def round_trip_of_odd_boxes(path, saver, loader):
    """A ShardedTensor that is no grid: ranks 0 and 2 have two boxes each, rank 1 has none."""
    boxes = [[((0, 0), (1, 6)), ((1, 0), (2, 2))], [], [((1, 2), (2, 4)), ((3, 0), (1, 6))]][dist.get_rank()]
    full = numbered(4, 6)
    save(saver, {"odd": sharded_tensor(full, boxes)}, path)
    target = sharded_tensor(blank(full), boxes)
    load(loader, {"odd": target}, path)
    return len(parts(target)), same_parts(target, sharded_tensor(full, boxes))


@in_all_directions
def test_a_sharded_tensor_may_have_several_shards_on_one_rank_and_none_on_another(
    ranks: RankPool, tmp_path, saver, loader
):
    assert ranks(3).run(round_trip_of_odd_boxes, tmp_path, saver, loader) == [(2, True), (0, True), (2, True)]


WRAPPED = {
    "as the placement says": [[((0, 0), (4, 2)), ((0, 2), (4, 1))], [((0, 3), (4, 3))]],
    "another split than the placement says": [[((0, 0), (4, 2)), ((0, 2), (4, 3))], [((0, 5), (4, 1))]],
    "rows on a column-wise placement": [[((0, 0), (1, 6)), ((1, 0), (1, 6))], [((2, 0), (2, 6))]],
    "all on one rank": [[((0, 0), (4, 2)), ((0, 2), (4, 4))], []],
}


def wrapped_shards(full, boxes):
    """A DTensor whose local tensor consists of several shards and knows where they belong, as torchrec makes them."""
    mine = boxes[dist.get_rank()]
    shards = [full[o[0] : o[0] + n[0], o[1] : o[1] + n[1]].clone() for o, n in mine]
    wrapper = LocalShardsWrapper(shards, [offsets for offsets, _ in mine])
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(wrapper, mesh, [Shard(1)], run_check=False, shape=full.shape, stride=full.stride())


def round_trip_of_wrapped_shards(path, saver, loader):
    full = numbered(4, 6)
    cases = dict(WRAPPED)
    if loader == "stock" and wrapped_shards(full, [[], []]).is_meta:  # before 2.10; stock wants to give it memory
        del cases["all on one rank"]
    save(saver, {key: wrapped_shards(full, boxes) for key, boxes in cases.items()}, path)
    target = {key: wrapped_shards(blank(full), boxes) for key, boxes in cases.items()}
    load(loader, target, path)
    plain = {key: blank(full) for key in cases}
    load(loader, plain, path)
    lost = differing(plain, dict.fromkeys(cases, full))
    for key, boxes in cases.items():
        found = target[key].to_local().local_shards()
        expected = wrapped_shards(full, boxes).to_local().local_shards()
        if len(found) != len(expected) or not all(map(same_bits, found, expected)):
            lost.append(key)
    return lost


@in_all_directions
def test_a_dtensor_over_several_local_shards_arrives(ranks: RankPool, tmp_path, saver, loader):
    assert ranks(2).run(round_trip_of_wrapped_shards, tmp_path, saver, loader) == [[], []]


# --- several processes: tensors that speak for themselves ------------------------------------------------------------


class Columns(torch.Tensor):
    """Every other column of a matrix: this rank's. The class says itself what it holds, in the words of a library."""

    library = ""

    @staticmethod
    def __new__(cls, full):
        columns = torch.Tensor._make_wrapper_subclass(cls, full.shape, dtype=full.dtype)
        mine = range(dist.get_rank(), full.shape[1], dist.get_world_size())
        columns.held = {(0, n): full[:, n : n + 1].clone() for n in mine}
        return columns

    def __create_write_items__(self, fqn, object):
        assert object is self
        words, nouns = LIBRARIES[self.library].planner, LIBRARIES[self.library].metadata
        return [
            words.WriteItem(
                nouns.MetadataIndex(fqn, chunk.offsets),
                words.WriteItemType.SHARD,
                tensor_data=words.TensorWriteData(chunk, nouns.TensorProperties(self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self):
        chunk = LIBRARIES[self.library].metadata.ChunkStorageMetadata
        return [chunk(torch.Size(offsets), column.size()) for offsets, column in self.held.items()]

    def __get_tensor_shard__(self, index):
        return self.held[tuple(index.offset)]

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} on {cls.__name__}")


class ColumnsInOurWords(Columns):
    library = "ours"


class ColumnsInTheWordsOfStock(Columns):
    library = "stock"


def round_trip_of_columns(path, cls, saver, loader):
    """Save the subclass or a plain tensor, load into a plain tensor or the subclass, as far as the library can."""
    full = numbered(3, 5)
    save(saver, {"columns": cls(full) if saver == "ours" or cls.library == "stock" else full}, path)
    plain = blank(full)
    load(loader, {"columns": plain}, path)
    if loader == "stock" and cls.library == "ours":
        return same_bits(plain, full)
    target = cls(blank(full))
    load(loader, {"columns": target}, path)
    return same_bits(plain, full) and all(same_bits(target.held[k], v) for k, v in cls(full).held.items())


@in_all_directions
@pytest.mark.parametrize("cls", [ColumnsInOurWords, ColumnsInTheWordsOfStock])
def test_a_tensor_that_speaks_for_itself_arrives(ranks: RankPool, tmp_path, cls, saver, loader):
    assert ranks(2).run(round_trip_of_columns, tmp_path, cls, saver, loader) == [True, True]


# --- destinations on the meta device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", LIBRARIES)
def test_destinations_on_the_meta_device_get_memory_without_a_process_group(tmp_path, saver):
    save(saver, {"weight": numbered(3, 4), "layers": [{"bias": numbered(2, dtype=torch.int16)}], "step": 3}, tmp_path)
    parameter = nn.Parameter(torch.empty(3, 4, device="meta"))
    state = {"weight": parameter, "layers": [{"bias": torch.empty(2, device="meta", dtype=torch.int16)}], "step": 0}
    layers = state["layers"]
    load("ours", state, tmp_path)
    assert isinstance(state["weight"], nn.Parameter)
    assert same_bits(state["weight"], numbered(3, 4))
    assert state["layers"] is layers
    assert same_bits(layers[0]["bias"], numbered(2, dtype=torch.int16))
    assert state["step"] == 3


def load_into_meta(path, saver):
    layouts = Layouts()
    full = numbered(7, 5)
    names = [name for name in LAYOUTS if name not in ("two shards per rank", "one rank has all")]
    save(saver, dict.fromkeys(names, full), path)
    target = {}
    for name in names:
        real = layouts.lay_out(name, full)
        if isinstance(real, DTensor):
            local = torch.empty_like(real.to_local(), device="meta")
            target[name] = DTensor.from_local(
                local, real.device_mesh, real.placements, run_check=False, shape=full.shape, stride=full.stride()
            )
        else:
            target[name] = torch.empty_like(real, device="meta")
    load("ours", target, path)
    return [name for name in names if not same_parts(target[name], layouts.lay_out(name, full))]


@pytest.mark.parametrize("saver", LIBRARIES)
def test_sharded_destinations_on_the_meta_device_get_memory(ranks: RankPool, tmp_path, saver):
    assert ranks(4).run(load_into_meta, tmp_path, saver) == [[]] * 4


def load_into_a_meta_sharded_tensor(path):
    dcp.save({"weight": numbered(4, 2)}, checkpoint_id=path)
    target = sharded_tensor(torch.empty(4, 2, device="meta"), [((2 * dist.get_rank(), 0), (2, 2))])
    with pytest.raises(dcp.CheckpointException, match="'weight' is a ShardedTensor on the meta device"):
        dcp.load({"weight": target}, checkpoint_id=path)


def test_a_sharded_tensor_on_the_meta_device_is_refused_by_name(ranks: RankPool, tmp_path):
    ranks(2).run(load_into_a_meta_sharded_tensor, tmp_path)
