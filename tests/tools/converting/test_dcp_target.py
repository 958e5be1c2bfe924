"""Conversions to DCP checkpoints, which stock ``torch.distributed.checkpoint`` loads."""

from __future__ import annotations

import datetime
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import HealthCheck, example, given, settings
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.errors import DamagedCheckpointError, UnsupportedValueError
from tests.dcp.states import numbered
from tests.exact import assert_same
from tests.properties import examples
from tests.tools.converting.states import states

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is")


def loaded_by_stock(folder: Path) -> Any:
    """All that a checkpoint holds, without knowing before what that is."""
    dcp_to_torch_save(folder, folder / "all.pt")
    return torch.load(folder / "all.pt", weights_only=False)


@given(states())
@example({"a": [{}], "b": [{}, {"c": 1}, [{}]], "tensor": torch.ones(1)})
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
def test_stock_loads_any_state_as_it_was_saved(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("state")
    holdfast.save(state, folder / "native")

    holdfast.convert(folder / "native", folder / "dcp", to="dcp", memory_budget=1 << 18)

    found = loaded_by_stock(folder / "dcp")
    assert_same(found, {name: state[name] for name in found})
    assert found.keys() == state.keys()


def load_sharded(path: Path) -> bool:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state = {"model": {"w": distribute_tensor(torch.zeros(10, 7), mesh, [Shard(0)])}, "opt": [{"lr": 0.0, "step": 0}]}
    stock.load(state, checkpoint_id=path)
    return torch.equal(state["model"]["w"].full_tensor(), numbered(10, 7)) and state["opt"] == [{"lr": 0.5, "step": 3}]


def test_stock_ranks_load_their_parts_of_it(ranks: Any, tmp_path: Path) -> None:
    torch.save({"model": {"w": numbered(10, 7)}, "opt": [{"lr": 0.5, "step": 3}]}, tmp_path / "all.pt")
    holdfast.convert(tmp_path / "all.pt", tmp_path / "dcp", to="dcp")
    assert ranks(2).run(load_sharded, tmp_path / "dcp") == [True, True]


def test_a_cast_tensor_is_described_by_its_new_type(tmp_path: Path) -> None:
    holdfast.save({"w": numbered(300, 1001), "n": torch.arange(5)}, tmp_path / "native")
    holdfast.convert(tmp_path / "native", tmp_path / "dcp", to="dcp", cast="float16", memory_budget=1 << 20)
    state = {"w": torch.zeros(300, 1001, dtype=torch.float16), "n": torch.zeros(5, dtype=torch.int64)}
    stock.load(state, checkpoint_id=tmp_path / "dcp")
    assert_same(state, {"w": numbered(300, 1001).half(), "n": torch.arange(5)})


def test_tied_tensors_are_there_under_each_name(tmp_path: Path) -> None:
    weight = numbered(20, 30)
    holdfast.save({"embedding": weight, "head": {"weight": weight}}, tmp_path / "native")
    holdfast.convert(tmp_path / "native", tmp_path / "dcp", to="dcp")
    assert_same(loaded_by_stock(tmp_path / "dcp"), {"embedding": weight, "head": {"weight": weight}})


Pair = namedtuple("Pair", "first second")


def test_containers_that_dcp_does_not_know_become_dicts_and_lists(tmp_path: Path) -> None:
    state = {
        "pair": Pair(torch.ones(1), 2),
        "tuple": (torch.zeros(2), "b"),
        3: OrderedDict(w=torch.ones(3)),
        "history": [{0: "a"}, OrderedDict(b=1)],
        "empty": {},
        "nothing": {"in": {}, "it": []},
    }
    torch.save(state, tmp_path / "all.pt")
    with torch.serialization.safe_globals([Pair]):
        holdfast.convert(tmp_path / "all.pt", tmp_path / "dcp", to="dcp", allow_pickle=True)

    expected = {
        "pair": {"first": torch.ones(1), "second": 2},
        "tuple": [torch.zeros(2), "b"],
        "3": {"w": torch.ones(3)},
        "history": [{0: "a"}, OrderedDict(b=1)],
        "empty": {},
        "nothing": {"in": {}, "it": []},
    }
    assert_same(loaded_by_stock(tmp_path / "dcp"), expected)


def test_keys_that_dcp_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    holdfast.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "c": 1}, tmp_path / "native")
    with pytest.raises(UnsupportedValueError, match=r"a\.b[\s\S]*rename") as caught:
        holdfast.convert(tmp_path / "native", tmp_path / "dcp", to="dcp")
    assert caught.value.keys == ["a.b"]
    assert list(tmp_path.iterdir()) == [tmp_path / "native"]


class OwnClass:
    """Something that only a pickle can hold."""

    def __init__(self) -> None:
        self.number = 7


def test_values_that_take_code_are_reported_at_once_and_written_if_allowed(tmp_path: Path) -> None:
    torch.save({"one": OwnClass(), "deep": {"two": OwnClass()}, "took": datetime.timedelta(1)}, tmp_path / "all.pt")
    trusted = holdfast.open(tmp_path / "all.pt", allow_pickle=True)
    with pytest.raises(UnsupportedValueError, match="OwnClass") as caught:
        holdfast.convert(trusted, tmp_path / "dcp", to="dcp")
    assert list(caught.value.keys) == ["one", "deep.two"]

    with pytest.warns(UserWarning, match="only pickle can rebuild"):
        holdfast.convert(tmp_path / "all.pt", tmp_path / "dcp", to="dcp", allow_pickle=True)
    found = loaded_by_stock(tmp_path / "dcp")
    assert found["deep"]["two"].number == 7
    assert found["took"] == datetime.timedelta(1)


def test_the_index_has_checksums_and_no_path(tmp_path: Path) -> None:
    holdfast.save({"w": numbered(1000, 100)}, tmp_path / "native")
    holdfast.convert(tmp_path / "native", tmp_path / "dcp", to="dcp")
    index = (tmp_path / "dcp" / ".metadata").read_bytes()
    assert str(tmp_path).encode() not in index
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="w"):
        holdfast.load({"w": torch.zeros(1000, 100)}, tmp_path / "dcp")


def test_damage_of_a_dcp_source_is_found_on_the_way(tmp_path: Path) -> None:
    stock.save({"w": numbered(3000, 700)}, checkpoint_id=tmp_path / "dcp")
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="CRC"):
        holdfast.convert(tmp_path / "dcp", tmp_path / "all.pt", to="torch", memory_budget=1 << 20)
    assert not (tmp_path / "all.pt").exists()
