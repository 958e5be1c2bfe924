"""``holdfast.explain`` says what ``holdfast.load`` does, changes nothing, and its hints help."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import holdfast
from holdfast._load.checkpoint import source_of
from holdfast._tools.inspecting.explain import explain
from holdfast.errors import CheckpointNotFoundError, HoldfastError, StateMismatchError
from tests.properties import examples
from tests.rank_pool import RankPool

# --- the same as load ------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.int64]
tensors = st.builds(
    lambda shape, dtype: torch.ones(shape, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from(DTYPES),
)
leaves = st.one_of(tensors, tensors, st.integers(0, 3), st.sampled_from(["text", None, 1.5, [1, 2]]))
names = st.sampled_from(["a", "b", "module", "w", "a.b"])
states = st.dictionaries(names, st.one_of(leaves, st.dictionaries(names, leaves, max_size=3)), min_size=1, max_size=4)


@st.composite
def changed(draw: st.DrawFn, state: dict[str, Any]) -> dict[str, Any]:
    """A state that is like another one, but for a few things."""
    made = copy.deepcopy(state)
    for _ in range(draw(st.integers(0, 2))):
        inner = draw(st.sampled_from([made, *(value for value in made.values() if isinstance(value, dict))]))
        what = draw(st.sampled_from(["remove", "add", "replace"]))
        if what == "remove" and inner:
            del inner[draw(st.sampled_from(sorted(inner)))]
        else:
            inner[draw(names)] = draw(leaves)
    return made


options = st.fixed_dictionaries(
    {},
    optional={
        "strict": st.booleans(),
        "cast": st.one_of(st.booleans(), st.just(["a.*"])),
        "allow_missing": st.sampled_from(["a", "*", "w"]),
        "allow_unexpected": st.sampled_from(["b", "*"]),
        "include": st.sampled_from(["a", "*"]),
        "exclude": st.sampled_from(["b", "w"]),
        "rename": st.sampled_from([{"a": "b"}, {"w": "a.w"}]),
    },
)


def _as_text(value: Any) -> str:
    return repr(value)


@given(data=st.data(), arguments=options)
@settings(max_examples=examples(120))
def test_the_answer_is_what_load_does(data: st.DataObject, arguments: dict[str, Any]) -> None:
    stored = data.draw(states)
    target = data.draw(changed(stored))
    with tempfile.TemporaryDirectory() as folder:
        try:
            holdfast.save(stored, f"{folder}/c")
        except HoldfastError:
            return  # not every state can be saved
        before = _as_text(target)
        answer, refusal = _outcome(lambda: explain(f"{folder}/c", target, **arguments))
        assert _as_text(target) == before  # nothing was changed
        report, error = _outcome(lambda: holdfast.load(target, f"{folder}/c", **arguments))

    if answer is None:  # it is the caller who asks for what cannot be
        assert type(refusal) is type(error)
        return
    assert answer.ok == (error is None), (str(answer), error)
    if error is not None:
        assert answer.refusal == str(error)
        assert not answer.read or not answer.ok
    else:
        assert list(answer.read) == list(report.read)
        assert dict(answer.cast) == dict(report.cast)
        assert list(answer.left_as_they_are) == list(report.missing)
        assert list(answer.passed_over) == list(report.unexpected)
        assert list(answer.untouched) == list(report.untouched)
        assert list(answer.not_requested) == list(report.not_requested)


def _outcome(call: Any) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except (HoldfastError, ValueError, TypeError) as error:
        return None, error


def test_models_and_optimizers_are_explained_and_left_alone(tmp_path: Path) -> None:
    def made(width: int) -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        return {"model": model, "optim": optimizer, "step": 1}

    holdfast.save(made(3), tmp_path / "c")
    fits, other = made(3), made(5)
    before = [copy.deepcopy(state["model"].state_dict()) for state in (fits, other)]
    fresh = torch.optim.AdamW(fits["model"].parameters())

    assert explain(tmp_path / "c", fits).ok
    assert explain(tmp_path / "c", {"model": fits["model"], "optim": fresh, "step": 0}).ok
    assert not fresh.state  # an optimizer that has not stepped stays like that
    answer = explain(tmp_path / "c", other)
    assert not answer.ok
    assert answer.shapes["model.0.weight"] == ((3, 4), (5, 4))
    with pytest.raises(StateMismatchError) as caught:
        holdfast.load(other, tmp_path / "c")
    assert answer.refusal == str(caught.value)
    for state, old in zip((fits, other), before, strict=True):
        assert all(torch.equal(value, old[key]) for key, value in state["model"].state_dict().items())
    assert "would NOT load" in str(answer)


def test_a_part_of_a_checkpoint_loads_and_the_rest_is_named(tmp_path: Path) -> None:
    holdfast.save({"model": {"w": torch.ones(2)}, "optim": {"m": torch.ones(2)}, "step": 1}, tmp_path / "c")

    answer = explain(tmp_path / "c", {"model": {"w": torch.zeros(2)}})

    assert (answer.ok, answer.read, answer.not_requested) == (True, ("model.w",), ("optim.m", "step"))
    assert "would load into the state" in str(answer)
    assert json.loads(json.dumps(answer.to_json()))["ok"] is True


# --- other checkpoints as targets ------------------------------------------------------------------------------------


def test_a_checkpoint_would_load_into_one_like_itself_in_any_format(tmp_path: Path) -> None:
    tensors = {"model.a": torch.randn(7, 3), "model.h": torch.ones(3, dtype=torch.bfloat16), "model.e": torch.empty(0)}
    nested = {"model": {key.removeprefix("model."): value for key, value in tensors.items()}}
    holdfast.save(nested, tmp_path / "native")
    save_file(tensors, tmp_path / "m.safetensors")
    torch.save(nested, tmp_path / "m.pt")
    places = [tmp_path / "native", tmp_path / "m.safetensors", tmp_path / "m.pt"]

    for place in places:
        for other in places:
            assert explain(place, other).ok, (place, other)
    with holdfast.open(places[0]) as checkpoint:
        assert explain(checkpoint, checkpoint).target == str(places[0])


def test_targets_may_be_far_larger_than_the_memory(tmp_path: Path) -> None:
    small = torch.zeros(1).expand(1 << 20, 3)
    holdfast.save(
        {"w": small[:4].clone(), "n": torch.arange(3).numpy(), "tied": [small[:1].clone()] * 2}, tmp_path / "a"
    )
    answer = explain(tmp_path / "a", _Claims(tmp_path / "a", {"w": (1 << 28, 1 << 8)}))  # 256 GiB

    assert answer.shapes == {"w": ((4, 3), (1 << 28, 1 << 8))}
    assert not answer.missing


class _Claims(holdfast.Checkpoint):
    """A checkpoint with tensors that are said to be larger than they are."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(source_of(holdfast.open(path)))
        for key, shape in shapes.items():
            source_of(self).tree[key] = replace(source_of(self).tree[key], shape=shape)


