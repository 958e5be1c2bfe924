"""``holdfast.load`` on live ranks: from every format into every layout, and one error for all if something is wrong."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
import holdfast.dcp
from holdfast._ranks.private_group import private_group_of
from holdfast.errors import RankDisagreementError
from tests.exact import assert_same
from tests.models import ddp, fsdp1, fsdp2, plain, tensor_parallel
from tests.rank_pool import RankPool
from tests.sharding import mesh_of_all_ranks, sharded


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 7)
        self.down = nn.Linear(7, 4)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


LAYOUTS = [plain, ddp, fsdp2, tensor_parallel]


def trained() -> dict[str, Any]:
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, (list, tuple)):  # of LBFGS
        return [part.tolist() if isinstance(part, torch.Tensor) else part for part in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def content(state: dict[str, Any]) -> dict[str, Any]:
    """All that training depends on, by names that do not depend on layouts."""
    names = [name.removeprefix("module.") for name, _ in state["model"].named_parameters()]
    found = {name.removeprefix("module."): whole(value) for name, value in state["model"].state_dict().items()}
    if "optim" in state:
        raw = state["optim"].state_dict()
        for number, entry in raw["state"].items():
            found.update({f"{names[number]}/{key}": whole(value) for key, value in entry.items()})
        found["lr"] = raw["param_groups"][0]["lr"]
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], torch.Tensor) else one[key] == other[key]
        for key in one
    )


def blank(layout: Any, with_optimizer: bool) -> dict[str, Any]:
    torch.manual_seed(50)
    model = layout(Net())
    state: dict[str, Any] = {"model": model}
    if with_optimizer:
        state["optim"] = torch.optim.AdamW(model.parameters(), lr=0.9)
    return state


def load_all(places: dict[str, str], layout: Any) -> dict[str, Any]:
    """Load every checkpoint into a fresh state of this layout; returns what is wrong, and the reports."""
    reports = {}
    wrong = []
    expected = content(trained())
    for name, place in places.items():
        with_optimizer = name not in ("file", "folder")
        state = blank(layout, with_optimizer)
        target = state if with_optimizer or name == "torch" else state["model"]
        report = holdfast.load(target, place)
        wanted = (
            expected
            if with_optimizer
            else {key: value for key, value in expected.items() if "/" not in key and key != "lr"}
        )
        if not same(content(state), wanted):
            wrong.append(name)
        reports[name] = report
    return {"wrong": wrong, "reports": reports}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One state in every format that can be loaded."""
    folder = tmp_path_factory.mktemp("formats")
    state = trained()
    model, optimizer = get_state_dict(state["model"], state["optim"])
    tensors = dict(state["model"].state_dict())
    holdfast.save(state, folder / "native")
    stock.save({"model": model, "optim": optimizer}, checkpoint_id=folder / "stock")
    stock.save(
        {"model": state["model"].state_dict(), "optim": state["optim"].state_dict()}, checkpoint_id=folder / "raw"
    )
    holdfast.dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder / "dcp")
    safetensors.torch.save_file(tensors, folder / "file.safetensors")
    (folder / "folder").mkdir()
    safetensors.torch.save_file(
        {k: v for k, v in tensors.items() if "up" in k}, folder / "folder/model-00001-of-00002.safetensors"
    )
    safetensors.torch.save_file(
        {k: v for k, v in tensors.items() if "up" not in k}, folder / "folder/model-00002-of-00002.safetensors"
    )
    torch.save({"model": tensors, "optim": state["optim"].state_dict()}, folder / "torch.pt")
    prefixed = {f"module._orig_mod.{key}": value for key, value in tensors.items()}
    torch.save({"model": prefixed, "optim": state["optim"].state_dict()}, folder / "wrapped.pt")
    names = {"file": "file.safetensors", "torch": "torch.pt", "wrapped": "wrapped.pt"}
    return {
        name: str(folder / names.get(name, name))
        for name in ["native", "stock", "raw", "dcp", "file", "folder", "torch", "wrapped"]
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_format_loads_into_every_layout(ranks: RankPool, places, layout, world_size):
    if layout is tensor_parallel and world_size > 1:
        world_size += 1  # more ranks than rows of some tensors
    results = ranks(world_size).run(load_all, places, layout)
    for result in results:
        assert result["wrong"] == []
    reports = results[0]["reports"]
    assert all(result["reports"] == reports for result in results), "the report is the same on all ranks"
    expected = {key: value for key, value in content(trained()).items() if isinstance(value, torch.Tensor)}
    model = {key: value for key, value in expected.items() if "/" not in key}
    for name, report in reports.items():
        assert report.world_size == world_size
        assert report.missing == report.unexpected == []
        wanted = model if name in ("file", "folder") else expected
        assert report.elements == sum(elements_on(layout, key, value, world_size) for key, value in wanted.items()), (
            name
        )
    prefix = "model.module._orig_mod."
    assert reports["wrapped"].renamed == {f"{prefix}{key}": f"model.{key}" for key in model}
    assert all(reports[name].renamed == {} for name in reports if name != "wrapped")


def elements_on(layout: Any, key: str, value: torch.Tensor, world_size: int) -> int:
    """How many elements of a tensor all ranks hold together, from what is known of the layouts."""
    is_split = value.dim() > 0 and (layout is fsdp2 or (layout is tensor_parallel and not key.startswith("down.bias")))
    return value.numel() * (1 if is_split else world_size)


def test_a_process_without_a_group_loads_what_many_ranks_saved(ranks: RankPool, tmp_path):
    ranks(3).run(save_sharded, str(tmp_path / "sharded"))
    state = {"w": torch.zeros(10, 3), "rank": holdfast.PerRank(0, on_resize="first")}
    holdfast.load(state, tmp_path / "sharded")
    assert torch.equal(state["w"], torch.arange(30.0).reshape(10, 3))


def save_sharded(place: str) -> None:
    tensor = sharded(torch.arange(30.0).reshape(10, 3))
    holdfast.save({"w": tensor, "rank": holdfast.PerRank(dist.get_rank())}, place)


def training_goes_on(kind: str, options: dict[str, Any], layout: Any, place: str) -> bool:
    def run(state: dict[str, Any], steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            data = torch.rand(5, 4)

            def loss(data: torch.Tensor = data) -> torch.Tensor:
                state["optim"].zero_grad()
                value = state["model"](data).pow(2).sum()
                value.backward()
                return value

            state["optim"].step(loss) if kind == "LBFGS" else (loss(), state["optim"].step())

    def fresh(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        net = Net()
        if kind == "Muon":
            net = nn.Sequential(nn.Linear(4, 7, bias=False), nn.Linear(7, 4, bias=False))
        model = layout(net)
        optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"model": model, "optim": optimizer, "scheduler": scheduler}

    state = fresh(1)
    run(state, range(2))
    state["scheduler"].step()
    holdfast.save(state, place)
    other = fresh(2)
    holdfast.load(other, place)
    run(state, range(2, 4))
    run(other, range(2, 4))
    same_rate = state["scheduler"].get_last_lr() == other["scheduler"].get_last_lr()
    return same_rate and same(content(state), content(other))


OPTIMIZERS = [
    *[(name, {}) for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon")],
    *[(name, {}) for name in ("NAdam", "RAdam", "RMSprop", "Rprop", "SGD")],
    ("SGD", {"momentum": 0.9}),
    ("AdamW", {"amsgrad": True, "foreach": True}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: str(value))
def test_training_goes_on_bit_for_bit_after_loading_into_a_fresh_optimizer(kind, options, tmp_path):
    assert training_goes_on(kind, options, plain, str(tmp_path / "saved"))


def test_training_with_sparse_gradients_goes_on_bit_for_bit(tmp_path):
    def fresh(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Embedding(6, 3, sparse=True)
        return {"model": model, "optim": torch.optim.SparseAdam(model.parameters())}

    def run(state: dict[str, Any], *rows: int) -> None:
        for row in rows:
            state["optim"].zero_grad()
            state["model"](torch.tensor([row, 2])).pow(2).sum().backward()
            state["optim"].step()

    state, other = fresh(1), fresh(2)
    run(state, 0, 1)
    holdfast.save(state, tmp_path / "saved")
    holdfast.load(other, tmp_path / "saved")
    run(state, 1, 4)
    run(other, 1, 4)
    assert same(content(state), content(other))


@pytest.mark.parametrize("layout", [ddp, fsdp2])
def test_training_of_many_ranks_goes_on_bit_for_bit(ranks: RankPool, layout, tmp_path):
    assert ranks(2).run(training_goes_on, "AdamW", {}, layout, str(tmp_path / "saved")) == [True, True]


def bits(state: Any) -> list[Any]:
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [tensor.clone().view(torch.uint8).tolist() for tensor in local]


def load_with_problems(place: str) -> tuple[Any, bool]:
    rank, mesh = dist.get_rank(), mesh_of_all_ranks()
    state = {
        "w": distribute_tensor(torch.zeros(10, 3), mesh, [Shard(0)]),
        "rank": holdfast.PerRank(0),
    }
    if rank == 0:
        state["zero"] = torch.zeros(1)
    if rank == 1:
        state["one"] = torch.zeros(1)
    if rank == 2:
        state["rank"] = torch.zeros(3)
    before = bits(state)
    try:
        holdfast.load(state, place)
    except holdfast.HoldfastError as error:
        return error, bits(state) == before
    return None, False


def test_problems_of_all_ranks_come_in_one_error_on_every_rank_and_nothing_changes(ranks: RankPool, tmp_path):
    ranks(3).run(save_sharded, str(tmp_path / "saved"))
    results = ranks(3).run(load_with_problems, str(tmp_path / "saved"))
    errors = [error for error, _ in results]
    assert all(unchanged for _, unchanged in results)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert type(error).__name__ == "StateMismatchError"
        assert sorted(error.missing) == ["one", "zero"]
        assert list(error.kinds) == ["rank"]


def load_per_rank(place: str, rules: dict[str, Any]) -> Any:
    state = {key: holdfast.PerRank(None, on_resize=rule) for key, rule in rules.items()}
    try:
        report = holdfast.load(state, place)
    except holdfast.HoldfastError as error:
        return error
    return {key: marked.value for key, marked in state.items()}, report


def save_per_rank(place: str) -> None:
    rank = dist.get_rank()
    holdfast.save(
        {key: holdfast.PerRank({"rank": rank, "t": torch.full((2,), float(rank))}) for key in ("a", "b", "c")}, place
    )


def add_ranks(values: Any, rank: int, world_size: int) -> Any:
    return {"sum": sum(value["rank"] for value in values), "t": values[0]["t"] + len(values), "me": (rank, world_size)}


def test_every_rank_gets_its_own_or_what_the_rule_for_other_numbers_of_ranks_says(ranks: RankPool, tmp_path):
    place = str(tmp_path / "saved")
    ranks(3).run(save_per_rank, place)
    for rank, (values, report) in enumerate(
        ranks(3).run(load_per_rank, place, {"a": "error", "b": "first", "c": add_ranks})
    ):
        assert [values[key]["rank"] for key in "abc"] == [rank] * 3
        assert values["a"]["t"].tolist() == [rank, rank]
        assert report.elements == 3 * 3 * 2
    for rank, (values, _) in enumerate(ranks(2).run(load_per_rank, place, {"b": "first", "c": add_ranks})):
        assert values["b"]["rank"] == 0
        assert values["c"]["sum"] == 3
        assert values["c"]["t"].tolist() == [3, 3]
        assert values["c"]["me"] == (rank, 2)
    errors = ranks(2).run(load_per_rank, place, {"a": "error", "b": "error", "c": "first"})
    for error in errors:
        assert type(error).__name__ == "WorldSizeError"
        assert (error.key, error.saved, error.current) == ("a", 3, 2)
        assert "'b' is stored per rank" in str(error)
        assert "Nothing was changed" in str(error)
    errors = ranks(2).run(load_per_rank, place, {"a": "error", "new": "first"})
    for error in errors:
        assert error.missing == ["new"]
        assert list(error.kinds) == ["a"]


def load_unmarked(place: str) -> list[Any]:
    found: list[Any] = []
    for target in [5, {"rank": 0, "t": torch.zeros(2)}, torch.zeros(2), [1], None, {}]:
        state = {"a": target}
        try:
            holdfast.load(state, place)
            found.append(state["a"])
        except holdfast.HoldfastError as error:
            found.append(error)
    return found


def test_what_is_stored_per_rank_has_to_be_marked_so_unless_the_place_takes_anything(ranks: RankPool, tmp_path):
    place = str(tmp_path / "saved")
    ranks(2).run(save_per_rank, place)
    for rank, (*refused, none, empty) in enumerate(ranks(2).run(load_unmarked, place)):
        assert all("holdfast.PerRank(value)" in error.kinds["a"] for error in refused)
        assert none["rank"] == empty["rank"] == rank
        assert empty["t"].tolist() == [rank, rank]
    for refused in ranks(1).run(load_unmarked, place):
        assert [type(error).__name__ for error in refused] == ["StateMismatchError"] * 4 + ["WorldSizeError"] * 2


def test_what_is_stored_once_is_per_rank_only_if_the_rule_says_so(tmp_path):
    holdfast.save({"a": {"rank": 4}}, tmp_path / "saved")
    error = load_per_rank(str(tmp_path / "saved"), {"a": "error"})
    assert "one value for all ranks" in error.kinds["a"]
    values, _ = load_per_rank(str(tmp_path / "saved"), {"a": "first"})
    assert values == {"a": {"rank": 4}}


def test_stored_parts_of_per_rank_values_without_a_place_are_unexpected(tmp_path):
    holdfast.save({"a": holdfast.PerRank({"x": 1, "y": 2})}, tmp_path / "saved")
    with pytest.raises(holdfast.HoldfastError) as raised:
        holdfast.load({"a": holdfast.PerRank({"x": 0})}, tmp_path / "saved")
    assert raised.value.unexpected == ["a.y"]


def draw() -> float:
    return float(torch.rand(1))


def save_streams(place: str) -> float:
    torch.manual_seed(100 + dist.get_rank())
    holdfast.save({"rng": holdfast.RngState(), "step": 1}, place)
    return draw()


def load_streams(place: str, rule: str) -> Any:
    torch.manual_seed(9)
    try:
        report = holdfast.load({"rng": holdfast.RngState(on_resize=rule)}, place)
    except holdfast.HoldfastError as error:
        return error
    return draw(), report.notes


@pytest.mark.filterwarnings("ignore:The random streams were saved")
def test_random_streams_come_back_or_are_derived_with_a_note(ranks: RankPool, tmp_path):
    place = str(tmp_path / "saved")
    drawn = ranks(2).run(save_streams, place)
    assert [number for number, _ in ranks(2).run(load_streams, place, "derive")] == drawn
    derived = ranks(3).run(load_streams, place, "derive")
    assert len({number for number, _ in derived}) == 3
    assert all("derived" in notes[0] for _, notes in derived)
    assert [number for number, _ in ranks(3).run(load_streams, place, "derive")] == [number for number, _ in derived]
    assert [number for number, _ in ranks(1).run(load_streams, place, "first")] == drawn[:1]
    assert type(ranks(1).run(load_streams, place, "error")[0]).__name__ == "WorldSizeError"


def load_own_place(base: str, options: dict[str, Any]) -> Any:
    state = {"w": sharded(torch.zeros(300000, 2)), "step": 0}
    try:
        holdfast.load(state, base, **options)
    except Exception as error:
        return (
            type(error).__name__,
            str(error),
            state["step"],
            getattr(error, "file", None),
            bool(state["w"].to_local().any()),
        )
    return "loaded", "", state["step"], None, bool(state["w"].to_local().all())


def save_large(place: str) -> None:
    holdfast.save({"w": sharded(torch.ones(300000, 2)), "step": 5}, place)


def damaged_file(place: Path, rank: int) -> Path:
    (file,) = place.glob(f"data-*-{rank}-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def test_damage_that_one_rank_meets_is_the_same_error_on_all_ranks(ranks: RankPool, tmp_path):
    ranks(2).run(save_large, str(tmp_path / "saved"))
    file = damaged_file(tmp_path / "saved", 1)
    results = ranks(2).run(load_own_place, str(tmp_path / "saved"), {})
    assert results[0][:4] == results[1][:4]
    name, text, step, named, _ = results[0]
    assert (name, step, named) == ("DamagedCheckpointError", 0, str(file))
    assert "partly loaded" in text
    assert "on rank 1" in text
    results = ranks(2).run(load_own_place, str(tmp_path / "saved"), {"verify_first": True})
    for name, text, step, _, changed in results:
        assert (name, step, changed) == ("DamagedCheckpointError", 0, False)
        assert "Nothing was changed" in text
    assert [result[0] for result in ranks(2).run(load_own_place, str(tmp_path / "saved"), {"verify": False})] == [
        "loaded"
    ] * 2


def load_divided(savers: list[int]) -> Any:
    """Every rank looks into a store of its own, which has the same name for all."""
    rank, place = dist.get_rank(), f"memory://divided-{savers}"
    alone = [dist.new_group([member]) for member in range(dist.get_world_size())]
    if rank in savers:
        holdfast.save({"a": torch.ones(1)}, place, process_group=alone[rank])
    try:
        holdfast.load({"a": torch.zeros(1)}, place)
    except holdfast.HoldfastError as error:
        return error
    return None


def test_ranks_that_see_different_checkpoints_or_none_all_raise(ranks: RankPool):
    for error in ranks(2).run(load_divided, [0, 1]):
        assert type(error).__name__ == "RankDisagreementError"
        assert set(error.views) == {0, 1}
        assert "look at different checkpoints" in str(error)
    for error in ranks(2).run(load_divided, [0]):
        assert type(error).__name__ == "CheckpointNotFoundError"
        assert "on rank 1" in str(error)


def load_from_folders(base: str, folders: list[str], paths: list[Any], options: list[dict[str, Any]]) -> Any:
    """Every rank is in a folder, and gives a path and options, of its own."""
    rank, before = dist.get_rank(), Path.cwd()
    os.chdir(Path(base) / folders[rank])
    try:
        holdfast.load({"a": torch.zeros(1)}, paths[rank], **options[rank])
    except Exception as error:
        return error
    finally:
        os.chdir(before)
    return None


def test_paths_are_compared_by_the_places_that_they_mean(ranks: RankPool, tmp_path):
    for folder in ("one", "two"):
        holdfast.save({"a": torch.ones(1)}, tmp_path / folder / "saved")
    same = ["saved", str(tmp_path / "one" / "saved")]
    assert ranks(2).run(load_from_folders, str(tmp_path), ["one", "two"], same, [{}, {}]) == [None, None]
    for error in ranks(2).run(load_from_folders, str(tmp_path), ["one", "two"], ["saved", "saved"], [{}, {}]):
        assert type(error) is RankDisagreementError
        assert str(tmp_path / "one" / "saved") in str(error)


@pytest.mark.parametrize("wrong", [7, "", "carrier-pigeon://loft"])
def test_a_path_that_is_none_on_one_rank_ends_the_call_on_all(ranks: RankPool, tmp_path, wrong):
    holdfast.save({"a": torch.ones(1)}, tmp_path / "saved")
    for error in ranks(2).run(load_from_folders, str(tmp_path), [".", "."], ["saved", wrong], [{}, {}]):
        assert type(error) is RankDisagreementError
        assert repr(wrong) in str(error)
    for error in ranks(2).run(load_from_folders, str(tmp_path), [".", "."], [wrong, wrong], [{}, {}]):
        assert isinstance(error, (TypeError, ValueError))


@pytest.mark.parametrize(
    ("wrong", "kind"), [({"rename": 3}, TypeError), ({"include": [3]}, TypeError), ({"cast": {"a": "no"}}, TypeError)]
)
def test_a_wrong_option_on_one_rank_is_the_same_error_on_all(ranks: RankPool, tmp_path, wrong, kind):
    holdfast.save({"a": torch.ones(1)}, tmp_path / "saved")
    first, second = ranks(2).run(load_from_folders, str(tmp_path), [".", "."], ["saved"] * 2, [{}, wrong])
    assert type(first) is type(second) is kind
    assert str(first) == str(second)


def fails_on_one_rank(place: str, where: str) -> Any:
    class Fragile:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: Any) -> None:
            if where == "apply" and dist.get_rank() == 1:
                raise ArithmeticError("cannot take it")

    def made(checkpoint: Any, key: str) -> Any:
        if where == "transform" and dist.get_rank() == 1:
            raise ArithmeticError("cannot make it")
        return torch.ones(2)

    include = (lambda key: 1 // 0 == 0) if where == "include" and dist.get_rank() == 1 else None
    state = {"fragile": Fragile(), "t": torch.zeros(2)}
    try:
        holdfast.load(state, place, transform={"t": made}, include=include)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", []), state["t"].tolist()


@pytest.mark.parametrize("where", ["apply", "transform", "include"])
def test_code_of_the_user_that_fails_on_one_rank_fails_on_all(ranks: RankPool, tmp_path, where):
    holdfast.save({"fragile": {"x": 2}, "t": torch.zeros(2)}, tmp_path / "saved")
    for name, text, notes, tensor in ranks(2).run(fails_on_one_rank, str(tmp_path / "saved"), where):
        if where == "transform":
            assert name == "StateMismatchError"
            assert "cannot make it" in text
        else:
            assert name == ("ArithmeticError" if where == "apply" else "ZeroDivisionError")
            assert any("rank 1" in note for note in notes)
        if where == "apply":
            assert any("partly loaded" in note for note in notes)
        else:
            assert tensor == [0, 0]


def transform_into_shards(place: str) -> Any:
    state = {
        "q": sharded(torch.zeros(4, 6)),
        "k": sharded(torch.zeros(4, 6), 1),
        "turned": sharded(torch.zeros(6, 8)),
    }
    report = holdfast.load(
        state,
        place,
        transform={
            "q": lambda c, key: c["qk"][:4],
            "k": lambda c, key: c["qk"][4:],
            "turned": lambda c, key: c["qk"][:].t(),
        },
    )
    return {key: value.full_tensor() for key, value in state.items()}, report


def test_transforms_fill_sharded_targets(ranks: RankPool, tmp_path):
    stored = torch.rand(8, 6)
    holdfast.save({"qk": stored}, tmp_path / "saved")
    for found, report in ranks(3).run(transform_into_shards, str(tmp_path / "saved")):
        assert torch.equal(found["q"], stored[:4])
        assert torch.equal(found["k"], stored[4:])
        assert torch.equal(found["turned"], stored.t())
        assert report.elements == 24 + 24 + 48
        assert report.not_requested == report.unexpected == []


def load_different_keys(place: str) -> Any:
    keys = ["a", "b"] if dist.get_rank() == 1 else ["b", "c"]
    state = {"m": {key: torch.zeros(1) for key in keys}}
    return holdfast.load(state, place, allow_missing="m.c")


def test_ranks_with_different_parts_of_a_state_report_them_together(ranks: RankPool, tmp_path):
    holdfast.save({"m": {"a": torch.ones(1), "b": torch.ones(1)}, "rest": 1}, tmp_path / "saved")
    first, second = ranks(2).run(load_different_keys, str(tmp_path / "saved"))
    assert first == second
    assert sorted(first.read) == ["m.a", "m.b"]
    assert first.missing == ["m.c"]
    assert first.unexpected == []
    assert first.not_requested == ["rest"]
    assert first.elements == 3


def fsdp1_passes_on(place: str, copy: str, seed: int | None) -> None:
    """Train and save a model of FSDP1; or load it into a fresh one, and save that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 and its ShardedTensors are to go some day
        state = blank(fsdp1, with_optimizer=True)
        if seed is not None:
            torch.manual_seed(seed)
            state["model"](torch.rand(5, 4)).sum().backward()
            state["optim"].step()
            holdfast.save(state, place)
        else:
            holdfast.load(state, place)
            holdfast.save(state, copy)


def test_models_and_optimizers_of_fsdp1_go_to_other_numbers_of_ranks(ranks: RankPool, tmp_path):
    place, copy = str(tmp_path / "saved"), str(tmp_path / "loaded")
    ranks(3).run(fsdp1_passes_on, place, copy, 4)
    ranks(2).run(fsdp1_passes_on, place, copy, None)
    saved, loaded = holdfast.open(place).read(), holdfast.open(copy).read()
    assert_same(loaded, saved)
    assert saved["optim"]["state"]["up.weight"]["exp_avg"].count_nonzero() > 0


def fsdp1_with_optimizers_in_a_list(place: str) -> Any:
    """With flat parameters, which mean nothing to an optimizer without its model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = []
        for _ in range(2):
            model = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"))
            states.append({"model": model, "optims": [torch.optim.Adam(model.parameters())]})
        saved, loaded = states
        saved["model"](torch.rand(5, 4)).sum().backward()
        saved["optims"][0].step()
        holdfast.save(saved, place)
        report = holdfast.load(loaded, place)
    (moments,) = loaded["optims"][0].state.values()
    (expected,) = saved["optims"][0].state.values()
    return report.missing, torch.equal(moments["exp_avg"], expected["exp_avg"])


def test_optimizers_of_fsdp1_may_lie_in_a_list_beside_their_model(ranks: RankPool, tmp_path):
    assert ranks(2).run(fsdp1_with_optimizers_in_a_list, str(tmp_path / "saved")) == [([], True)] * 2


def verify_on_one_rank(place: str) -> Any:
    with pytest.raises(RankDisagreementError) as caught:
        holdfast.load({"a": torch.zeros(1)}, place, verify_first=dist.get_rank() == 1)
    holdfast.load({"a": torch.zeros(1)}, place, verify_first=True)
    return str(caught.value)


def test_ranks_that_verify_differently_are_reported(ranks: RankPool, tmp_path):
    """They would exchange other messages: who verifies first meets the others once more."""
    holdfast.save({"a": torch.ones(1)}, tmp_path / "saved")
    for message in ranks(3).run(verify_on_one_rank, str(tmp_path / "saved")):
        assert "verify_first=True" in message
        assert "verify_first=False" in message


def load_and_count_exchanges(place: str) -> tuple[int, list[str]]:
    state = {"a": sharded(torch.zeros(8, 4)), "step": 0}
    report = holdfast.load(state, place)
    return private_group_of(None, "calls")._watch.exchange, list(report.read)


def test_ranks_that_have_the_same_state_meet_four_times_in_a_load(ranks: RankPool, tmp_path):
    holdfast.save({"a": torch.rand(8, 4), "step": 3}, tmp_path / "saved")
    assert ranks(4).run(load_and_count_exchanges, str(tmp_path / "saved")) == [(4, ["a", "step"])] * 4


def save_or_load(place: str) -> tuple[str, list[str]]:
    state = {"a": torch.ones(2)}
    call = partial(holdfast.save, overwrite=True) if dist.get_rank() % 2 else holdfast.load
    with pytest.raises(RankDisagreementError) as caught:
        call(state, place)
    holdfast.load(state, place)
    return str(caught.value), state["a"].tolist()


def test_ranks_of_which_some_save_and_some_load_know_it_and_go_on(ranks: RankPool, tmp_path):
    holdfast.save({"a": torch.zeros(2)}, tmp_path / "saved")
    for message, values in ranks(4).run(save_or_load, str(tmp_path / "saved")):
        assert "holdfast.load from" in message
        assert "holdfast.save to" in message
        assert values == [0, 0]
