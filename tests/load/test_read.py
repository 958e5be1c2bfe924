"""``holdfast.read`` and ``Checkpoint.read``: what is stored, in its containers, without a state to load into."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file

import holdfast
import holdfast.dcp
from holdfast.errors import RefusedPickleError, UnknownKeyError
from tests.exact import assert_same
from tests.native_files import flip_last_data_bit


def state() -> dict[str, Any]:
    return {
        "model": OrderedDict({"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}),
        "history": [1, 2.5, {"loss": torch.zeros(())}],
        "step": 7,
    }


def write(form: str, place: Path) -> tuple[Path, Any]:
    """A checkpoint of a format, and what reading it has to give."""
    if form == "native":
        holdfast.save(state(), place)
    elif form == "dcp":
        holdfast.dcp.save(state(), checkpoint_id=place, no_dist=True)
    elif form == "stock":
        stock.save(state(), checkpoint_id=place, no_dist=True)
    elif form == "torch":
        place = place.with_suffix(".pt")
        torch.save(state(), place)
    else:
        place = place.with_suffix(".safetensors")
        save_file(dict(state()["model"]), place)
        return place, dict(state()["model"])
    return place, state()


FORMS = ["native", "dcp", "stock", "torch", "safetensors"]


@pytest.mark.parametrize("form", FORMS)
def test_every_format_is_read_as_nested_containers(form: str, tmp_path: Path) -> None:
    place, expected = write(form, tmp_path / "x")
    found = holdfast.read(place)
    if form in ("dcp", "stock"):  # their index keeps no types of mappings
        expected["model"] = dict(expected["model"])
    assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))
    with holdfast.open(place) as checkpoint:
        assert_same(checkpoint.read(), found)


@pytest.mark.parametrize("form", FORMS)
def test_patterns_choose_and_leave_out(form: str, tmp_path: Path) -> None:
    place, _ = write(form, tmp_path / "x")
    prefix = "" if form == "safetensors" else "model."
    found = holdfast.read(place, include=[f"{prefix}w", f"{prefix}b"], exclude=re.compile(r".*\bb"))
    assert list(found if form == "safetensors" else found["model"]) == ["w"]
    with pytest.raises(UnknownKeyError, match="there is no 'modle'"):
        holdfast.read(place, include="modle")
    with pytest.raises(UnknownKeyError, match=r"all keys of .* are excluded by \*"):
        holdfast.read(place, exclude="*")


def test_containers_around_what_is_chosen_stay(tmp_path: Path) -> None:
    place, _ = write("native", tmp_path / "x")
    found = holdfast.read(place, include="model.b")
    assert type(found["model"]) is OrderedDict
    assert list(found) == ["model"]
    assert list(holdfast.read(place, exclude=["history", "step"])) == ["model"]


@pytest.mark.parametrize("form", ["native", "torch"])
def test_tied_tensors_are_one_tensor(form: str, tmp_path: Path) -> None:
    shared = torch.ones(3)
    place = tmp_path / "x.pt"
    if form == "torch":
        torch.save({"a": shared, "b": {"c": shared}}, place)
    else:
        holdfast.save({"a": shared, "b": {"c": shared}}, place)
    found = holdfast.read(place)
    found["a"].zero_()
    assert found["b"]["c"].tolist() == [0, 0, 0]


def test_tensors_go_to_the_device_and_arrays_stay(tmp_path: Path) -> None:
    shared = torch.ones(3)
    holdfast.save({"a": shared, "b": [shared, np.arange(3)], "n": 1}, tmp_path / "x")
    found = holdfast.read(tmp_path / "x", device="meta")
    assert found["a"].device.type == "meta"
    assert found["a"] is found["b"][0]
    assert type(found["b"][1]) is np.ndarray
    assert holdfast.read(tmp_path / "x", device=torch.device("cpu"))["a"].tolist() == [1, 1, 1]


def test_a_device_that_is_not_there_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    holdfast.save({"a": torch.ones(3)}, tmp_path / "x")
    [data] = (tmp_path / "x").glob("data-*")
    data.unlink()
    with pytest.raises(RuntimeError, match="nonsense"):
        holdfast.read(tmp_path / "x", device="nonsense")


def test_pickles_are_only_loaded_if_allowed(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "c": re.compile("a+")}, tmp_path / "x.pt")
    with pytest.raises(RefusedPickleError):
        holdfast.read(tmp_path / "x.pt")
    assert holdfast.read(tmp_path / "x.pt", allow_pickle=True)["c"] == re.compile("a+")


def test_damage_is_found_unless_nobody_wants_to_know(tmp_path: Path) -> None:
    holdfast.save({"a": torch.ones(1000)}, tmp_path / "x")
    [data] = (tmp_path / "x").glob("data-*")
    flip_last_data_bit(data)
    with pytest.raises(holdfast.errors.DamagedCheckpointError):
        holdfast.read(tmp_path / "x")
    with holdfast.open(tmp_path / "x") as checkpoint:
        assert len(checkpoint.read(verify=False)["a"]) == 1000


@pytest.mark.parametrize("form", ["native", "safetensors"])
def test_without_torch_tensors_are_arrays(form: str, tmp_path: Path) -> None:
    place, _ = write(form, tmp_path / "x")
    program = f"""
        import sys
        sys.modules["torch"] = None
        import numpy as np, holdfast
        found = holdfast.read({str(place)!r})
        weights = found.get("model", found)
        assert type(weights["w"]) is np.ndarray and weights["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert weights["b"].dtype == np.float32  # numpy has no bfloat16
        try:
            holdfast.read({str(place)!r}, device="cpu")
        except holdfast.errors.MissingPackageError as error:
            print(error.install)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.stdout.split() == ["torch"], ran.stderr


@pytest.mark.parametrize("form", FORMS)
def test_an_opened_checkpoint_and_its_path_are_verified_alike(form: str, tmp_path: Path) -> None:
    place, _ = write(form, tmp_path / "x")
    key = "w" if form == "safetensors" else "model.w"
    with holdfast.open(place) as checkpoint:
        for options in ({}, {"include": key}, {"exclude": key, "memory_budget": 1 << 20}):
            seen: list[tuple[int, int]] = []
            here = checkpoint.verify(**options, on_progress=lambda done, total, seen=seen: seen.append((done, total)))
            there = holdfast.verify(place, **options)
            assert here.ok
            for name in ("path", "format", "identity", "tensors", "keys", "bytes_read", "checked", "why", "damage"):
                assert getattr(here, name) == getattr(there, name)
            assert seen[-1] == (here.bytes_read, here.bytes_read)
        with pytest.raises(UnknownKeyError):
            checkpoint.verify(include="modle")