def save_per_rank(path: Path) -> None:
    holdfast.save(
        {"own": holdfast.PerRank({"t": torch.ones(2), "n": torch.distributed.get_rank()}), "w": torch.ones(3)}, path
    )


def test_what_every_rank_has_its_own_of_fits_whatever_the_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_per_rank, tmp_path / "two")
    ranks(3).run(save_per_rank, tmp_path / "three")

    assert explain(tmp_path / "two", tmp_path / "three").ok
    assert explain(tmp_path / "three", tmp_path / "two").ok


def explain_on_ranks(path: Path) -> tuple[bool, bool]:
    fits = explain(path, {"own": holdfast.PerRank({"t": torch.zeros(2), "n": 0}), "w": torch.ones(3)}).ok
    return fits, explain(path, {"w": torch.ones(4)}).ok if torch.distributed.get_rank() == 0 else False


def test_ranks_ask_for_themselves(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_per_rank, tmp_path / "c")

    assert ranks(2).run(explain_on_ranks, tmp_path / "c") == [(True, False), (True, False)]


def test_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError):
        explain(tmp_path / "nothing", {})
    with pytest.raises(CheckpointNotFoundError):
        explain(tmp_path / "c", tmp_path / "nothing")


# --- hints -----------------------------------------------------------------------------------------------------------


