"""States that stock torch saves and loads through Holdfast's storage come back the same to the bit."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.tensor import Replicate, Shard

import holdfast
from holdfast.integrations.torch_dcp import HoldfastReader
from tests.integrations.torch_dcp_programs import load, quiet, same, save, trained, training_state, whole
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.sharding import dtensor_of, mesh_of_all_ranks


def save_training(path):
    """Save with our storage and with torch's own; returns the whole state."""
    state = training_state(*trained(seed=1))
    save(state, path / "native")
    with quiet():
        stock.save(state, checkpoint_id=path / "stock")
    return whole(state)


def resume_training(path):
    """Load into a model and optimizer that know nothing; returns their whole state."""
    model, optimizer = trained(seed=2)
    state = load(training_state(model, optimizer), path / "native")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole(training_state(model, optimizer)) | {"step": state["step"]}


def test_an_fsdp2_model_and_its_optimizer_resume_on_other_numbers_of_ranks(ranks: RankPool, tmp_path):
    saved = ranks(2).run(save_training, tmp_path)[0]

    for world_size in (2, 3, 1):
        for resumed in ranks(world_size).run(resume_training, tmp_path):
            assert same(resumed, saved)


def test_holdfast_opens_what_stock_torch_saved_as_the_nested_state_that_it_was(ranks: RankPool, tmp_path):
    saved = ranks(2).run(save_training, tmp_path)[0]
    checkpoint = holdfast.open(tmp_path / "native")

    assert same(checkpoint.read(), saved)
    assert checkpoint["model.0.weight"].kind == "sharded"
    assert checkpoint["optimizer.state.0.weight.step"].kind == "replicated"
    assert checkpoint.provenance["world_size"] == 2
    assert checkpoint.provenance["through"] == "torch.distributed.checkpoint"
    # As stock torch would have given it back from its own files.
    with quiet():
        from_stock = stock.state_dict_loader._load_state_dict_from_keys(checkpoint_id=tmp_path / "stock")
        from_ours = stock.state_dict_loader._load_state_dict_from_keys(
            storage_reader=HoldfastReader(tmp_path / "native")
        )
    assert same(from_ours, from_stock)


def load_by_holdfast(path):
    model, optimizer = trained(seed=3, steps=0)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    holdfast.load(state, path / "native")
    return whole(training_state(model, optimizer)) | {"step": state["step"]}


def test_holdfast_loads_what_stock_torch_saved_into_live_objects(ranks: RankPool, tmp_path):
    saved = ranks(2).run(save_training, tmp_path)[0]

    for loaded in ranks(3).run(load_by_holdfast, tmp_path):
        assert same(loaded, saved)


def test_a_state_of_nothing_is_a_checkpoint_too(tmp_path):
    save({}, tmp_path / "c")

    assert holdfast.open(tmp_path / "c").read() == {}


def placed(shape, placement, fill):
    tensor = torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape) if fill else torch.full(shape, -1.0)
    mesh = mesh_of_all_ranks()
    return dtensor_of(tensor, mesh, [Replicate() if placement is None else Shard(placement)])


def save_placed(path, shape, placement):
    save({"t": placed(shape, placement, fill=True)}, path)


def load_placed(path, shape, placement):
    loaded = load({"t": placed(shape, placement, fill=False)}, path)["t"]
    # Torch 2.6 cannot gather a tensor without elements.
    return loaded.full_tensor() if loaded.numel() else torch.empty(loaded.shape, dtype=loaded.dtype)


@settings(max_examples=examples(25))
@given(data=st.data())
def test_a_tensor_that_is_spread_in_any_way_loads_into_any_other(ranks: RankPool, tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3), "shape"))
    dims = st.sampled_from([None, *range(len(shape))])
    path = tmp_path_factory.mktemp("any") / "checkpoint"

    ranks(data.draw(st.integers(1, 3), "saving")).run(save_placed, path, shape, data.draw(dims, "saved along"))
    loaded = ranks(data.draw(st.integers(1, 3), "loading")).run(
        load_placed, path, shape, data.draw(dims, "loaded along")
    )

    expected = torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape)
    assert all(same(tensor, expected) for tensor in loaded)
    assert same(holdfast.open(path).read()["t"], expected)


