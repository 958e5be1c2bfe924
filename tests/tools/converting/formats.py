"""Checkpoints of every format, written and read by the libraries that they belong to, and not by ours."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as stock
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import holdfast
from holdfast._base.boxes import Box, cut
from tests.dcp.cut_tensors import CutTensor
from tests.torches import ALONE

SOURCES = ("native", "dcp", "safetensors", "torch")
TARGETS = ("native", "dcp", "safetensors", "safetensors folder", "torch")


def write(format_: str, state: Mapping[str, Any], folder: Path, *, most: int = 64) -> Path:
    """Save a state, cut into parts of ``most`` bytes where the format can."""
    path = folder / {"safetensors": "source.safetensors", "torch": "source.pt"}.get(format_, "source")
    if format_ == "native":
        holdfast.save(state, path, max_file_size=most)
    elif format_ == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stock.save(in_parts(state, most), checkpoint_id=path, **ALONE)
    elif format_ == "safetensors":
        save_file({key: tensor.contiguous() for key, tensor in tensors_in(state).items()}, path)
    else:
        torch.save(state, path)
    return path


def read(target: str, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and values by their keys."""
    if target == "native":
        loaded = holdfast.open(path).read()
    elif target == "torch":
        loaded = torch.load(path, weights_only=True)
    elif target == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(path, path.with_suffix(".from_dcp"))
        loaded = torch.load(path.with_suffix(".from_dcp"), weights_only=True)
    elif target == "safetensors":
        loaded = read_safetensors(path)
    else:
        loaded = load_like_transformers(path)
    return tensors_in(loaded), values_in(loaded)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict


def load_like_transformers(folder: Path) -> dict[str, torch.Tensor]:
    """The state of a model as loaders of Hugging Face folders gather it."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_safetensors(folder / "model.safetensors")
    content = json.loads(index.read_text())
    state: dict[str, torch.Tensor] = {}
    for name in sorted(set(content["weight_map"].values())):
        with safe_open(folder / name, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            for key in file.keys():  # noqa: SIM118 - it is no dict
                assert content["weight_map"][key] == name
                state[key] = file.get_tensor(key)
    assert state.keys() == content["weight_map"].keys()
    assert content["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    return state


def in_parts(state: Any, most: int) -> Any:
    """The same state with its tensors cut, as several ranks would save them."""
    if isinstance(state, torch.Tensor) and state.numel():
        whole = Box((0,) * state.dim(), tuple(state.shape))
        return CutTensor.of(state, list(cut(whole, max(1, most // state.itemsize))), stock)
    if isinstance(state, dict):
        return {key: in_parts(child, most) for key, child in state.items()}
    if isinstance(state, list):
        return [in_parts(child, most) for child in state]
    return state


def tensors_in(state: Any) -> dict[str, torch.Tensor]:
    return {key: leaf for key, leaf in _leaves(state, "") if isinstance(leaf, torch.Tensor)}


def values_in(state: Any) -> dict[str, Any]:
    return {key: leaf for key, leaf in _leaves(state, "") if not isinstance(leaf, torch.Tensor)}


def _leaves(state: Any, key: str) -> list[tuple[str, Any]]:
    if isinstance(state, dict) and (state or not key):
        children = state.items()
    elif isinstance(state, list) and any(isinstance(child, (torch.Tensor, dict)) for child in state):
        children = enumerate(state)
    else:
        return [(key, state)]
    return [leaf for name, child in children for leaf in _leaves(child, f"{key}.{name}" if key else str(name))]