def layers(prefix: str, count: int = 3) -> dict[str, torch.Tensor]:
    made = {f"{prefix}embed.weight": torch.ones(9, 4)}
    for number in range(count):
        made[f"{prefix}layers.{number}.weight"] = torch.ones(4, 4)
        made[f"{prefix}layers.{number}.bias"] = torch.ones(4)
    return made


@pytest.mark.parametrize(
    ("stored", "wanted", "rename"),
    [
        ("model.", "", {"model": ""}),
        ("net.", "encoder.", {"net": "encoder"}),
        ("model.net.", "model.", {"model.net": "model"}),
        ("", "model.", {"embed": "model.embed", "layers": "model.layers"}),
    ],
)
def test_changed_prefixes_are_found_and_help(stored: str, wanted: str, rename: dict[str, str], tmp_path: Path) -> None:
    save_file(layers(stored), tmp_path / "m.safetensors")
    state = layers(wanted)

    answer = explain(tmp_path / "m.safetensors", state)

    assert not answer.ok
    assert answer.hints[0].startswith(f"rename={rename!r} gives 7 missing keys what they need")
    assert "then it would load" in answer.hints[0]
    assert explain(tmp_path / "m.safetensors", state, rename=rename).ok
    holdfast.load(state, tmp_path / "m.safetensors", rename=rename)


def test_casts_and_renames_are_tried_together(tmp_path: Path) -> None:
    holdfast.save({"model": layers("old.")}, tmp_path / "c")
    state = {"model": {key: tensor.bfloat16() for key, tensor in layers("new.").items()}}

    answer = explain(tmp_path / "c", state)

    assert len(answer.hints) == 2
    assert "7 other problem(s) stay" in answer.hints[0]
    assert answer.hints[1] == "cast=True converts float32 -> bfloat16 (7); then it would load"
    assert explain(tmp_path / "c", state, rename={"model.old": "model.new"}, cast=True).ok


def test_shapes_that_are_turned_or_cut_are_reported(tmp_path: Path) -> None:
    holdfast.save(
        {"a": torch.ones(2, 3), "b": torch.ones(2, 3, 4), "c": torch.ones(6, 2), "d": torch.ones(9, 2)}, tmp_path / "c"
    )
    state = {"a": torch.ones(3, 2), "b": torch.ones(4, 2, 3), "c": torch.ones(3, 4), "d": torch.ones(7, 2)}

    hints = explain(tmp_path / "c", state).hints

    assert [hint.partition(":")[0] for hint in hints] == ["a", "b", "c", "d"]
    assert "checkpoint[key][:].T" in hints[0]
    assert ".permute(2, 0, 1)" in hints[1]
    assert ".reshape(3, 4)" in hints[2]
    assert "9 stored rows for 7" in hints[3]
    turned = torch.ones(2, 3, 4).permute(2, 0, 1)
    assert turned.shape == (4, 2, 3)


def test_hints_that_do_not_help_are_not_given(tmp_path: Path) -> None:
    holdfast.save({"a": torch.ones(2), "b": torch.ones(math.prod((2, 2)))}, tmp_path / "c")

    assert explain(tmp_path / "c", {"x": {"y": torch.ones(5)}}).hints == ()
    assert explain(tmp_path / "c", {"a": torch.ones(2), "q": torch.ones(3)}).hints == ()
