"""A state that somebody changes while it is copied is never saved: the copy is torn, and the save says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import TornSnapshotError
from tests.rank_pool import RankPool
from tests.save.overlapping import held_back


def make() -> tuple[dict[str, Any], torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 3))
    return {"model": model}, torch.optim.SGD(model.parameters(), lr=0.1)


def change_in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight[2, 3] = 7


def change_by_another_optimizer(weight: torch.Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()


def change_data(weight: torch.Tensor) -> None:
    weight.data[2, 3] = 7


def change_by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[2, 3] = 7


def take_its_memory_away(weight: torch.Tensor) -> None:
    weight.untyped_storage().resize_(0)


@pytest.mark.parametrize("number", [0, 1])  # a large matrix and a small one, which are copied in different ways
@pytest.mark.parametrize(
    ("change", "check"),
    [
        (change_in_place, False),
        (change_by_another_optimizer, False),
        (take_its_memory_away, False),
        (change_data, True),
        (change_by_numpy, True),
    ],
)
def test_a_change_during_the_copy_ends_the_save(
    tmp_path, number: int, change: Callable[..., None], check: bool
) -> None:
    state, optimizer = make()
    holdfast.save({"earlier": 1}, tmp_path)
    files = sorted(tmp_path.iterdir())
    with held_back():
        pending = holdfast.async_save(state, tmp_path, optimizers=optimizer, check_tearing=check, overwrite=True)
        change(state["model"][number].weight)
    for ask in (pending.staged.result, pending.result):
        with pytest.raises(
            TornSnapshotError, match=rf"'model\.{number}\.weight' was changed.*staged\.result"
        ) as caught:
            ask(60)
        assert caught.value.key == f"model.{number}.weight"
    assert pending.progress().phase == "failed"
    assert sorted(tmp_path.iterdir()) == files
    assert holdfast.open(tmp_path).read() == {"earlier": 1}


def test_a_step_goes_on_after_a_torn_copy(tmp_path) -> None:
    state, optimizer = make()
    weight = state["model"][0].weight
    with held_back() as held:
        pending = holdfast.async_save(state, tmp_path / "x", optimizers=optimizer)
        change_in_place(weight)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert held.waits == 1
    with pytest.raises(TornSnapshotError):
        pending.result()
    assert holdfast.async_save(state, tmp_path / "x", optimizers=optimizer).result().tensor_count == 4


def test_new_memory_for_a_parameter_is_no_change_of_what_is_copied(tmp_path) -> None:
    state, optimizer = make()
    before = state["model"][0].weight.detach().clone()
    with held_back():
        pending = holdfast.async_save(state, tmp_path / "x", optimizers=optimizer)
        state["model"][0].weight.data = torch.zeros(100, 200)
    pending.result()
    assert torch.equal(holdfast.open(tmp_path / "x")["model.0.weight"][:], before)


def test_unchanged_states_of_all_kinds_pass_the_check(tmp_path) -> None:
    state, optimizer = make()
    model = state["model"]
    for step in range(3):
        pending = holdfast.async_save(state, tmp_path / str(step), optimizers=optimizer, check_tearing=True)
        model(torch.randn(4, 200)).sum().backward()
        optimizer.step()
        pending.result()


def tear_on_rank_1(path: str) -> tuple[str, str]:
    state, optimizer = make()
    holdfast.save({"earlier": 1}, path)
    with held_back():
        pending = holdfast.async_save(state, path, optimizers=optimizer, overwrite=True, replica_mismatch="ignore")
        if dist.get_rank() == 1:
            change_in_place(state["model"][0].weight)
    with pytest.raises(TornSnapshotError) as caught:
        pending.result()
    holdfast.save({"later": 1}, f"{path}-later")  # the ranks are in step again
    return caught.value.key, str(caught.value)


def test_a_torn_copy_on_one_rank_ends_the_save_on_all(ranks: RankPool, tmp_path) -> None:
    told = ranks(3).run(tear_on_rank_1, str(tmp_path / "x"))
    assert [key for key, _ in told] == ["model.0.weight"] * 3
    assert all("on rank 1" in message for _, message in (told[0], told[2]))
    assert holdfast.open(tmp_path / "x").read() == {"earlier": 1}
    assert not any("model" in name for name in map(str, holdfast.open(tmp_path / "x").keys()))
