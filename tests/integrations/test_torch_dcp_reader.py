"""Stock torch loads through Holdfast's reader what `holdfast.save` and others have written."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import set_state_dict

import holdfast
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import PerRankValues, TensorRef
from holdfast._formats.native.trees import mapped
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, RankDisagreementError
from holdfast.integrations._torch_dcp.reader import flat_state
from holdfast.integrations.torch_dcp import HoldfastReader
from tests.integrations.torch_dcp_programs import load, quiet, same, save, trained, training_state, whole
from tests.models import Tied
from tests.native_files import flip_last_data_bit
from tests.rank_pool import RankPool


def test_it_loads_what_holdfast_saved_ties_arrays_and_values_included(tmp_path):
    model = Tied()
    state = {
        "model": model,
        "array": np.arange(4, dtype="f2"),
        "pair": (torch.arange(2), np.ones(1)),
        "blocks": [torch.ones(2), {"lr": 0.5}],
        "steps": OrderedDict(a=1),
        "number": torch.tensor(2.5, dtype=torch.bfloat16),
    }
    holdfast.save(state, tmp_path / "c")
    assert holdfast.open(tmp_path / "c")["model.head.weight"].key == "model.embed.weight"

    loaded = {
        "model": Tied(),
        "array": None,
        "pair": None,
        "blocks": [torch.zeros(2), {"lr": 0}],
        "steps": {"a": 0},
        "number": torch.tensor(0.0, dtype=torch.bfloat16),
    }
    load(loaded, tmp_path / "c")

    assert same(loaded["model"].head.weight.data, model.embed.weight.data)
    loaded.pop("model"), state.pop("model")
    assert same(loaded, state | {"steps": {"a": 1}})


def test_a_planner_may_use_the_same_memory_for_all_items(tmp_path):
    saved = {f"t{number}": torch.full((3,), float(number)) for number in range(4)}
    holdfast.save(saved, tmp_path / "c")

    class Borrowing(DefaultLoadPlanner):
        room = torch.empty(3)

        def resolve_tensor(self, read_item):
            return self.room

        def commit_tensor(self, read_item, tensor):
            super().resolve_tensor(read_item).copy_(tensor)

    assert same(load({key: torch.zeros(3) for key in saved}, tmp_path / "c", planner=Borrowing()), saved)


def save_training_by_holdfast(path):
    model, optimizer = trained(seed=1)
    holdfast.save({"model": model, "optimizer": optimizer, "step": 7}, path)
    return whole(training_state(model, optimizer))


def resume_by_stock(path):
    model, optimizer = trained(seed=2, steps=0)
    state = load(training_state(model, optimizer), path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole(training_state(model, optimizer))


def test_a_trainer_of_stock_torch_resumes_from_live_objects_that_holdfast_saved(ranks: RankPool, tmp_path):
    saved = ranks(2).run(save_training_by_holdfast, tmp_path / "c")[0]

    for resumed in ranks(3).run(resume_by_stock, tmp_path / "c"):
        assert same(resumed, saved)


def save_by_holdfast(path):
    model, _ = trained(seed=1)
    rank = dist.get_rank()
    holdfast.save(
        {"model": model, "own": holdfast.PerRank({"seed": rank, "noise": torch.full((rank + 1,), 1.0)})}, path
    )


def load_by_stock(path):
    model, optimizer = trained(seed=2)
    rank = dist.get_rank()
    state = {"model": training_state(model, optimizer)["model"]}
    loaded = load(state | {"own": {"seed": -1, "noise": torch.zeros(rank + 1)}}, path)
    return {key: value.full_tensor() for key, value in loaded["model"].items()}, loaded["own"]


def test_every_rank_gets_what_it_had_its_own_of(ranks: RankPool, tmp_path):
    ranks(2).run(save_by_holdfast, tmp_path / "c")

    stored = holdfast.open(tmp_path / "c").read()
    for rank, (model, own) in enumerate(ranks(2).run(load_by_stock, tmp_path / "c")):
        assert same(model, dict(stored["model"]))
        assert same(own, {"seed": rank, "noise": torch.ones(rank + 1)})


def test_what_other_ranks_had_their_own_of_is_left_out_and_named(ranks: RankPool, tmp_path):
    ranks(2).run(save_by_holdfast, tmp_path / "c")

    with pytest.warns(UserWarning, match=r"'own': each of 2 ranks stored its own") as caught:
        metadata = HoldfastReader(tmp_path / "c").read_metadata()

    assert "holdfast.load" in str(caught[0].message)
    assert {name.split(".")[0] for name in metadata.state_dict_metadata} == {"model"}


def test_the_metadata_tells_what_that_of_torchs_own_files_tells(tmp_path):
    state = {"a": {"w": torch.ones(2, 3), "nothing": torch.empty(0, 2), "n": torch.tensor(1)}, "l": [1, torch.ones(1)]}
    save(state, tmp_path / "native")
    with quiet():
        stock.save(state, checkpoint_id=tmp_path / "stock")

    ours = HoldfastReader(tmp_path / "native").read_metadata()
    theirs = stock.FileSystemReader(tmp_path / "stock").read_metadata()

    assert ours.planner_data == theirs.planner_data
    for entry in theirs.state_dict_metadata.values():
        vars(getattr(entry, "properties", entry)).pop("strides", None)  # of 2.15: how it was in memory
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data.keys() <= theirs.storage_data.keys()


def test_it_reads_torchs_own_checkpoints_too(tmp_path):
    with quiet():
        stock.save({"model": {"w": torch.arange(6.0)}, "step": 3}, checkpoint_id=tmp_path / "c")

    loaded = load({"model": {"w": torch.zeros(6)}, "step": 0}, tmp_path / "c")

    assert same(loaded, {"model": {"w": torch.arange(6.0)}, "step": 3})


def test_elements_are_converted_to_the_type_that_is_loaded_into_as_torch_does(tmp_path):
    state = {"w": torch.tensor([1.5, -2.25, 1e-3])}
    save(state, tmp_path / "native")
    with quiet():
        stock.save(state, checkpoint_id=tmp_path / "stock")

    for dtype in (torch.bfloat16, torch.float64, torch.int32):
        expected = {"w": torch.zeros(3, dtype=dtype)}
        with quiet():
            stock.load(expected, checkpoint_id=tmp_path / "stock")
        assert same(load({"w": torch.zeros(3, dtype=dtype)}, tmp_path / "native"), expected)


def test_memory_of_any_strides_is_filled_and_nothing_around_it(tmp_path):
    save({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "c")
    room = torch.full((5, 4), -1.0)

    load({"w": room[1:4, 1:3].T}, tmp_path / "c")

    assert same(room[1:4, 1:3].T, torch.arange(6.0).reshape(2, 3))
    assert room.sum() == 15 - 14


class Doubling(DefaultLoadPlanner):
    """Loads into memory of its own and puts twice of it in place."""

    def resolve_tensor(self, read_item):
        return torch.empty(read_item.lengths)

    def commit_tensor(self, read_item, tensor):
        self.lookup_tensor(read_item.dest_index).copy_(tensor * 2)


@pytest.mark.parametrize("batch", [1, 1 << 30])
def test_a_planner_may_load_into_memory_of_its_own(tmp_path, monkeypatch, batch):
    monkeypatch.setattr("holdfast.integrations._torch_dcp.reader.STOCK_BATCH_BYTES", batch)
    save({"w": torch.arange(3.0), "v": torch.ones(2)}, tmp_path / "c")

    loaded = load({"w": torch.zeros(3), "v": torch.zeros(2)}, tmp_path / "c", planner=Doubling())

    assert same(loaded, {"w": torch.arange(3.0) * 2, "v": torch.full((2,), 2.0)})


def test_memory_that_elements_share_is_refused(tmp_path):
    save({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "c")

    with pytest.raises(CheckpointException, match=r"'w' cannot be loaded: .* share memory"):
        load({"w": torch.zeros(3).expand(2, 3)}, tmp_path / "c")


def test_damage_is_found_before_it_is_used(tmp_path):
    save({"w": torch.ones(1000), "inner": {"step": 1}}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("data-*")
    flip_last_data_bit(file)
    target = torch.zeros(1000)
    state = {"w": target, "inner": {"step": 0}}

    with pytest.raises(CheckpointException) as caught:
        load(state, tmp_path / "c")

    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, DamagedCheckpointError)
    assert error.file == str(file)
    assert not target.any()
    assert state["inner"]["step"] == 0
    assert load({"w": target}, tmp_path / "c", verify=False)["w"][:999].all()


@pytest.mark.parametrize("leftovers", [[], ["data-0011223344556677-0-0.safetensors"]])
def test_a_place_without_a_checkpoint_is_named(tmp_path, leftovers):
    for name in leftovers:
        (tmp_path / name).touch()

    with pytest.raises(
        CheckpointException, match=f"no checkpoint at {tmp_path}: .*{'cut off' if leftovers else ''}"
    ) as raised:
        load({"w": torch.zeros(1)}, tmp_path)
    [(step, _)] = raised.value.failures.values()
    [(cause, _)] = step.failures.values()  # and not an error of torch's own, which has lost it or holds its text only
    assert isinstance(cause, CheckpointNotFoundError)
    with pytest.raises(CheckpointNotFoundError):
        HoldfastReader(tmp_path).read_metadata()


def test_torchs_own_errors_name_what_does_not_fit(tmp_path):
    save({"w": torch.ones(2)}, tmp_path / "c")

    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: v"):
        load({"v": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(CheckpointException, match=r"Size mismatch .* for w"):
        load({"w": torch.ones(3)}, tmp_path / "c")


def load_another_one(path):
    rank = dist.get_rank()
    target = torch.zeros(2)
    with pytest.raises(CheckpointException) as caught:
        load({"w": target}, path / str(rank))
    ((error, _),) = caught.value.failures.values()
    return error, target


def test_ranks_that_see_different_checkpoints_load_nothing(ranks: RankPool, tmp_path):
    for rank in (0, 1):
        save({"w": torch.ones(2)}, tmp_path / str(rank))

    for error, target in ranks(2).run(load_another_one, tmp_path):
        assert isinstance(error, RankDisagreementError)
        assert not target.any()


def test_a_state_that_is_no_dict_is_refused_with_a_way_out(tmp_path):
    holdfast.save([torch.ones(2)], tmp_path / "c")

    with pytest.raises(CheckpointException, match=r"is a list.*holdfast.load"):
        load({"0": torch.zeros(2)}, tmp_path / "c")


def test_a_name_that_several_entries_have_is_left_out_and_named(tmp_path):
    holdfast.save({"a": {"b": 1}, "a.b": 2, "c": 3}, tmp_path / "c")

    with pytest.warns(UserWarning, match=r"'a.b': several entries"):
        metadata = HoldfastReader(tmp_path / "c").read_metadata()

    assert list(metadata.state_dict_metadata) == ["c"]


def test_nothing_is_warned_of_without_a_reason(tmp_path):
    save({"a": {"b": 1}, "t": torch.ones(2)}, tmp_path / "c")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HoldfastReader(tmp_path / "c").read_metadata()


def test_it_tells_whether_a_place_holds_a_checkpoint(tmp_path):
    save({"n": 1}, tmp_path / "c")

    assert HoldfastReader.validate_checkpoint_id(tmp_path / "c")
    assert not HoldfastReader.validate_checkpoint_id(tmp_path / "d")
    assert not HoldfastReader.validate_checkpoint_id("carrier-pigeon://loft")


def test_a_relative_path_is_that_of_the_moment(tmp_path, monkeypatch):
    save({"n": 1}, tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    reader = HoldfastReader(os.curdir + "/c")
    monkeypatch.chdir("/")

    assert list(reader.read_metadata().state_dict_metadata) == ["n"]


TENSOR = torch.ones(1)
LEAVES = st.sampled_from([1, "text", None, TENSOR, (TENSOR, {"x": 1}), (), [], [1, [2]]])
STATES = st.dictionaries(
    st.sampled_from(["a", "b", "c d"]),
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", 0, 1]), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=3,
)


def stored(value):
    return TensorRef("t", dtype_named("float32"), (1,)) if value is TENSOR else mapped(value, stored)


@given(STATES)
def test_the_names_are_those_that_torchs_planners_give(state):
    flat, paths = flatten_state_dict(state)

    ours = flat_state(stored(state), 0, 1)

    assert ours.paths == paths
    assert ours.leaves == stored(flat)


@given(STATES, st.integers(0, 2))
def test_names_do_not_depend_on_whether_a_rank_had_its_own(state, rank):
    others = PerRankValues(tuple(stored(state) if number == rank else {"x": number} for number in range(3)))

    ours = flat_state({"top": others, "list": [others]}, rank, 3)

    assert ours == flat_state({"top": stored(state), "list": [stored(state)]}, rank, 3)
