"""Which tensors need no further questions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import holdfast.dcp as dcp
from holdfast._dcp.state_objects import is_ordinary
from holdfast._formats.dcp.columns import PlaceColumns
from holdfast._formats.dcp.metadata import still_to_be_made

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:Sparse", "ignore:torch.quantize")


class Wrapped(torch.Tensor):
    pass


def with_attribute(name: str) -> torch.Tensor:
    tensor = torch.ones(2)
    setattr(tensor, name, (4,))
    return tensor


def without_memory() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


def partitioned() -> torch.Tensor:
    tensor: Any = torch.empty(0)
    tensor.ds_id, tensor.ds_shape = 1, (4,)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 3), torch.ones(()), torch.empty(0, 3), torch.nn.Parameter(torch.ones(2)), torch.ones(4)[2:]],
)
def test_dense_tensors_in_memory_are_ordinary(tensor: torch.Tensor) -> None:
    assert is_ordinary(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3).T,
        torch.ones(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nn.UninitializedParameter(),
        torch.ones(2).as_subclass(Wrapped),
        with_attribute("global_shape"),
        without_memory(),
        partitioned(),
    ],
    ids=lambda tensor: f"{type(tensor).__name__} {tensor.layout}",
)
def test_tensors_of_which_there_is_more_to_say_are_not(tensor: torch.Tensor) -> None:
    assert not is_ordinary(tensor)


def test_a_process_on_its_own_has_the_places_of_a_save_in_columns(tmp_path) -> None:
    planner = dcp.DefaultSavePlanner()
    saved = dcp.save({"a": torch.ones(2), "b": 1}, checkpoint_id=tmp_path, planner=planner, no_dist=True)

    assert isinstance(still_to_be_made(saved), PlaceColumns)
    assert planner.metadata is saved
    assert {item.index.fqn for item in planner.global_plan[0].items} == {"a", "b"}
