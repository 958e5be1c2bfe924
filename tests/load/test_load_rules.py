"""What the options of ``holdfast.load`` allow and forbid: strictness, selections, new names, casts, transforms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast._watching.progress import size
from holdfast.errors import DamagedCheckpointError, OptimizerMismatchError, StateMismatchError

STORED = {
    "model": {"body.weight": torch.arange(6.0).reshape(2, 3), "head.weight": torch.ones(2), "head.bias": torch.ones(1)},
    "optim": {"lr": 0.1, "momentum": torch.ones(3)},
    "step": 9,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rules") / "saved"
    holdfast.save(STORED, place)
    return place


def blank() -> dict[str, Any]:
    return {
        "model": {key: torch.zeros_like(value) for key, value in STORED["model"].items()},
        "optim": {"lr": 0.5, "momentum": torch.zeros(3)},
        "step": 0,
    }


def saved(state: Any, path: Path, **options: Any) -> Path:
    holdfast.save(state, path / "saved", **options)
    return path / "saved"


def is_blank(state: dict[str, Any]) -> bool:
    tensors = [*(t for t in state["model"].values()), state["optim"]["momentum"]]
    return all(t.sum() == 0 for t in tensors) and state["step"] == 0 and state["optim"]["lr"] == 0.5


def test_all_problems_are_reported_at_once_with_keys_that_may_be_meant(path):
    state = blank()
    state["model"]["body.wieght"] = state["model"].pop("body.weight")
    state["model"]["head.weight"] = torch.zeros(3)
    state["model"]["head.bias"] = torch.zeros(1, dtype=torch.float16)
    state["step"] = torch.zeros(1)
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load(state, path)
    error = raised.value
    assert error.missing == ["model.body.wieght"]
    assert error.unexpected == ["model.body.weight"]
    assert error.shapes == {"model.head.weight": ((2,), (3,))}
    assert error.dtypes == {"model.head.bias": ("float32", "float16")}
    assert list(error.kinds) == ["step"]
    assert str(error).splitlines() == [
        f"{path} does not fit the state to load into (5 problems):",
        "  'model.body.wieght' is missing in the checkpoint (did you mean 'model.body.weight'?)",
        "  'model.body.weight' is in the checkpoint and has no place in the state",
        "  'model.head.weight' has shape [2] in the checkpoint and [3] in the state",
        "  'model.head.bias' is float32 in the checkpoint and float16 in the state",
        "  'step' is a int in the checkpoint and a tensor in the state",
        "Nothing was changed. allow_missing=[...] leaves such keys as they are; rename={stored: wanted} finds them. "
        "allow_unexpected=[...] passes such keys over. cast=True, or cast=[patterns], allows conversions.",
    ]
    assert state["optim"]["momentum"].sum() == 0
    assert state["optim"]["lr"] == 0.5


def test_missing_and_unexpected_keys_are_allowed_by_pattern_and_reported(path):
    state = blank()
    state["model"]["new.weight"] = torch.full((2,), 7.0)
    del state["model"]["head.bias"]
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load(state, path, allow_missing="model.other.*", allow_unexpected="model.other")
    assert (raised.value.missing, raised.value.unexpected) == (["model.new.weight"], ["model.head.bias"])
    assert is_blank({**state, "model": {key: state["model"][key] for key in ("body.weight", "head.weight")}})
    report = holdfast.load(state, path, allow_missing=["model.new"], allow_unexpected=re.compile(r"model\.head\..*"))
    assert (report.missing, report.unexpected) == (["model.new.weight"], ["model.head.bias"])
    assert state["model"]["new.weight"].tolist() == [7, 7]
    assert state["model"]["body.weight"].sum() == 15


def test_strict_false_lets_both_pass_but_neither_shapes_nor_kinds(path):
    state = blank()
    state["model"]["new.weight"] = torch.full((2,), 7.0)
    del state["model"]["head.bias"]
    report = holdfast.load(state, path, strict=False)
    assert (report.missing, report.unexpected) == (["model.new.weight"], ["model.head.bias"])
    state["model"]["head.weight"] = torch.zeros(5)
    with pytest.raises(StateMismatchError, match=r"head\.weight"):
        holdfast.load(state, path, strict=False)


def test_a_load_that_loads_nothing_is_an_error(path):
    with pytest.raises(StateMismatchError, match="gets nothing"):
        holdfast.load(blank(), path, include="modle.*")
    with pytest.raises(StateMismatchError, match="gets nothing"):
        holdfast.load({"wholly": torch.zeros(1), "different": 2}, path, strict=False)


def test_parts_of_a_checkpoint_that_the_state_does_not_have_are_listed_and_not_read(path):
    model = {"model": blank()["model"]}
    report = holdfast.load(model, path)
    assert report.not_requested == ["optim.lr", "optim.momentum", "step"]
    assert report.unexpected == []
    assert report.elements == 9


def test_include_and_exclude_choose_what_is_loaded(path):
    state = blank()
    report = holdfast.load(state, path, include=["model.*", "step"], exclude=["*.bias"])
    assert state["model"]["body.weight"].sum() == 15
    assert state["model"]["head.bias"].item() == 0
    assert state["step"] == 9
    assert state["optim"]["lr"] == 0.5
    assert set(report.read) == {"model.body.weight", "model.head.weight", "step"}
    assert set(report.untouched) == {"model.head.bias", "optim.lr", "optim.momentum"}
    assert report.unexpected == report.missing == report.not_requested == []


def test_include_and_exclude_choose_what_empty_places_take(path):
    state: dict[str, Any] = {}
    report = holdfast.load(state, path, exclude=["optim", "model.head"])
    assert list(state) == ["model", "step"]
    assert list(state["model"]) == ["body.weight"]
    assert set(report.untouched) == {"optim.lr", "optim.momentum", "model.head.weight", "model.head.bias"}
    assert report.unexpected == []
    state = {"model": None, "optim": {}, "step": None}
    holdfast.load(state, path, include=["model.*.weight", "step"])
    assert list(state["model"]) == ["body.weight", "head.weight"]
    assert state["optim"] == {}
    assert state["step"] == 9


def test_what_is_excluded_may_have_any_shape(path):
    state = blank()
    state["model"]["head.weight"] = torch.zeros(77)
    holdfast.load(state, path, exclude="model.head")
    assert state["model"]["body.weight"].sum() == 15


def trained(lr: float, kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind([{"params": [model.weight], "lr": lr}, {"params": [model.bias], "lr": lr / 10}])
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def fresh(lr: float, kind: Any = torch.optim.AdamW, turned: bool = False) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight], "lr": lr}, {"params": [model.bias], "lr": lr / 2}]
    return {"model": model, "optim": kind(groups[::-1] if turned else groups)}


@pytest.mark.parametrize("turned", [False, True], ids=["same order", "other order"])
def test_an_excluded_learning_rate_stays_as_it_is_in_its_own_group(tmp_path, turned):
    source = trained(0.1)
    path = saved(source, tmp_path)
    state = fresh(0.6, turned=turned)
    state["optim"].param_groups[0]["weight_decay"] = 0.77
    before = [group["lr"] for group in state["optim"].param_groups]
    report = holdfast.load(state, path, exclude="optim.param_groups.*.lr")
    assert [group["lr"] for group in state["optim"].param_groups] == before
    assert [group["weight_decay"] for group in state["optim"].param_groups] == [0.01, 0.01]
    assert report.untouched == ["optim.param_groups.0.lr", "optim.param_groups.1.lr"]
    loaded, stored = state["optim"].state[state["model"].bias], source["optim"].state[source["model"].bias]
    assert torch.equal(loaded["exp_avg"], stored["exp_avg"])


@pytest.mark.parametrize("used", [False, True])
def test_excluded_optimizer_state_is_kept_and_never_made_of_unread_memory(tmp_path, used):
    path = saved(trained(0.1), tmp_path)
    state = trained(0.2) if used else fresh(0.2)
    kept = {name: dict(state["optim"].state[p]) for name, p in state["model"].named_parameters()}
    holdfast.load(state, path, exclude="optim.state.*.exp_avg")
    for name, parameter in state["model"].named_parameters():
        entry = state["optim"].state[parameter]
        assert "exp_avg_sq" in entry
        assert entry.get("exp_avg") is kept[name].get("exp_avg")


def test_renamed_keys_are_found_under_their_new_names(path):
    state = {"net": {"trunk.weight": torch.zeros(2, 3), "head.weight": torch.zeros(2), "head.bias": torch.zeros(1)}}
    names = {"model": "net", "model.body": "net.trunk"}
    report = holdfast.load(state, path, rename=names)
    assert state["net"]["trunk.weight"].sum() == 15
    assert report.renamed == {
        "model.body.weight": "net.trunk.weight",
        "model.head.weight": "net.head.weight",
        "model.head.bias": "net.head.bias",
    }
    assert report.not_requested == ["optim.lr", "optim.momentum", "step"]


@pytest.mark.parametrize(
    "rename",
    [
        {re.compile(r"^model\.(\w+)\.weight$"): r"model.\1.w"},
        lambda key: key.removesuffix("eight") if key.endswith("weight") else None,
        {"model.body.weight": "model.body.w", "model.head.weight": "model.head.w"},
    ],
    ids=["expressions", "function", "mapping"],
)
def test_names_are_given_by_expressions_functions_and_mappings(path, rename):
    state = {"model": {"body.w": torch.zeros(2, 3), "head.w": torch.zeros(2), "head.bias": torch.zeros(1)}}
    report = holdfast.load(state, path, rename=rename)
    assert state["model"]["body.w"].sum() == 15
    assert set(report.renamed) == {"model.body.weight", "model.head.weight"}
    assert set(report.read) == {"model.body.w", "model.head.w", "model.head.bias"}
    assert report.notes == []


def test_an_empty_name_takes_a_prefix_away(path):
    state = {key: torch.zeros_like(value) for key, value in STORED["model"].items()}
    holdfast.load(state, path, rename={"model": ""})
    assert state["body.weight"].sum() == 15


def test_a_key_can_be_moved_into_a_part_that_is_there_already(path):
    state = {"model": {**blank()["model"], "speed": torch.zeros(3)}}
    holdfast.load(state, path, rename={"optim.momentum": "model.speed"})
    assert state["model"]["speed"].tolist() == [1, 1, 1]


def test_two_keys_cannot_get_the_same_name(path):
    state = blank()
    with pytest.raises(ValueError, match=r"both 'model.body.weight' and 'model.head.weight' the key 'model.w'"):
        holdfast.load(state, path, rename={re.compile(r"model\.\w+\.weight"): "model.w"})
    with pytest.raises(ValueError, match=r"'step'"):
        holdfast.load(state, path, rename={"optim.lr": "step"})
    assert is_blank(state)


def test_two_keys_can_change_places(path):
    state = {"model": {"head.weight": torch.zeros(2, 3), "body.weight": torch.zeros(2), "head.bias": torch.zeros(1)}}
    swap = {"model.body.weight": "model.head.weight", "model.head.weight": "model.body.weight"}
    holdfast.load(state, path, rename=swap)
    assert state["model"]["head.weight"].sum() == 15


def test_a_rename_that_no_key_is_like_is_noted(path):
    report = holdfast.load(blank(), path, rename={"modle.body": "model.trunk", re.compile("nothing"): "x"})
    assert report.notes == [
        "rename: no stored key is, or begins with, 'modle.body'",
        "rename: no stored key is, or begins with, 'nothing'",
    ]


@pytest.mark.parametrize("rename", [{3: "x"}, lambda key: 5, lambda key: ""])
def test_names_that_are_none_are_refused(path, rename):
    with pytest.raises(TypeError, match="rename"):
        holdfast.load(blank(), path, rename=rename)


def test_per_rank_values_lists_and_dicts_with_odd_keys_can_be_renamed_as_a_whole(tmp_path):
    stored = {"old": {"rng": holdfast.PerRank({"seed": 4}), "list": [torch.ones(1), 2], "odd": {3: "x", None: "y"}}}
    state: dict[str, Any] = {"new": {"rng": holdfast.PerRank({"seed": 0}), "list": [], "odd": {}}}
    report = holdfast.load(state, saved(stored, tmp_path), rename={"old": "new"})
    assert state["new"]["rng"].value == {"seed": 4}
    assert state["new"]["list"][1] == 2
    assert report.missing == report.unexpected == []


def test_optimizers_and_their_models_can_be_renamed_as_a_whole(tmp_path):
    source = trained(0.1)
    path = saved({"old": source}, tmp_path)
    state = {"new": fresh(0.3)}
    holdfast.load(state, path, rename={"old": "new"})
    assert state["new"]["optim"].param_groups[0]["lr"] == 0.1
    entry = state["new"]["optim"].state[state["new"]["model"].weight]
    assert torch.equal(entry["exp_avg"], source["optim"].state[source["model"].weight]["exp_avg"])


def test_a_dtype_changes_only_where_that_is_allowed(path):
    def half() -> dict[str, Any]:
        state = blank()
        state["model"] = {key: value.to(torch.bfloat16) for key, value in state["model"].items()}
        return state

    for cast in [
        True,
        "model.*",
        ["model"],
        {"model.*": torch.bfloat16},
        {"model.*": "bfloat16"},
        {"*": np.float32, "model": "bfloat16"},
    ]:
        state = half()
        if cast == {"*": np.float32, "model": "bfloat16"}:
            cast = {"model": "bfloat16", "*": np.float32}  # the first pattern that fits counts
        report = holdfast.load(state, path, cast=cast)
        assert torch.equal(state["model"]["body.weight"], STORED["model"]["body.weight"].to(torch.bfloat16))
        assert report.cast == {f"model.{key}": ("float32", "bfloat16") for key in STORED["model"]}
    for cast in [False, "optim.*", {"model.*": torch.float16}]:
        state = half()
        with pytest.raises(StateMismatchError) as raised:
            holdfast.load(state, path, cast=cast)
        assert raised.value.dtypes == {f"model.{key}": ("float32", "bfloat16") for key in STORED["model"]}
        assert is_blank(state)


def test_what_the_state_has_no_memory_for_is_made_in_the_dtype_that_was_asked_for(tmp_path):
    path = saved({"a": {"w": torch.rand(3), "count": torch.arange(2)}}, tmp_path)
    state: dict[str, Any] = {"a": {}}
    report = holdfast.load(state, path, cast={"a.*": torch.float64})
    assert state["a"]["w"].dtype == torch.float64
    assert state["a"]["count"].dtype == torch.int64, "a counter is not a number to be rounded"
    assert report.cast == {"a.w": ("float32", "float64")}


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        (torch.rand(3, 4).to(torch.bfloat16), np.zeros((3, 4), np.float64)),
        (torch.rand(3, 4).to(torch.float8_e4m3fn), np.zeros((3, 4), np.float32)),
        (np.arange(12, dtype=">i2").reshape(3, 4), torch.zeros(3, 4)),
        (np.arange(12, dtype="<u2").reshape(3, 4), np.zeros((3, 4), ">f8")),
        (torch.arange(12).reshape(3, 4), torch.zeros(4, 3, dtype=torch.float16).t()),
        (torch.rand(3, 4), torch.zeros(3, 4, dtype=torch.complex128)),
    ],
)
def test_casts_between_torch_and_numpy_give_the_same_numbers(tmp_path, stored, target):
    state = {"x": target}
    holdfast.load(state, saved({"x": stored}, tmp_path), cast=True)
    expected = stored.to(torch.float64).numpy() if isinstance(stored, torch.Tensor) else stored.astype(float)
    assert np.array_equal(np.asarray(state["x"]).astype(complex), expected.astype(complex))


def test_what_is_no_number_cannot_be_cast(tmp_path):
    path = saved({"t": np.array(["2020-01-01"], "M8[D]")}, tmp_path)
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load({"t": torch.zeros(1)}, path, cast=True)
    assert list(raised.value.dtypes) == ["t"]


def test_a_load_is_one_line_in_the_log(path, caplog):
    with caplog.at_level("INFO", "holdfast"):
        report = holdfast.load(blank(), path)
    (record,) = [record for record in caplog.records if record.name.startswith("holdfast.")]
    assert record.getMessage().startswith(f"loaded {size(report.bytes_read)} from {path} in ")
    assert "\n" not in record.getMessage()
    assert record.event["nbytes"] == report.bytes_read
    assert record.event["detail"] == {"keys": len(report.read)}


def test_wrong_options_are_refused(path):
    with pytest.raises(ValueError, match="verify"):
        holdfast.load(blank(), path, verify="last")
    with pytest.raises(ValueError, match="verify_first=True compares digests, and verify=False asks for none"):
        holdfast.load(blank(), path, verify=False, verify_first=True)
    with pytest.raises(TypeError, match="not a dtype"):
        holdfast.load(blank(), path, cast={"*": "float33"})
    with pytest.raises(TypeError, match="which keys"):
        holdfast.load(blank(), path, include=[3])


def test_transforms_split_join_and_turn_stored_tensors(tmp_path):
    stored = {
        "qkv": torch.arange(24.0).reshape(6, 4),
        "a": torch.ones(2, 3),
        "b": torch.zeros(1, 3),
        "t": torch.rand(3, 5),
    }
    path = saved({"m": stored, "step": 3}, tmp_path)
    state = {
        "m": {
            **{name: torch.zeros(2, 4) for name in "qkv"},
            "ab": torch.zeros(3, 3),
            "t": torch.zeros(5, 3),
            "alias": torch.zeros(3, 5),
            "array": np.zeros((1, 3), np.float32),
            "sum": 0,
        },
        "step": 0,
    }
    report = holdfast.load(
        state,
        path,
        transform={
            re.compile(r"m\.[qkv]"): lambda c, key: c["m.qkv"].torch().chunk(3)["qkv".index(key[-1])],
            "m.ab": lambda c, key: torch.cat([c["m.a"][:], c["m.b"][:]]),
            "m.t": lambda c, key: c["m.t"][:].t(),
            "m.alias": lambda c, key: c["m.t"],
            "m.array": lambda c, key: c["m.b"].numpy(),
            "m.sum": lambda c, key: float(c["m.a"][...].sum()),
        },
    )
    q, _, v = stored["qkv"].chunk(3)
    assert torch.equal(state["m"]["q"], q)
    assert torch.equal(state["m"]["v"], v)
    assert torch.equal(state["m"]["ab"], torch.cat([stored["a"], stored["b"]]))
    assert torch.equal(state["m"]["t"], stored["t"].t())
    assert torch.equal(state["m"]["alias"], stored["t"])
    assert state["m"]["sum"] == 6
    assert report.transformed == ["m.q", "m.k", "m.v", "m.ab", "m.t", "m.alias", "m.array", "m.sum"]
    assert report.unexpected == []
    assert report.elements == 24 + 9 + 15 + 15 + 3


def test_transforms_reach_into_optimizers_and_those_for_no_key_are_noted(tmp_path):
    path = saved(trained(0.1), tmp_path)
    state = fresh(0.2)
    report = holdfast.load(
        state,
        path,
        transform={
            "optim.state.*.step": lambda c, key: torch.tensor(50.0),
            "optim.state.weight.exp_avg": lambda c, key: c[key][:] * 2,
            "optim.param_groups.0.lr": lambda c, key: 0.75,
            "modle.*": lambda c, key: 1,
        },
    )
    stored = holdfast.open(path)
    entry = state["optim"].state[state["model"].weight]
    assert entry["step"].item() == 50
    assert torch.equal(entry["exp_avg"], stored["optim.state.weight.exp_avg"][:] * 2)
    assert torch.equal(entry["exp_avg_sq"], stored["optim.state.weight.exp_avg_sq"][:])
    assert [group["lr"] for group in state["optim"].param_groups] == [0.75, 0.01]
    assert report.notes == ["transform: no key of the state is meant by 'modle.*'"]


@pytest.mark.parametrize("kind", [torch.zeros, np.zeros])
def test_what_a_transform_makes_is_not_changed_by_what_is_read_afterwards(tmp_path, kind):
    path = saved({"a": torch.ones(3)}, tmp_path)
    state = {"a": kind(3, dtype=kind(1).dtype), "before": torch.full((3,), 9.0)}
    holdfast.load(state, path, transform={"before": lambda c, key: state["a"]}, cast=True)
    assert state["a"].tolist() == [1, 1, 1]
    assert state["before"].tolist() == [0, 0, 0]


def test_what_a_transform_makes_wrongly_is_reported_with_everything_else(tmp_path):
    path = saved({"a": torch.ones(2), "b": torch.ones(2), "gone": 1}, tmp_path)
    state = {name: torch.zeros(2) for name in ["a", "b", "shape", "dtype", "kind", "raises", "lacks"]}

    def divide(checkpoint: holdfast.Checkpoint, key: str) -> Any:
        return 1 // 0

    with pytest.raises(StateMismatchError) as raised:
        holdfast.load(
            state,
            path,
            transform={
                "shape": lambda c, key: torch.ones(3),
                "dtype": lambda c, key: torch.ones(2, dtype=torch.float64),
                "kind": lambda c, key: 5,
                "raises": divide,
                "lacks": lambda c, key: c["c"][:],
            },
        )
    error = raised.value
    assert error.shapes == {"shape": ((3,), (2,))}
    assert error.dtypes == {"dtype": ("float64", "float32")}
    assert set(error.kinds) == {"kind", "raises", "lacks"}
    assert "ZeroDivisionError" in error.kinds["raises"]
    assert "did you mean" in error.kinds["lacks"] or "there is no 'c'" in error.kinds["lacks"]
    assert all(tensor.sum() == 0 for tensor in state.values())
    report = holdfast.load(
        {"dtype": state["dtype"]}, path, transform={"*": lambda c, key: c["a"][:].double()}, cast=True
    )
    assert report.cast == {"dtype": ("float64", "float32")}
    assert state["dtype"].tolist() == [1, 1]


def test_stored_keys_that_transforms_never_look_at_are_unexpected(tmp_path):
    path = saved({"m": {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}}, tmp_path)
    state = {"m": {"ab": torch.zeros(4)}}
    join = {"m.ab": lambda c, key: torch.cat([c["m.a"][:], c["m.b"][:]])}
    with pytest.raises(StateMismatchError) as raised:
        holdfast.load(state, path, transform=join)
    assert raised.value.unexpected == ["m.c"]
    whole = {"m.ab": lambda c, key: torch.cat([c.tree()["m"][name][:] for name in "ab"])}
    report = holdfast.load(state, path, transform=whole, allow_unexpected="m.c")
    assert report.unexpected == ["m.c"]


def test_damage_that_a_transform_meets_is_reported_as_damage(tmp_path):
    path = saved({"a": torch.ones(1000)}, tmp_path)
    (file,) = path.glob("data-*")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    state = {"b": torch.zeros(1000)}
    with pytest.raises(DamagedCheckpointError) as raised:
        holdfast.load(state, path, transform={"b": lambda c, key: c["a"][:]})
    assert "Nothing was changed" in str(raised.value)
    assert state["b"].sum() == 0


def test_an_optimizer_that_does_not_fit_is_reported_as_such_or_among_other_problems(tmp_path):
    path = saved(trained(0.1), tmp_path)
    model = nn.Linear(3, 2)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    with pytest.raises(OptimizerMismatchError, match="Nothing was changed") as raised:
        holdfast.load(state, path)
    assert len(raised.value.problems) == 1
    with pytest.raises(StateMismatchError) as both:
        holdfast.load({**state, "other": torch.zeros(1)}, path)
    assert both.value.missing == ["other"]
    assert list(both.value.kinds) == ["optim"]
