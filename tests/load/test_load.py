"""``holdfast.load`` in one process: what becomes of a state, place by place."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

import holdfast
from holdfast.errors import StateMismatchError, UnsupportedVersionError


class Point(NamedTuple):
    x: Any
    y: Any


@holdfast.register_type
@dataclasses.dataclass
class Progress:
    step: int
    mean: torch.Tensor


@holdfast.register_type
@dataclasses.dataclass(frozen=True)
class Frozen:
    step: int
    mean: torch.Tensor


holdfast.register_type(Point)


def saved(state: Any, path: Path, **options: Any) -> Path:
    holdfast.save(state, path / "saved", **options)
    return path / "saved"


def test_tensors_stay_where_they_are_and_get_the_stored_content(tmp_path):
    path = saved({"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False])}, tmp_path)
    state = {"w": torch.zeros(2, 3), "b": torch.tensor([False, False])}
    before = {key: (tensor, tensor.data_ptr()) for key, tensor in state.items()}
    holdfast.load(state, path)
    assert state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["b"].tolist() == [True, False]
    assert all(state[key] is tensor and tensor.data_ptr() == at for key, (tensor, at) in before.items())


def test_values_in_dicts_and_lists_are_replaced_and_the_containers_stay(tmp_path):
    inner: dict[str, Any] = {"lr": 0.5, 7: "seven"}
    items: list[Any] = [torch.zeros(2), 1, {"deep": "old"}]
    path = saved(
        {"inner": {"lr": 0.1, 7: "sieben"}, "items": [torch.ones(2), 2, {"deep": "new"}], "flat": [1, 2]}, tmp_path
    )
    state = {"inner": inner, "items": items, "flat": [9, 9, 9, 9]}
    holdfast.load(state, path)
    assert inner == {"lr": 0.1, 7: "sieben"}
    assert state["inner"] is inner
    assert state["items"] is items
    assert items[0].tolist() == [1, 1]
    assert items[1:] == [2, {"deep": "new"}]
    assert state["flat"] == [1, 2]


def test_tuples_named_tuples_and_frozen_dataclasses_are_made_anew_around_the_same_tensors(tmp_path):
    def state(number: int) -> dict[str, Any]:
        def tensor() -> torch.Tensor:
            return torch.full((2,), float(number))

        return {
            "pair": (tensor(), number),
            "point": Point(tensor(), {"n": number}),
            "frozen": Frozen(number, tensor()),
            "progress": Progress(number, tensor()),
        }

    target = state(1)
    tensors = [target["pair"][0], target["point"].x, target["frozen"].mean, target["progress"].mean]
    frozen, progress, inner = target["frozen"], target["progress"], target["point"].y
    holdfast.load(target, saved(state(2), tmp_path))
    assert [target["pair"][1], target["point"].y, target["frozen"].step, target["progress"].step] == [2, {"n": 2}, 2, 2]
    assert type(target["point"]) is Point
    assert frozen.step == 1, "a frozen object must not change under those who hold it"
    assert target["progress"] is progress
    assert target["point"].y is inner
    now = [target["pair"][0], target["point"].x, target["frozen"].mean, target["progress"].mean]
    assert all(one is other and one.tolist() == [2, 2] for one, other in zip(now, tensors, strict=True))


def test_containers_keep_their_classes(tmp_path):
    def state(number: int) -> dict[str, Any]:
        return {
            "ordered": OrderedDict(b=number, a=torch.full((1,), float(number))),
            "default": defaultdict(list, x=[number]),
            "counter": Counter(x=number),
        }

    target = state(1)
    objects = dict(target)
    holdfast.load(target, saved(state(5), tmp_path))
    assert all(target[key] is objects[key] for key in objects)
    assert target["ordered"]["a"].item() == target["ordered"]["b"] == target["counter"]["x"] == 5
    assert target["default"]["x"] == [5]
    assert target["default"]["new"] == []


def test_empty_containers_and_none_take_what_is_stored(tmp_path):
    stored = {
        "a": {1: torch.ones(2), "deep": (1, torch.zeros(1, dtype=torch.bfloat16))},
        "b": [torch.ones(1), np.arange(3)],
        "c": torch.full((2,), 3.0),
        "d": Point(1, 2),
    }
    state: dict[str, Any] = {"a": {}, "b": [], "c": None, "d": None}
    a, b = state["a"], state["b"]
    report = holdfast.load(state, saved(stored, tmp_path))
    assert state["a"] is a
    assert state["b"] is b
    assert list(a) == [1, "deep"]
    assert a[1].tolist() == [1, 1]
    assert a["deep"][1].dtype == torch.bfloat16
    assert type(b[1]) is np.ndarray
    assert b[1].tolist() == [0, 1, 2]
    assert state["c"].tolist() == [3, 3]
    assert state["d"] == Point(1, 2)
    assert report.elements == 2 + 1 + 1 + 3 + 2
    assert set(report.read) == set(holdfast.open(report.path))


def test_an_empty_dict_as_the_state_takes_everything(tmp_path):
    path = saved({"model": nn.Linear(2, 2), "step": 4}, tmp_path)
    state: dict[str, Any] = {}
    holdfast.load(state, path)
    assert state["step"] == 4
    assert sorted(state["model"]) == ["bias", "weight"]


def make_optimizer() -> torch.optim.Optimizer:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.rand(3))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    weight.sum().backward()
    optimizer.step()
    return optimizer


def test_a_state_may_be_a_model_an_optimizer_a_list_or_a_tensor(tmp_path):
    source = nn.Linear(3, 2)
    model = nn.Linear(3, 2)
    holdfast.load(model, saved(source, tmp_path / "model"))
    assert torch.equal(model.weight, source.weight)

    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(3))])
    holdfast.load(optimizer, saved(make_optimizer(), tmp_path / "optimizer"))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(
        optimizer.state_dict()["state"][0]["exp_avg"], make_optimizer().state_dict()["state"][0]["exp_avg"]
    )

    items = [torch.zeros(2), 0]
    holdfast.load(items, saved([torch.ones(2), 5], tmp_path / "list"))
    assert items[0].tolist() == [1, 1]
    assert items[1] == 5

    tensor = torch.zeros(2, 2)
    report = holdfast.load(tensor, saved(torch.eye(2), tmp_path / "tensor"))
    assert torch.equal(tensor, torch.eye(2))
    assert report.elements == 4


@pytest.mark.parametrize(
    ("state", "stored", "named"),
    [
        ((torch.zeros(2), 1), (torch.ones(2), 2), "tuple"),
        (Frozen(1, torch.zeros(2)), Frozen(2, torch.ones(2)), "Frozen"),
        (5, 6, "int"),
        (torch.empty(2, device="meta"), torch.ones(2), "Tensor"),
        (
            {"a": types.MappingProxyType({"t": torch.zeros(2), "n": 1})},
            {"a": {"t": torch.ones(2), "n": 2}},
            "mappingproxy",
        ),
    ],
    ids=["tuple", "frozen", "int", "meta", "proxy"],
)
def test_what_cannot_be_changed_in_place_is_refused_before_anything_is_changed(tmp_path, state, stored, named):
    path = saved(stored, tmp_path)
    with pytest.raises(StateMismatchError, match=named) as raised:
        holdfast.load(state, path)
    assert "Nothing was changed" in str(raised.value)
    tensors = [part for part in (state if isinstance(state, tuple) else [state]) if isinstance(part, torch.Tensor)]
    assert all(tensor.is_meta or tensor.sum() == 0 for tensor in tensors)


def test_a_tuple_of_tensors_alone_needs_no_change(tmp_path):
    state = (torch.zeros(2), [torch.zeros(1)])
    holdfast.load(state, saved((torch.ones(2), [torch.ones(1)]), tmp_path))
    assert state[0].tolist() + state[1][0].tolist() == [1, 1, 1]


def test_numpy_arrays_are_filled_in_place_and_stay_what_they_are(tmp_path):
    stored = {
        "a": np.arange(4, dtype=">i4"),
        "b": np.array(["2020-01-01"], dtype="M8[D]"),
        "c": np.arange(3.0),
        "d": torch.arange(3),
        "f": np.asfortranarray(np.arange(6).reshape(2, 3)),
    }
    state = {
        "a": np.zeros(4, dtype=">i4"),
        "b": np.zeros(1, dtype="M8[D]"),
        "c": torch.zeros(3, dtype=torch.float64),
        "d": np.zeros(3, dtype=np.int64),
        "f": np.zeros((3, 2), dtype=np.int64).T,
    }
    before = dict(state)
    report = holdfast.load(state, saved(stored, tmp_path))
    assert all(state[key] is before[key] for key in state)
    for key in "abf":
        assert np.array_equal(state[key], stored[key]), key
    assert state["c"].tolist() == [0, 1, 2]
    assert state["d"].tolist() == [0, 1, 2]
    assert report.elements == 4 + 1 + 3 + 3 + 6


def test_a_read_only_array_is_refused(tmp_path):
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(StateMismatchError, match="read-only") as raised:
        holdfast.load({"a": array}, saved({"a": np.ones(3)}, tmp_path))
    assert list(raised.value.kinds) == ["a"]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1).expand(4), torch.zeros(6).as_strided((2, 2), (1, 1)), torch.zeros(4).to_sparse()],
    ids=["expanded", "overlapping", "sparse"],
)
def test_tensors_without_a_place_for_every_element_are_refused(tmp_path, tensor):
    path = saved({"t": torch.ones(tensor.shape)}, tmp_path)
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load({"t": tensor}, path)
    assert list(raised.value.kinds) == ["t"]
    assert tensor.to_dense().sum() == 0


def test_non_contiguous_tensors_and_views_are_filled_element_by_element(tmp_path):
    base = torch.zeros(6, 8)
    state = {"columns": base[:, ::2], "transposed": torch.zeros(3, 2).t(), "scalar": torch.zeros(())}
    stored = {"columns": torch.rand(6, 4), "transposed": torch.rand(2, 3), "scalar": torch.tensor(2.5)}
    holdfast.load(state, saved(stored, tmp_path))
    assert all(torch.equal(state[key], stored[key]) for key in stored)
    assert base[:, 1::2].sum() == 0


EVERY_DTYPE = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("options", [{}, {"verify": False}, {"verify_first": True}])
def test_every_dtype_and_odd_shapes_come_back_bit_for_bit(tmp_path, options):
    generator = torch.Generator().manual_seed(0)

    def tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        count = int(np.prod(shape)) * dtype.itemsize
        return (
            torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
            .view(dtype)
            .reshape(shape)
        )

    stored = {f"{dtype}/{shape}": tensor(dtype, shape) for dtype in EVERY_DTYPE for shape in [(), (0, 3), (5,), (3, 4)]}
    path = saved(stored, tmp_path)
    state = {key: torch.zeros_like(value) for key, value in stored.items()}
    report = holdfast.load(state, path, **options)
    for key, value in stored.items():
        assert state[key].reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist(), key
    assert report.elements == sum(value.numel() for value in stored.values())
    taken: dict[str, Any] = {}
    holdfast.load(taken, path, **options)
    for key, value in stored.items():
        assert taken[key].dtype == value.dtype
        assert taken[key].reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist(), key


def test_tensors_that_need_grad_are_filled_and_autograd_notices(tmp_path):
    weight = nn.Parameter(torch.ones(3))
    product = weight * weight
    holdfast.load({"w": weight}, saved({"w": torch.full((3,), 2.0)}, tmp_path))
    assert weight.tolist() == [2, 2, 2]
    assert weight.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_tensor_on_the_meta_device_in_a_dict_gets_memory(tmp_path):
    state = {"w": torch.empty(2, 3, device="meta"), "list": [torch.empty(2, device="meta")]}
    holdfast.load(state, saved({"w": torch.ones(2, 3), "list": [torch.ones(2)]}, tmp_path))
    assert state["w"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert state["list"][0].tolist() == [1, 1]
    state = {"w": torch.empty(2, 3, device="meta"), "new": torch.empty(2, device="meta")}
    holdfast.load(state, tmp_path / "saved", allow_missing="new", exclude="list")
    assert state["new"].is_meta, "nothing was read that could be in its memory"


def test_models_on_the_meta_device_get_memory_and_what_is_not_loaded_stays_without(tmp_path):
    source = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    path = saved({"model": source}, tmp_path)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    holdfast.load({"model": model}, path, exclude="model.1.bias")
    assert torch.equal(model[0].weight, source[0].weight)
    assert torch.equal(model[1].weight, source[1].weight)
    assert model[1].bias.is_meta, "memory that nothing was read into must not be taken for a loaded tensor"


def test_a_key_that_is_a_tensor_here_and_a_value_there_is_refused_both_ways(tmp_path):
    path = saved({"a": torch.ones(2), "b": 3, "c": {"d": 1}, "e": [torch.ones(1)], "f": 7}, tmp_path)
    state = {"a": 1, "b": torch.zeros(2), "c": torch.zeros(2), "e": "text", "f": {"g": torch.zeros(1)}}
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load(state, path)
    assert set(raised.value.kinds) == {"a", "b", "c", "e", "f"}
    assert state["b"].sum() == 0
    assert state["a"] == 1


def test_keys_of_dicts_match_by_type_first_and_by_text_otherwise(tmp_path):
    path = saved({"by": {1: "int", "1": "text", None: "none"}, "loose": {"5": 50}}, tmp_path)
    state: dict[str, Any] = {"by": {"1": "", 1: "", None: ""}, "loose": {5: 0}}
    holdfast.load(state, path)
    assert state == {"by": {"1": "text", 1: "int", None: "none"}, "loose": {5: 50}}


def test_one_stored_key_is_not_loaded_into_two_places_that_have_similar_names(tmp_path):
    path = saved({"a": torch.ones(2)}, tmp_path)
    state = {"a": torch.zeros(2), "module.a": torch.zeros(2)}
    with pytest.raises(StateMismatchError, match=r"'module.a' is not in the checkpoint"):
        holdfast.load(state, path)
    assert state["a"].sum() == 0


def edited(path: Path, old: str, new: str) -> Path:
    """The checkpoint with another text in its record, as another program might have written it."""
    record = path / "holdfast.json"
    body = record.read_text().rpartition(',"check":"')[0].replace(old, new)
    assert new in body
    record.write_text(f'{body},"check":"{xxhash.xxh3_128_hexdigest(body.encode())}"}}\n')
    return path


def test_values_of_classes_that_are_not_registered_are_refused_by_name(tmp_path):
    path = saved({"n": Point(1, 2), "deep": [Point(2, 3)], "p": Progress(1, torch.ones(1)), "fine": 1}, tmp_path)
    edited(path, "tests.load.test_load:", "elsewhere:")
    state: dict[str, Any] = {"n": None, "deep": [], "p": Progress(0, torch.zeros(1)), "fine": 0}
    with pytest.raises(StateMismatchError, match=r"holdfast\.register_type") as raised:
        holdfast.load(state, path)
    assert set(raised.value.kinds) == {"n", "deep.0"}
    assert all("elsewhere:" in text for text in raised.value.kinds.values())
    assert state["fine"] == 0
    holdfast.load(state, path, exclude=["n", "deep"])
    assert state["p"] == Progress(1, state["p"].mean), "there is an object to load into, whatever its class is called"
    assert state["p"].mean.item() == 1
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load({}, path)
    assert set(raised.value.kinds) == {"n", "deep.0", "p"}


def test_values_of_types_of_the_future_are_refused_by_name(tmp_path):
    path = edited(saved({"a": 1, "b": range(3)}, tmp_path), '"range"', '"hyperrange"')
    with pytest.raises(StateMismatchError, match="hyperrange") as raised:
        holdfast.load({"a": 0, "b": None}, path)
    assert list(raised.value.kinds) == ["b"]
    state = {"a": 0, "b": 5}
    holdfast.load(state, path, exclude="b")
    assert state == {"a": 1, "b": 5}


def test_pickles_are_loaded_only_if_that_is_allowed(tmp_path):
    path = saved({"p": {"q": complex}, "fine": 1}, tmp_path, allow_pickle=True)
    state: dict[str, Any] = {"p": None, "fine": 0}
    with pytest.raises(StateMismatchError, match="allow_pickle=True") as raised:
        holdfast.load(state, path)
    assert list(raised.value.kinds) == ["p.q"]
    assert state == {"p": None, "fine": 0}
    holdfast.load(state, path, allow_pickle=True)
    assert state == {"p": {"q": complex}, "fine": 1}


def test_a_stateful_object_gets_what_is_stored_and_keeps_what_is_excluded(tmp_path):
    class Counted:
        def __init__(self, number: int) -> None:
            self.inner = {"seen": number, "mean": torch.full((2,), float(number))}

        def state_dict(self) -> dict[str, Any]:
            return {"number": self.inner["seen"], "inner": self.inner}  # hands out what is its own

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.number = state["number"]
            self.inner = state["inner"]

    path = saved({"counted": Counted(7)}, tmp_path)
    counted = Counted(1)
    report = holdfast.load({"counted": counted}, path, exclude="counted.inner.seen")
    assert counted.number == 7
    assert counted.inner["seen"] == 1
    assert counted.inner["mean"].tolist() == [7, 7]
    assert report.untouched == ["counted.inner.seen"]


def test_live_objects_without_state_are_no_problem(tmp_path):
    source = nn.Linear(1, 1)
    for name, state in {"without": {"model": source}, "with": {"model": source, "loss": nn.MSELoss()}}.items():
        target = nn.Linear(1, 1)
        report = holdfast.load({"model": target, "loss": nn.MSELoss()}, saved(state, tmp_path / name))
        assert (report.missing, report.unexpected) == ([], [])
        assert torch.equal(target.weight, source.weight)


def test_extra_state_of_modules_and_lazy_parameters_come_back(tmp_path):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def get_extra_state(self) -> Any:
            return {"scale": self.scale}

        def set_extra_state(self, state: Any) -> None:
            self.scale = state["scale"]

    source = Scaled()
    source.scale = 4.0
    path = saved({"model": source}, tmp_path)
    target = Scaled()
    holdfast.load({"model": target}, path)
    assert target.scale == 4.0
    lazy = nn.LazyLinear(2)
    linear = nn.Linear(3, 2)
    holdfast.load({"m": lazy}, saved({"m": linear}, tmp_path / "lazy"))
    assert torch.equal(lazy.weight, linear.weight)


def test_keys_with_dots_and_nested_states_find_each_other(tmp_path):
    flat = saved({"a.b.c": torch.ones(1), "a.b.d": 2, "e": 3}, tmp_path / "flat")
    nested: dict[str, Any] = {"a": {"b": {"c": torch.zeros(1), "d": 0}}, "e": 0}
    report = holdfast.load(nested, flat)
    assert nested["a"]["b"]["c"].item() == 1
    assert nested["a"]["b"]["d"] == 2
    assert report.renamed == {}
    deep = saved({"a": {"b": {"c": torch.ones(1), "d": 2}}, "e": 3}, tmp_path / "deep")
    joined: dict[str, Any] = {"a.b.c": torch.zeros(1), "a.b.d": 0, "e": 0}
    holdfast.load(joined, deep)
    assert joined["a.b.c"].item() == 1
    assert joined["a.b.d"] == 2


def calls_of(function: Any) -> int:
    """How many functions are called in it, of C too: a measure of time that does not depend on the machine."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("fits", [True, False])
