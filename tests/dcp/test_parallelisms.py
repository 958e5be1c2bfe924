"""State dicts of real training: DDP, FSDP1, FSDP2, tensor parallel, both, HSDP. Saved by one, loaded by another."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.dcp.states import DIRECTIONS, LIBRARIES, load, same_bits, save
from tests.models import Net, ddp, fsdp1, fsdp2, fsdp2_over_tensor_parallel, hsdp, plain, tensor_parallel
from tests.rank_pool import RankPool
from tests.sharding import mesh_of_all_ranks, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def fsdp1_on_a_mesh(net):
    return fsdp1(net, device_mesh=mesh_of_all_ranks())


PARALLELISMS = [
    (ddp, 2),
    (fsdp1, 3),
    (fsdp1_on_a_mesh, 2),
    (fsdp2, 4),
    (tensor_parallel, 2),
    (fsdp2_over_tensor_parallel, 4),
    (fsdp2, 3),
    (hsdp, 4),
    (plain, 1),
]
"""How to parallelize, and on how many ranks."""


def trained(parallelize, seed):
    """A model and its optimizer after two steps, so that the optimizer has state."""
    torch.manual_seed(seed)
    model = parallelize(Net(6, 10, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed, weight_decay=0.1, foreach=False)
    data = torch.Generator().manual_seed(seed)
    for _ in range(2):
        model(torch.randn(4, 6, generator=data)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Application:
    """Model and optimizer as one object that is saved and loaded, as DCP's documentation recommends."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def full_state(model, optimizer):
    """Everything there is, as whole tensors, under the same names in every parallelism."""
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    options = StateDictOptions(full_state_dict=not sharded)  # older ones mix up what FSDP2 and others split unevenly
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    model_state = {key: whole(value) for key, value in model_state.items()}
    moments = {
        f"{key}.{name}": whole(value) for key, of in optimizer_state["state"].items() for name, value in of.items()
    }
    groups = [{k: sorted(v) if k == "params" else v for k, v in g.items()} for g in optimizer_state["param_groups"]]
    return {"model": model_state, "moments": moments, "groups": groups}


def differences(found, expected):
    assert found["model"].keys() == expected["model"].keys()
    assert found["moments"].keys() == expected["moments"].keys()
    tensors = [(k, found[part][k], expected[part][k]) for part in ("model", "moments") for k in expected[part]]
    return [k for k, one, other in tensors if not same_bits(one, other)] + [
        "groups" for _ in range(found["groups"] != expected["groups"])
    ]


def save_trained(parallelize, paths):
    model, optimizer = trained(parallelize, seed=1)
    for library, path in paths.items():
        save(library, {"app": Application(model, optimizer), "epoch": 12}, path)
    return full_state(model, optimizer)


def load_trained(parallelize, paths, expected):
    """Load into a model that was trained on something else, in every direction. What did not arrive."""
    lost = {}
    for saver, loader in DIRECTIONS:
        model, optimizer = trained(parallelize, seed=2)
        assert len(differences(full_state(model, optimizer), expected)) > 15
        state = {"app": Application(model, optimizer), "epoch": 0}
        load(loader, state, paths[saver])
        found = differences(full_state(model, optimizer), expected)
        if found or state["epoch"] != 12:
            lost[saver, loader] = found
    return lost


def run(ranks: RankPool, parallelism, body, *args):
    parallelize, world_size = parallelism
    return ranks(world_size).run(body, parallelize, *args, process_group=parallelize is not plain)


@pytest.fixture(scope="module")
def checkpoints(ranks: RankPool, tmp_path_factory):
    """Checkpoints of both libraries and the state that is in them, made when they are first asked for."""
    made = {}

    def of(parallelism):
        if parallelism not in made:
            paths = {library: tmp_path_factory.mktemp(library) for library in LIBRARIES}
            states = run(ranks, parallelism, save_trained, paths)
            assert all(differences(state, states[0]) == [] for state in states)
            made[parallelism] = paths, states[0]
        return made[parallelism]

    return of


def named(parallelism) -> str:
    return f"{parallelism[0].__name__}-{parallelism[1]}"


