"""The options of a save: what is chosen, cast, cut, noted, replaced; how much memory it takes; how files look."""

from __future__ import annotations

import inspect
import json
import os
import pydoc
import re
import shutil
import stat
import subprocess
import sys
import textwrap
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast._save.options import SaveOptions
from tests.native_files import table_begin
from tests.save.random_states import difference
from tests.torches import dtypes

# --- choosing keys ---------------------------------------------------------------------------------------------------


def chosen(tmp_path: Path, state: object, **options: object) -> object:
    holdfast.save(state, tmp_path / "x", overwrite=True, **options)
    return holdfast.open(tmp_path / "x").read()


STATE = {
    "model": {"layer.weight": torch.ones(2), "layer.bias": torch.zeros(2)},
    "optim": {"state": {0: {"step": 3}}, "betas": (0.9, 0.99), "milestones": [3, 6]},
    "history": [torch.ones(1), {"loss": 0.5, "grad": torch.ones(3)}, "text"],
    "unsupported": object(),
    "step": 5,
}
KEYS = [
    "model.layer.weight",
    "model.layer.bias",
    "optim.state.0.step",
    "optim.betas",
    "optim.milestones",
    "history.0",
    "history.1.loss",
    "history.1.grad",
    "history.2",
    "step",
]


@pytest.mark.parametrize(
    ("include", "keys"),
    [
        ("model", KEYS[:2]),
        ("*weight", KEYS[:1]),
        (["mode", "step"], [KEYS[9]]),
        (["step", "optim.betas"], [KEYS[3], KEYS[9]]),
        (re.compile(r"optim\.(betas|milestones)"), KEYS[3:5]),
        ([re.compile("optim"), "step"], [KEYS[9]]),
        (lambda key: key.endswith("ss"), ["history"]),  # without a tensor in it, a list is one entry
        (lambda key: "s" in key and "t" not in key, ["model.layer.bias"]),
        (lambda key: key.startswith("history.1"), KEYS[6:8]),
        (("step", re.compile(".*step")), ["optim.state.0.step", "step"]),
    ],
)
def test_only_included_keys_are_saved(tmp_path, include, keys):
    holdfast.save(STATE, tmp_path / "x", include=include)
    checkpoint = holdfast.open(tmp_path / "x")
    found = {key: checkpoint[key] for key in checkpoint if checkpoint[key] is not None}
    assert list(found) == keys


def test_functions_are_asked_for_the_keys_of_the_checkpoint_once_each(tmp_path):
    asked = []
    holdfast.save(STATE, tmp_path / "x", include=lambda key: asked.append(key) or key != "unsupported")
    assert list(holdfast.open(tmp_path / "x")) == KEYS
    assert [key for key in asked if key != "unsupported"] == KEYS


def test_excluded_keys_may_be_what_cannot_be_stored(tmp_path):
    found = chosen(tmp_path, STATE, exclude=["unsupported", "model", "history.1.grad"])
    expected = {"optim": STATE["optim"], "history": [torch.ones(1), {"loss": 0.5}, "text"], "step": 5}
    assert difference(found, expected) is None


def test_positions_in_lists_stay(tmp_path):
    found = chosen(tmp_path, {"list": [torch.ones(1), 2, torch.ones(3)], "pair": (1, torch.ones(1))}, exclude="*.0")
    assert difference(found, {"list": [None, 2, torch.ones(3)], "pair": (None, torch.ones(1))}) is None


def test_what_is_excluded_wins(tmp_path):
    found = chosen(tmp_path, {"a": {"b": 1, "c": 2}, "d": 3}, include="a", exclude="*.c")
    assert found == {"a": {"b": 1}}


def test_values_per_rank_are_chosen_by_their_keys(tmp_path):
    state = {"own": holdfast.PerRank({"a": torch.ones(1), "b": 2}), "rng": holdfast.RngState(), "step": 1}
    assert chosen(tmp_path, state, include="own") == {"own": [{"a": torch.ones(1), "b": 2}]}
    assert chosen(tmp_path, state, exclude=["own.*.a", "rng"]) == {"own": [{"b": 2}], "step": 1}
    assert chosen(tmp_path, state, include=re.compile(r"own\.0\.b|step")) == {"own": [{"b": 2}], "step": 1}


def test_containers_keep_their_types(tmp_path):
    import collections

    state = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(int, a=1, b=2),
        "counter": collections.Counter(a=1, b=2),
    }
    found = chosen(tmp_path, state, exclude="*.a")
    expected = {
        "ordered": collections.OrderedDict(b=1),
        "default": collections.defaultdict(int, b=2),
        "counter": collections.Counter(b=2),
    }
    assert difference(found, expected) is None


# --- casting ---------------------------------------------------------------------------------------------------------