def test_many_keys_take_no_time_that_grows_with_their_square(tmp_path, fits):
    def calls(count: int) -> int:
        path = saved({"model": {f"layers.{n}.x": n for n in range(count)}}, tmp_path / str(count))
        state = {"model": {f"layers.{n}.{'x' if fits else 'y'}": 0 for n in range(count)}, "step": 0}
        return calls_of(lambda: holdfast.load(state, path, allow_missing="*", allow_unexpected="*"))

    assert calls(2000) < 3 * calls(1000)


def test_a_pair_of_containers_that_share_no_key_is_reported_key_by_key(tmp_path):
    Pair = namedtuple("Pair", "a b")
    path = saved({"x": [torch.ones(1), torch.ones(1), torch.ones(1)], "y": {"a": 1}}, tmp_path)
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load({"x": [torch.zeros(1)], "y": Pair(torch.zeros(1), 2)}, path)
    assert raised.value.unexpected == ["x.1", "x.2"]
    assert raised.value.missing == ["y.b"]
    assert list(raised.value.kinds) == ["y.a"]


def test_a_newer_version_is_refused_by_name(tmp_path):
    path = saved({"a": 1}, tmp_path)
    record = path / "holdfast.json"
    record.write_bytes(record.read_bytes().replace(b'"version":[2,', b'"version":[9,', 1))
    with pytest.raises(UnsupportedVersionError) as raised:
        holdfast.load({"a": 0}, path)
    assert raised.value.version.startswith("9")