VALUES = {
    "int": 2**70,
    "floats": [0.1, float("inf"), -0.0],
    "texts": {"é": "日本", "empty": ""},
    "betas": (0.9, 0.999),
    "nothing": None,
    "truth": True,
    "bytes": b"\x00\xff",
    "set": {1, 2},
    "when": datetime.datetime(2024, 2, 29, 12),
    "dtype": torch.bfloat16,
    "size": torch.Size([1, 2]),
    "empty list": [],
    "numpy": np.arange(6, dtype="<i2").reshape(2, 3),
    "numpy number": np.float32(1.5),
    "groups": [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": []}],
    "pair": (torch.ones(2), {"inner": torch.tensor(3, dtype=torch.bfloat16), "array": np.zeros(0)}),
}


def values_to_load() -> dict[str, object]:
    texts, groups = {"é": 0, "empty": 0}, [{"lr": 0, "params": 0}, {"lr": 0, "params": 0}]
    return dict.fromkeys(VALUES) | {"texts": texts, "groups": groups}


def test_values_come_back_as_from_torchs_own_files(tmp_path):
    from_stock = values_to_load()
    with quiet():
        stock.save(dict(VALUES), checkpoint_id=tmp_path / "stock")
        stock.load(from_stock, checkpoint_id=tmp_path / "stock")
    save(dict(VALUES), tmp_path / "native")

    from_ours = load(values_to_load(), tmp_path / "native")

    assert same(from_ours, from_stock)
    assert same(from_ours, VALUES)
    assert same(holdfast.open(tmp_path / "native").read(), VALUES)


@holdfast.register_type
class Phase(enum.Enum):
    WARM_UP = "warm-up"


@holdfast.register_type(name="an older name")
@dataclasses.dataclass(frozen=True)
class Config:
    phase: Phase
    scale: torch.Tensor


@holdfast.register_type
class Position(NamedTuple):
    epoch: int
    sample: int


@dataclasses.dataclass
class Unregistered:
    size: int

    def __setstate__(self, state):
        raise AssertionError("a class that nobody registered was called")


def test_registered_classes_come_back_as_what_they_were(tmp_path):
    save({"config": Config(Phase.WARM_UP, torch.arange(2)), "position": Position(1, 2)}, tmp_path / "c")

    loaded = load({"config": None, "position": None}, tmp_path / "c")

    assert (loaded["config"].phase, loaded["position"]) == (Phase.WARM_UP, Position(1, 2))
    assert same(loaded["config"].scale, torch.arange(2))
    assert type(loaded["position"]) is Position
    with pytest.raises(stock.CheckpointException, match=r"'other': it needs .*Unregistered"):
        save({"other": Unregistered(1)}, tmp_path / "d")


def test_a_tensor_that_a_value_holds_twice_is_one_tensor_again(tmp_path):
    shared = torch.arange(3)
    save({"pair": (shared, shared), "other": (shared.clone(),)}, tmp_path / "c")

    loaded = load({"pair": None, "other": None}, tmp_path / "c")

    assert loaded["pair"][0] is loaded["pair"][1]
    assert len(holdfast.open(tmp_path / "c")._source.tensors) == 2


def test_names_that_look_alike_are_told_apart(tmp_path):
    def ones(number):
        return torch.full((1,), float(number))

    state = {"a": (ones(0),), "a.0": ones(1), "a#0": ones(2), "b.c": ones(3), "b": {"d": ones(4)}}
    save(state, tmp_path / "c")

    assert same(holdfast.open(tmp_path / "c").read(), state)
    template = {"a": None, "a.0": ones(9), "a#0": ones(9), "b.c": ones(9), "b": {"d": ones(9)}}
    assert same(load(template, tmp_path / "c"), state)


def test_every_kind_of_memory_is_stored_as_its_elements(tmp_path):
    base = torch.arange(24, dtype=torch.float32)
    state = {
        "transposed": base.reshape(4, 6).T,
        "view": base[3:5],
        "number": torch.tensor(1.5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 3),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
    }
    save(state, tmp_path / "c")

    template = {key: torch.zeros(value.shape).to(value.dtype) for key, value in state.items()}
    loaded = load(template, tmp_path / "c")

    for key, value in state.items():
        assert same(loaded[key], torch.clone(value.detach())), key
    assert holdfast.open(tmp_path / "c")["view"].nbytes == 8


def save_sharded_tensor(path):
    rank, rows = dist.get_rank(), torch.arange(12.0).reshape(6, 2)
    # Two shards on rank 0, which do not touch, and one on rank 1.
    starts = [0, 4] if rank == 0 else [2]
    shards = [LocalShard.from_tensor_and_offsets(rows[at : at + 2].clone(), [at, 0], rank) for at in starts]
    save({"rows": init_from_local_shards(shards, 6, 2)}, path)


def test_a_rank_may_hold_several_shards_of_a_tensor(ranks: RankPool, tmp_path):
    ranks(2).run(save_sharded_tensor, tmp_path / "c")

    assert same(load({"rows": torch.zeros(6, 2)}, tmp_path / "c")["rows"], torch.arange(12.0).reshape(6, 2))


def test_without_flattening_the_top_level_keys_are_the_names(tmp_path):
    state = {"model": {"w": torch.arange(3), "n": 5}, "t": torch.ones(2)}
    save(state, tmp_path / "c", planner=DefaultSavePlanner(flatten_state_dict=False))

    assert same(holdfast.open(tmp_path / "c").read(), state)
    metadata = HoldfastReader(tmp_path / "c").read_metadata()
    assert sorted(metadata.state_dict_metadata) == ["model", "t"]
    assert metadata.planner_data is None
    with quiet():
        stock.save(state, checkpoint_id=tmp_path / "stock", planner=DefaultSavePlanner(flatten_state_dict=False))
        try:
            from_stock = stock.state_dict_loader._load_state_dict_from_keys(checkpoint_id=tmp_path / "stock")
        except stock.CheckpointException:
            pytest.skip(f"torch {torch.__version__} cannot load its own files of such a state without being given one")
        from_ours = stock.state_dict_loader._load_state_dict_from_keys(storage_reader=HoldfastReader(tmp_path / "c"))
    assert same(from_ours, state)
    assert same(from_stock, state)


class WithoutDedup(DefaultSavePlanner):
    """Has every rank write its copies, and tells no paths."""

    def create_global_plan(self, all_plans):
        return create_default_global_save_plan(all_plans)


def save_without_dedup(path):
    replicated = placed((4, 2), None, fill=True)
    save({"model": {"t": replicated}}, path, planner=WithoutDedup())


def test_copies_that_a_planner_has_several_ranks_write_count_once(ranks: RankPool, tmp_path):
    ranks(2).run(save_without_dedup, tmp_path / "c")

    checkpoint = holdfast.open(tmp_path / "c")
    assert same(checkpoint.read(), {"model.t": torch.arange(8.0).reshape(4, 2)})
    assert checkpoint["model.t"].kind == "replicated"


class WithCopiesOfValues(DefaultSavePlanner):
    """Has every rank write every value, and rank 1 something that nobody is told of."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        values = [item for item in all_plans[0].items if item.index.fqn == "pair"]
        untold = [item for item in all_plans[1].items if item.index.fqn == "untold"]
        metadata.state_dict_metadata.pop("untold")
        return [replace(plans[0], items=values), replace(plans[1], items=values + untold)], metadata


def save_copies_of_values(path):
    tensors = tuple(torch.full((rank + 1,), float(rank)) for rank in range(1 + dist.get_rank()))
    save({"pair": tensors, "untold": torch.ones(3)}, path, planner=WithCopiesOfValues())


def test_of_a_value_that_several_ranks_write_the_first_counts(ranks: RankPool, tmp_path):
    ranks(2).run(save_copies_of_values, tmp_path / "c")

    assert same(holdfast.open(tmp_path / "c").read(), {"pair": (torch.zeros(1),)})
    assert same(load({"pair": None}, tmp_path / "c"), {"pair": (torch.zeros(1),)})


class Halving(DefaultSavePlanner):
    def transform_object(self, write_item, object):
        made = super().transform_object(write_item, object)
        return made.bfloat16() if isinstance(made, torch.Tensor) else made


def test_a_planner_may_store_tensors_as_another_dtype(tmp_path):
    state = {"w": torch.arange(4.0), "n": 3}
    save(state, tmp_path / "c", planner=Halving(), max_file_size=4)

    assert holdfast.open(tmp_path / "c")["w"].dtype == torch.bfloat16
    # As from torch's own files, the elements are converted to the type that is loaded into.
    assert same(load({"w": torch.zeros(4), "n": 0}, tmp_path / "c"), state)


def save_with_cached_plans(path):
    for step, dtype in enumerate([torch.float32, torch.float32, torch.float64]):
        state = {"t": placed((4, 2), 0, fill=True).to(dtype) + step, "step": step}
        with quiet():
            save(state, path / str(step), planner=DefaultSavePlanner(enable_plan_caching=True))
    save({"t": placed((4, 2), 0, fill=True), "step": 9}, path / "0", overwrite=True)


def test_plans_that_torch_keeps_for_the_next_save_lead_to_new_files_and_the_dtype_of_now(ranks: RankPool, tmp_path):
    ranks(2).run(save_with_cached_plans, tmp_path)

    rows = torch.arange(8.0).reshape(4, 2)
    assert same(holdfast.open(tmp_path / "0").read(), {"t": rows, "step": 9})
    assert same(holdfast.open(tmp_path / "1").read(), {"t": rows + 1, "step": 1})
    assert same(holdfast.open(tmp_path / "2").read(), {"t": (rows + 2).double(), "step": 2})
    names = [file.name for step in "012" for file in (tmp_path / step).glob("data-*")]
    assert len(set(names)) == len(names) == 6


def test_files_have_the_size_that_was_asked_for_and_the_metadata_is_there(tmp_path):
    save({"w": torch.arange(1000.0)}, tmp_path / "c", max_file_size=1000, metadata={"loss": 0.5})

    checkpoint = holdfast.open(tmp_path / "c")
    assert len(list(Path(tmp_path / "c").glob("data-*"))) == 4
    assert same(checkpoint.read(), {"w": torch.arange(1000.0)})
    assert checkpoint.metadata == {"loss": 0.5}


def save_what_others_lack(path):
    rank = dist.get_rank()
    save({f"stage{rank}": {"w": torch.full((2,), float(rank)), "n": rank}, "shared": 1}, path)


def test_ranks_may_hold_entries_that_others_lack(ranks: RankPool, tmp_path):
    ranks(2).run(save_what_others_lack, tmp_path / "c")

    stages = {f"stage{rank}": {"w": torch.full((2,), float(rank)), "n": rank} for rank in (0, 1)}
    assert same(dict(sorted(holdfast.open(tmp_path / "c").read().items())), {"shared": 1, **stages})


def test_the_caller_gets_torchs_metadata_with_the_id_of_the_save(tmp_path):
    metadata = save({"model": {"w": torch.ones(2)}}, tmp_path / "c")

    assert metadata.storage_meta.save_id == holdfast.open(tmp_path / "c")._source.identity
    assert list(metadata.storage_data.values()) == ["model.w"]
