"""A bit that changed is found in every format that has digests, whatever becomes of the elements that are read."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file

import holdfast
import holdfast.dcp
from holdfast.errors import DamagedCheckpointError
from tests.torches import ALONE

SHAPE = (400, 3000)  # more than is read at once
CONTENT = torch.arange(math.prod(SHAPE), dtype=torch.float32).reshape(SHAPE)
BAD = (300, 2000)
BEFORE = 7.0

TARGETS = {
    "as stored": lambda: torch.full(SHAPE, BEFORE),
    "cast": lambda: torch.full(SHAPE, BEFORE, dtype=torch.float64),
    "transposed": lambda: torch.full((*reversed(SHAPE),), BEFORE).T,
    "numpy cast": lambda: np.full(SHAPE, BEFORE, np.float64),
}
CHECKED = ["native", "dcp", "stock", "stock, transposed", "torch", "torch, transposed"]
FORMATS = [*CHECKED, "safetensors"]


def saved(form: str, folder: Path) -> Path:
    """A checkpoint, in which one bit of one element is not what it was."""
    path = folder / form
    state = {"other": torch.ones(5), "w": CONTENT}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "native":
            holdfast.save(state, path)
        elif form == "dcp":
            holdfast.dcp.save(state, checkpoint_id=path, no_dist=True)
        elif form == "stock":
            stock.save(state, checkpoint_id=path, **ALONE)
        elif form == "stock, transposed":
            stock.save({**state, "w": CONTENT.T.contiguous().T}, checkpoint_id=path, **ALONE)
        elif form == "torch":
            torch.save(state, path)
        elif form == "torch, transposed":
            torch.save({**state, "w": CONTENT.T.contiguous().T}, path)
        else:
            save_file(state, path)
    files = [path] if path.is_file() else list(path.iterdir())
    return path if sum(damage(file) for file in files) == 1 else pytest.fail("the element is not in one place")


def damage(file: Path) -> bool:
    """Change the element between its neighbours, in the order of either dimension."""
    content = bytearray(file.read_bytes())
    row, column = BAD
    for neighbours in (CONTENT[row, column - 1 : column + 2], CONTENT[row - 1 : row + 2, column]):
        begin = content.find(neighbours.numpy().tobytes())
        if begin >= 0:
            content[begin + 4 + 2] ^= 16
            file.write_bytes(content)
            return True
    return False


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    return {form: saved(form, folder) for form in FORMATS}


def load(path: Path, kind: str, **options):
    """The state after a load, and the error."""
    state = {"other": torch.zeros(5, dtype=torch.float64), "w": TARGETS[kind]()}
    with pytest.raises(DamagedCheckpointError) as caught:
        holdfast.load(state, path, cast=True, memory_budget=1 << 20, **options)
    return torch.as_tensor(state["w"]), str(caught.value)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("form", CHECKED)
def test_damage_is_raised_and_never_arrives(checkpoints, form, kind):
    w, message = load(checkpoints[form], kind)
    assert str(checkpoints[form]) in message
    assert message.endswith("The state is partly loaded now and must not be used.")
    right = CONTENT.to(w.dtype)
    assert ((w == BEFORE) | (w == 0) | (w == right)).all()
    assert w[BAD] in (BEFORE, 0)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("form", CHECKED)
def test_damage_is_found_before_anything_is_changed_if_that_is_asked_for(checkpoints, form, kind):
    w, message = load(checkpoints[form], kind, verify_first=True)
    assert (w == BEFORE).all()
    assert message.endswith("Nothing was changed.")
    assert "zero" not in message
    assert "loaded" not in message


@pytest.mark.parametrize("form", CHECKED)
def test_verify_finds_damage_again_and_again(checkpoints, form):
    with holdfast.open(checkpoints[form]) as checkpoint:
        for _ in range(2):
            report = checkpoint.verify()
            assert not report.ok
            assert [found.keys for found in report.damage] == [("w",)]


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize(
    ("form", "options"), [*((form, {"verify": False}) for form in CHECKED), ("safetensors", {"verify_first": True})]
)
def test_without_digests_to_compare_it_is_loaded_as_it_is(checkpoints, form, options, kind):
    state = {"other": torch.zeros(5, dtype=torch.float64), "w": TARGETS[kind]()}
    holdfast.load(state, checkpoints[form], cast=True, memory_budget=1 << 20, **options)
    assert (torch.as_tensor(state["w"]) != CONTENT).nonzero().tolist() == [list(BAD)]