def test_floating_tensors_are_cast_by_pattern(tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(50, 40, dtype=torch.float64)
    state = {
        "model": {
            "w": weight,
            "transposed": weight.T,
            "half": weight.half(),
            "count": torch.arange(3),
            "mask": torch.ones(2, dtype=torch.bool),
            "waves": torch.tensor([1 + 2j]),
            "packed": torch.ones(2, dtype=torch.uint8).view(getattr(torch, "float4_e2m1fn_x2", torch.uint4)),
            "array": np.ones(2),
            "value": 0.1,
        },
        "head": weight,
        "other": weight,
    }
    found = chosen(tmp_path, state, cast={"model": torch.bfloat16, re.compile("head"): "float32", "*": np.float16})
    assert torch.equal(found["model"]["w"], weight.bfloat16())
    assert torch.equal(found["model"]["transposed"], weight.T.bfloat16())
    assert torch.equal(found["model"]["half"], weight.half().bfloat16())
    assert torch.equal(found["head"], weight.float())
    assert torch.equal(found["other"], weight.half())
    for name in ("count", "mask", "waves", "packed", "array", "value"):
        assert difference(found["model"][name], state["model"][name]) is None


@pytest.mark.parametrize("dtype", ["int8", torch.int64, torch.complex64, *dtypes("float4_e2m1fn_x2")])
def test_a_cast_must_be_to_a_floating_point_type(tmp_path, dtype):
    with pytest.raises(ValueError, match="from one floating point type to another"):
        holdfast.save({"w": torch.ones(2)}, tmp_path / "x", cast={"*": dtype})


def test_a_cast_to_no_dtype_at_all_is_reported(tmp_path):
    with pytest.raises(TypeError, match="'float99' is not a dtype"):
        holdfast.save({"w": torch.ones(2)}, tmp_path / "x", cast={"*": "float99"})


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 100, 4096, 100_000])
def test_files_have_the_size_that_was_asked_for(tmp_path, limit):
    state = {"large": torch.arange(30 if limit == 1 else 5000), "small": torch.ones(3), "t": torch.randn(6, 5).T}
    holdfast.save(state, tmp_path / "x", max_file_size=limit)
    files = list((tmp_path / "x").glob("data-*"))
    for file in files:
        content = file.read_bytes()
        header = int.from_bytes(content[:8], "little") + 8
        assert table_begin(content) - header <= max(limit, 8)
    total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in state.values())
    assert len(files) >= total / max(limit, 8)
    assert difference(holdfast.open(tmp_path / "x").read(), state) is None


def test_sizes_may_be_written_as_people_write_them(tmp_path):
    holdfast.save({"w": torch.ones(1000)}, tmp_path / "x", max_file_size="1 KB", memory_budget="1MiB")
    holdfast.async_save({"w": torch.ones(1000)}, tmp_path / "y", max_file_size="1 KB", memory_budget="1MiB").result()
    assert [len(list((tmp_path / name).glob("data-*"))) for name in "xy"] == [4, 4]


@pytest.mark.parametrize("name", ["max_file_size", "memory_budget"])
@pytest.mark.parametrize("number", [0, -1, 1.5, "2 parsecs", True])
def test_sizes_must_be_numbers_of_bytes(tmp_path, name, number):
    with pytest.raises(ValueError, match=f"{name}: .* is not a size"):
        holdfast.save({"w": torch.ones(2)}, tmp_path / "x", **{name: number})


def test_a_budget_too_small_for_any_buffer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="memory_budget must be 262144 bytes at least, not 262143"):
        holdfast.save({"w": torch.ones(2)}, tmp_path / "x", memory_budget=(256 << 10) - 1)
    holdfast.save({"w": torch.arange(600_000).reshape(600, 1000).T}, tmp_path / "x", memory_budget=256 << 10)
    assert torch.equal(holdfast.open(tmp_path / "x")["w"][:], torch.arange(600_000).reshape(600, 1000).T)


def test_many_tensors_are_few_files(tmp_path):
    holdfast.save({f"w{n}": torch.ones(2) for n in range(300)}, tmp_path / "x")
    assert len(os.listdir(tmp_path / "x")) == 2


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_are_as_readable_as_all_that_the_user_makes(tmp_path, umask):
    before = os.umask(umask)
    try:
        holdfast.save({"w": torch.ones(2)}, tmp_path / "new" / "x")
    finally:
        os.umask(before)
    files = list((tmp_path / "new" / "x").iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~umask}
    assert stat.S_IMODE((tmp_path / "new" / "x").stat().st_mode) == 0o777 & ~umask


def test_a_copy_of_the_folder_is_a_checkpoint(tmp_path):
    state = {"w": torch.randn(3), "own": holdfast.PerRank(4)}
    holdfast.save(state, tmp_path / "x")
    subprocess.run(["cp", "-r", tmp_path / "x", tmp_path / "copy"], check=True)
    shutil.rmtree(tmp_path / "x")
    assert torch.equal(holdfast.open(tmp_path / "copy").read()["w"], state["w"])
    target = {"w": torch.zeros(3), "own": holdfast.PerRank(0)}
    holdfast.load(target, tmp_path / "copy")
    assert torch.equal(target["w"], state["w"])