NEIGHBOURS = list(zip(PARALLELISMS, PARALLELISMS[1:] + PARALLELISMS[:1], strict=True))
OTHERS = [pair for pair in itertools.product(PARALLELISMS, repeat=2) if pair not in NEIGHBOURS]


@pytest.mark.parametrize(
    ("source", "destination"),
    [*NEIGHBOURS, *(pytest.param(*pair, marks=pytest.mark.long) for pair in OTHERS)],
    ids=named,
)
def test_training_goes_on_in_another_parallelism(ranks: RankPool, checkpoints, source, destination):
    paths, expected = checkpoints(source)
    lost = run(ranks, destination, load_trained, paths, expected)
    assert lost == [{}] * destination[1]


# --- native state dicts ----------------------------------------------------------------------------------------------


def native_state(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save_native(parallelize, paths):
    model, optimizer = trained(parallelize, seed=1)
    for library, path in paths.items():
        save(library, native_state(model, optimizer), path)
    return full_state(model, optimizer)


def load_native(parallelize, paths, expected):
    """Without the helpers of `state_dict`: modules and optimizers load what was put into their own state dicts."""
    lost = {}
    for saver, loader in DIRECTIONS:
        model, optimizer = trained(parallelize, seed=2)
        state = native_state(model, optimizer)
        load(loader, state, paths[saver])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        found = differences(full_state(model, optimizer), expected)
        if found:
            lost[saver, loader] = found
    return lost


@pytest.mark.parametrize(
    ("parallelize", "saving", "loading"),
    [
        (ddp, 2, 3),
        (fsdp2, 4, 3),
        (fsdp2, 2, 1),
        (hsdp, 4, 2),
        (tensor_parallel, 2, 1),
        (fsdp2_over_tensor_parallel, 4, 2),
    ],
)
def test_native_state_dicts_load_on_another_number_of_ranks(ranks: RankPool, tmp_path, parallelize, saving, loading):
    paths = {library: tmp_path / library for library in LIBRARIES}
    expected = ranks(saving).run(save_native, parallelize, paths)[0]
    assert ranks(loading).run(load_native, parallelize, paths, expected) == [{}] * loading


def sharded_fsdp1_state(model, optimizer):
    """FSDP1's own sharded state dicts, which hold ShardedTensors."""
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    ):
        return {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}


def save_sharded_fsdp1(paths):
    model, optimizer = trained(fsdp1, seed=1)
    state = sharded_fsdp1_state(model, optimizer)
    kinds = {type(value).__name__ for value in state["model"].values()}
    for library, path in paths.items():
        save(library, state, path)
    return full_state(model, optimizer), kinds


def load_sharded_fsdp1(paths, expected):
    lost = {}
    for saver, loader in DIRECTIONS:
        model, optimizer = trained(fsdp1, seed=2)
        state = sharded_fsdp1_state(model, optimizer)
        load(loader, state, paths[saver])
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optimizer"])
            )
        found = differences(full_state(model, optimizer), expected)
        if found:
            lost[saver, loader] = found
    return lost


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (4, 2)])
def test_sharded_state_dicts_of_fsdp1_load_on_another_number_of_ranks(ranks: RankPool, tmp_path, saving, loading):
    paths = {library: tmp_path / library for library in LIBRARIES}
    expected, kinds = ranks(saving).run(save_sharded_fsdp1, paths)[0]
    assert "ShardedTensor" in kinds
    assert ranks(loading).run(load_sharded_fsdp1, paths, expected) == [{}] * loading


# --- strided shards --------------------------------------------------------------------------------------------------


def strided_parameters():
    model = fsdp2_over_tensor_parallel(Net(6, 10, 7))
    return sorted(
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor) and any(isinstance(p, _StridedShard) for p in parameter.placements)
    )


def test_fsdp_over_tensor_parallelism_has_strided_shards_of_uneven_sizes(ranks: RankPool):
    """The tests above would show less if torch placed these parameters in another way."""
    assert ranks(4).run(strided_parameters) == [["up.bias", "up.weight"]] * 4
