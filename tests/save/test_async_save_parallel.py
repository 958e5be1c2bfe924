"""The moment of the call is what is saved, also of models that are spread over ranks in any way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

import holdfast
from tests.models import Net, ddp, fsdp1, fsdp2, fsdp2_over_tensor_parallel, hsdp
from tests.rank_pool import RankPool
from tests.save.overlapping import assert_same_content, held_back


def large_net() -> Net:
    """Of its sizes few divide evenly by ranks. Its large matrix is copied in another way than what is small."""
    return Net(200, 334, 7)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def train_on(path: str, wrap: Any, make: Any, writer: Any, overlap: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = wrap(large_net())
    optimizer = make(model.parameters())

    def backward() -> None:
        torch.manual_seed(dist.get_rank())
        model(torch.randn(4, 200)).square().sum().backward()

    backward()
    optimizer.step()
    own = holdfast.PerRank({"position": torch.full((3,), dist.get_rank())})
    state = {"model": model, "optim": optimizer, "own": own, "rng": holdfast.RngState()}
    torch.manual_seed(dist.get_rank())
    holdfast.save(state, f"{path}/now")
    with held_back() as held:
        pending = holdfast.async_save(state, f"{path}/later", optimizers=optimizer if overlap else (), writer=writer)
        early = pending.staged.done()
        own.value["position"].zero_()
        backward()
        backward()
        waits_before = held.waits
        optimizer.step()
        waits = held.waits
        backward()
        optimizer.step()
    report = pending.result()
    return {
        "early": early,
        "waits": [waits_before, waits],
        "world": report.world_size,
        "phases": {name: len(seconds) for name, seconds in report.phases.items()},
    }


@pytest.mark.parametrize(
    ("wrap", "make", "size", "writer"),
    [
        (ddp, adam, 2, "thread"),
        (fsdp2, adam, 3, "thread"),
        (fsdp2, sgd, 2, "process"),
        (fsdp2_over_tensor_parallel, adam, 4, "thread"),
        (hsdp, sgd, 4, "thread"),
    ],
)
def test_a_step_waits_for_the_copy_on_every_rank(ranks: RankPool, tmp_path, wrap, make, size, writer) -> None:
    for told in ranks(size).run(train_on, str(tmp_path), wrap, make, writer, True):
        assert told == {
            "early": False,
            "waits": [0, 1],
            "world": size,
            "phases": {"capture": size, "stage": size, "compare": size, "plan": size, "write": size, "commit": 1},
        }
    assert_same_content(tmp_path / "later", tmp_path / "now")


def test_what_fsdp1_says_of_its_state_is_copied_in_the_call(ranks: RankPool, tmp_path) -> None:
    for told in ranks(2).run(train_on, str(tmp_path), fsdp1, adam, "thread", True):
        assert told["early"]  # it is a copy that it makes for us, so no step has to wait
    assert_same_content(tmp_path / "later", tmp_path / "now")


@pytest.mark.parametrize(("wrap", "size"), [(ddp, 2), (fsdp2_over_tensor_parallel, 4)])
def test_without_optimizers_all_is_copied_in_the_call(ranks: RankPool, tmp_path, wrap, size) -> None:
    for told in ranks(size).run(train_on, str(tmp_path), wrap, adam, "thread", False):
        assert told["early"]
        assert told["waits"] == [0, 0]
    assert_same_content(tmp_path / "later", tmp_path / "now")


def train_with_zero(path: str) -> list[int]:
    model = ddp(large_net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9)
    state = {"model": model}
    holdfast.save(state, f"{path}/now")
    with held_back() as held:
        pending = holdfast.async_save(state, f"{path}/later", optimizers=optimizer, exclude="*.seen")
        model(torch.randn(4, 200)).square().sum().backward()
        before = held.waits
        optimizer.step()
        after = held.waits
    pending.result()
    return [before, after]


def test_an_optimizer_whose_ranks_send_parameters_to_each_other_waits(ranks: RankPool, tmp_path) -> None:
    assert ranks(2).run(train_with_zero, str(tmp_path)) == [[0, 1]] * 2
    found, expected = (holdfast.open(tmp_path / name).read()["model"] for name in ("later", "now"))
    assert all(torch.equal(found[key], expected[key]) for key in expected if "seen" not in key)


def save_in_parts(path: str) -> list[Any]:
    """Half of the ranks each, in a group of their own, at the same time, and all ranks alone in between."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = {"rank": holdfast.PerRank(rank), "w": torch.full((1000,), float(rank // 2))}
    pending = [holdfast.async_save(state, f"{path}/{rank // 2}", process_group=groups[rank // 2])]
    pending.append(holdfast.async_save({"all": torch.ones(3)}, f"{path}/all"))
    state["w"].fill_(-1)
    with pytest.raises(ValueError, match=f"rank {rank} is not in the process group"):
        holdfast.async_save(state, f"{path}/no", process_group=groups[1 - rank // 2])
    return [each.result().world_size for each in pending]


def test_groups_save_for_themselves(ranks: RankPool, tmp_path) -> None:
    assert ranks(4).run(save_in_parts, str(tmp_path)) == [[2, 4]] * 4
    for half in (0, 1):
        found = holdfast.open(tmp_path / str(half)).read()
        assert found["w"].eq(half).all()
        assert found["rank"] == [2 * half, 2 * half + 1]
    assert not (tmp_path / "no").exists()