# --- what is noted ---------------------------------------------------------------------------------------------------


def test_metadata_and_a_stamp_are_in_the_record(tmp_path):
    metadata = {"loss": 0.25, "config": {"layers": [1, 2]}, "name": "läuft"}
    before = datetime.now(timezone.utc).replace(microsecond=0)
    holdfast.save({"w": torch.ones(1)}, tmp_path / "x", metadata=metadata)
    checkpoint = holdfast.open(tmp_path / "x")
    assert checkpoint.metadata == metadata
    written = checkpoint.provenance
    assert before <= datetime.fromisoformat(written["time"]) <= datetime.now(timezone.utc)
    assert written["world_size"] == 1
    assert (written["torch"], written["numpy"]) == (torch.__version__, np.__version__)
    assert written["by"] == f"holdfast {holdfast.__version__}"
    assert json.loads((tmp_path / "x" / "holdfast.json").read_text())["metadata"] == metadata


@pytest.mark.parametrize("metadata", [{"a": object()}, {"a": float("nan")}, {"a": torch.ones(1)}])
def test_metadata_that_json_cannot_hold_is_refused(tmp_path, metadata):
    with pytest.raises(ValueError, match="what JSON can hold"):
        holdfast.save({}, tmp_path / "x", metadata=metadata)
    assert not (tmp_path / "x").exists()


def test_a_result_tells_what_was_done(tmp_path):
    saved = holdfast.save({"a": torch.ones(10), "b": 1}, tmp_path / "x")
    files = list((tmp_path / "x").glob("data-*"))
    assert (saved.path, saved.tensor_count) == (str(tmp_path / "x"), 1)
    assert saved.bytes_written == sum(file.stat().st_size for file in files)
    assert saved.identity in files[0].name
    assert saved.world_size == 1
    assert str(saved).startswith(f"saved 1 tensor to {tmp_path / 'x'}\n  {saved.bytes_written:,} bytes written in ")
    target = {"a": torch.zeros(10), "b": 0}
    assert holdfast.load(target, tmp_path / "x").identity == saved.identity


@pytest.mark.parametrize("wish", [True, False, None, 1, "off", "raise"])
def test_an_unknown_wish_about_replicas_is_refused(tmp_path, wish):
    with pytest.raises(ValueError, match="replica_mismatch must be 'error', 'warn' or 'ignore'"):
        holdfast.save({}, tmp_path / "x", replica_mismatch=wish)


@pytest.mark.parametrize("save", [holdfast.save, holdfast.async_save])
def test_help_shows_every_option_with_its_default(save):
    shown = inspect.signature(save).parameters
    assert list(shown)[:2] == ["state", "path"]
    assert {name: shown[name].default for name in SaveOptions.__annotations__} == {
        "metadata": None,
        "include": None,
        "exclude": None,
        "cast": None,
        "replica_mismatch": "error",
        "allow_pickle": False,
        "max_file_size": None,
        "memory_budget": None,
    }
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown.values())
    assert "replica_mismatch: 'OnFinding' = 'error'" in pydoc.render_doc(save, renderer=pydoc.plaintext)


@pytest.mark.parametrize("save", [holdfast.save, holdfast.async_save])
def test_a_misspelt_option_is_a_type_error(tmp_path, save):
    with pytest.raises(TypeError, match=r"unexpected 'overwite'.*exclude"):
        save({}, tmp_path / "x", overwite=True)
    assert not (tmp_path / "x").exists()


# --- memory ----------------------------------------------------------------------------------------------------------

MEMORY = """
    import resource, sys, torch
    import holdfast

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    kind, path, budget = sys.argv[1], sys.argv[2], int(sys.argv[3])
    base = torch.ones(2048, 12288, dtype=torch.float32)  # 96 MB
    tensor = {"transposed": base.T, "sliced": base[:, 1:], "cast and transposed": base.T}[kind]
    cast = {"*": torch.float64} if "cast" in kind else None
    holdfast.save({"w": tensor[:64, :64]}, path + "-warm", cast=cast)
    before = peak()
    holdfast.save({"w": tensor, "tied": tensor}, path, cast=cast, memory_budget=budget or None)
    print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured as Linux tells it")
@pytest.mark.parametrize(
    ("kind", "budget"), [("transposed", 4 << 20), ("cast and transposed", 4 << 20), ("sliced", 16 << 20)]
)
def test_a_save_stays_within_its_budget(tmp_path, kind, budget):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), kind, str(tmp_path / "x"), str(budget)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) <= (budget >> 20) + 6
