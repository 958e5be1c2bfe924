"""What a background save stores is the state of the moment of the call, however the program changes it later."""

from __future__ import annotations

import collections
import gc
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import holdfast
import holdfast.dcp as dcp
from holdfast._background import step_hooks
from holdfast._background.copy_jobs import finish_copies
from tests.exact import assert_same
from tests.save.overlapping import assert_same_content, held_back, scribble

LARGE = 100
"""A matrix of that many rows and of 200 columns is not a small tensor: it has a path of its own."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(200, LARGE)
        self.norm = nn.BatchNorm1d(LARGE)
        self.outer = nn.Linear(LARGE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.norm(self.inner(x))))


def backward(model: nn.Module, times: int = 1) -> None:
    """Forward and backward, with other gradients each time; buffers change."""
    for _ in range(times):
        model(torch.randn(8, 200)).square().sum().backward()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def one_by_one(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def with_tensor_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))


# --- with optimizers that wait ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adam, fused, one_by_one, with_tensor_rate])
def test_a_step_waits_for_the_copy(tmp_path, make: Callable[..., Any]) -> None:
    model = Net()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = {"model": model, "optim": optimizer, "schedule": schedule, "rng": holdfast.RngState(), "step": [1]}
    backward(model)
    optimizer.step()
    holdfast.save(state, tmp_path / "now")
    with held_back() as held:
        pending = holdfast.async_save(state, tmp_path / "later", optimizers=optimizer)
        optimizer.zero_grad()
        backward(model, times=2)  # gradients are accumulated
        state["step"].append(2)
        schedule.step()
        assert not pending.staged.done()
        assert held.waits == 0
        optimizer.step()
        assert held.waits == 1
        assert pending.staged.done()
    pending.result()
    assert_same_content(tmp_path / "later", tmp_path / "now")


def test_steps_after_the_first_do_not_wait(tmp_path) -> None:
    model = Net()
    optimizer = adam(model)
    with held_back() as held:
        pending = holdfast.async_save({"model": model}, tmp_path / "x", optimizers=optimizer)
        backward(model)
        for _ in range(3):
            optimizer.step()
        assert held.waits == 1
    assert pending.stalled > 0
    pending.result()


def test_the_first_step_of_several_optimizers_waits_for_all_parameters(tmp_path) -> None:
    model = Net()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model.inner, model.outer)]
    state = {"model": model, "optim": optimizers}
    holdfast.save(state, tmp_path / "now")
    for first in (0, 1):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with held_back() as held:
            pending = holdfast.async_save(state, tmp_path / str(first), optimizers=iter(optimizers))
            backward(model)
            optimizers[first].step()
            assert held.waits == 1
            optimizers[1 - first].step()
        pending.result()
        assert_same(holdfast.open(tmp_path / str(first)).read()["model"], before)


def test_a_step_waits_for_all_saves_that_copy(tmp_path) -> None:
    model = Net()
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer}
    holdfast.save(state, tmp_path / "now")
    with held_back() as held:
        options = {"optimizers": optimizer, "when_busy": "copy"}
        pending = [holdfast.async_save(state, tmp_path / name, **options) for name in ("first", "second")]
        backward(model)
        optimizer.step()
        assert held.waits == 2
    for name, each in zip(("first", "second"), pending, strict=True):
        each.result()
        found, expected = (holdfast.open(tmp_path / one).read()["model"] for one in (name, "now"))
        weights = {key: value for key, value in expected.items() if "running" not in key and "num_" not in key}
        assert_same({key: found[key] for key in weights}, weights)


def test_closures_and_histories_of_an_optimizer(tmp_path) -> None:
    model = nn.Linear(200, LARGE)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    state = {"model": model, "optim": optimizer}

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 200)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    holdfast.save(state, tmp_path / "now")
    with held_back() as held:
        pending = holdfast.async_save(state, tmp_path / "later", optimizers=optimizer)
        optimizer.step(closure)
        assert held.waits == 1
    pending.result()
    assert_same_content(tmp_path / "later", tmp_path / "now")


def test_what_no_optimizer_owns_is_copied_in_the_call(tmp_path) -> None:
    model = Net()
    optimizer = adam(model)
    average = AveragedModel(model)
    state = {
        "model": model,
        "average": average,
        "frozen": torch.ones(LARGE, 200),
        "array": np.ones((LARGE, 200)),
        "optim": optimizer,
    }
    backward(model)
    optimizer.step()
    holdfast.save(state, tmp_path / "now")
    with held_back():
        pending = holdfast.async_save(state, tmp_path / "later", optimizers=[optimizer])
        average.update_parameters(model)
        model(torch.randn(8, 200))  # changes the buffers of the norm
        scribble([state["frozen"], state["array"]])
        assert not pending.staged.done()
    pending.result()
    assert_same_content(tmp_path / "later", tmp_path / "now")


def test_parts_of_a_parameters_memory_that_are_something_else_are_copied_in_the_call(tmp_path) -> None:
    memory = torch.ones(2 * LARGE, 200)
    weight = nn.Parameter(memory[:LARGE])
    beside = memory[LARGE:]
    around = memory[::2]  # begins where the parameter does, and ends elsewhere
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with held_back():
        state = {"weight": weight, "beside": beside, "around": around}
        pending = holdfast.async_save(state, tmp_path / "x", optimizers=optimizer)
        memory[LARGE:] = 2  # what torch counts as a change of all of them would be called a torn copy
    with pytest.raises(holdfast.errors.TornSnapshotError, match="'weight' was changed"):
        pending.result()
    beside, around = beside.data, around.data
    memory.fill_(1)
    weight = nn.Parameter(memory[:LARGE].data)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with held_back():
        state = {"weight": weight, "beside": beside, "around": around}
        pending = holdfast.async_save(state, tmp_path / "x", optimizers=optimizer)
        beside.fill_(2)
        weight.grad = torch.ones(LARGE, 200)
        optimizer.step()
    pending.result()
    assert {float(value.sum()) for value in holdfast.open(tmp_path / "x").read().values()} == {LARGE * 200.0}


def test_code_that_changes_parameters_can_wait_for_the_copy(tmp_path) -> None:
    model = Net().eval()
    optimizer = adam(model)
    holdfast.save({"model": model}, tmp_path / "now")
    pending = holdfast.async_save({"model": model}, tmp_path / "later", optimizers=optimizer)
    pending.staged.result(60)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.lerp_(torch.ones(()), 0.5)  # torch does not notice this
    pending.result()
    assert_same_content(tmp_path / "later", tmp_path / "now")


def test_an_optimizer_with_odd_entries_in_its_state_is_taken(tmp_path) -> None:
    weight = nn.Parameter(torch.ones(LARGE, 200))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state["steps"] = 3  # some optimizers note such things beside the states of parameters
    optimizer.state[weight]["nested"] = {"average": torch.ones(LARGE, 200)}
    with held_back() as held:
        pending = holdfast.async_save({"weight": weight}, tmp_path / "x", optimizers=optimizer)
        weight.grad = torch.ones(LARGE, 200)
        optimizer.step()
        assert held.waits == 1
    pending.result()
    assert holdfast.open(tmp_path / "x")["weight"][:].eq(1).all()


# --- without ---------------------------------------------------------------------------------------------------------


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(2.0 * 3 * 40 * 50).reshape(2, 3, 40, 50)
    found = {
        "channels last": base.to(memory_format=torch.channels_last),
        "transposed": base.transpose(0, 3),
        "every second": base[..., ::2],
        "expanded": torch.arange(20_000.0).expand(3, 20_000),
        "conjugate": torch.randn(100, 200, dtype=torch.complex64).conj(),
        "negative": torch.randn(100, 200, dtype=torch.complex64).conj().imag,
        "half complex": torch.randn(50, 3, dtype=torch.complex32),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "float8": torch.randn(300, 300).to(torch.float8_e4m3fn),
        "bool": torch.rand(300, 300) > 0.5,
        "wanting a gradient": (torch.randn(300, 300, requires_grad=True) * 2),
    }
    for dtype in ("uint4", "int3", "float4_e2m1fn_x2"):
        if hasattr(torch, dtype):
            found[dtype] = torch.randint(0, 255, (70_000,), dtype=torch.uint8).view(getattr(torch, dtype))
    with torch.inference_mode():
        found["inference"] = torch.randn(300, 300)
    return found


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("check_tearing", [False, True])
def test_every_kind_of_tensor_is_copied_in_the_call(tmp_path, writer: Any, check_tearing: bool) -> None:
    state = odd_tensors()
    holdfast.save(state, tmp_path / "now")
    pending = holdfast.async_save(state, tmp_path / "later", writer=writer, check_tearing=check_tearing)
    assert pending.staged.done()
    scribble({name: tensor for name, tensor in state.items() if name != "expanded"})
    state["expanded"][0].zero_()
    pending.result()
    assert_same_content(tmp_path / "later", tmp_path / "now")


def test_quantized_tensors_are_refused_in_the_call(tmp_path) -> None:
    state = {"q": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}
    with pytest.raises(holdfast.errors.UnsupportedTensorError, match=r"'q' .*int_repr"):
        holdfast.async_save(state, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_values_are_those_of_the_call(tmp_path, writer: Any) -> None:
    arrays = {"plain": np.arange(9.0), "fields": np.ones(3, "<f2,>i8"), "turned": np.asfortranarray(np.eye(3))}
    state: dict[str, Any] = {
        "list": [1, [2]],
        "bytes": bytearray(b"abc"),
        "deque": collections.deque([1, 2], maxlen=3),
        "counter": collections.Counter("aab"),
        "set": {1, 2},
        "arrays": arrays,
        "own": holdfast.PerRank({"position": [1], "buffer": torch.ones(3)}),
        "rng": holdfast.RngState(),
    }
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    holdfast.save(state, tmp_path / "now")
    pending = holdfast.async_save(state, tmp_path / "later", writer=writer)
    state["list"][1].append(3)
    state["bytes"][0] = 0
    state["deque"].append(3)
    state["counter"]["b"] = 7
    state["set"].clear()
    scribble(arrays)
    state["own"].value["position"][0] = 2
    state["own"].value["buffer"].zero_()
    random.random(), np.random.rand(), torch.rand(1)
    pending.result()
    assert_same_content(tmp_path / "later", tmp_path / "now")


@pytest.mark.parametrize("optimizers", [True, False])
def test_tied_weights_are_copied_once_and_stay_tied(tmp_path, optimizers: bool) -> None:
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    holdfast.save({"model": model}, tmp_path / "now")
    with held_back() as held:
        pending = holdfast.async_save({"model": model}, tmp_path / "later", optimizers=optimizer if optimizers else ())
        assert pending.progress().total_bytes < 1.1 * 200 * 200 * 4
        model(torch.randn(8, 200)).sum().backward()
        optimizer.step()
        assert held.waits == optimizers
    pending.result()
    assert_same_content(tmp_path / "later", tmp_path / "now")
    loaded = holdfast.open(tmp_path / "later").read()["model"]
    assert loaded["0.weight"] is loaded["1.weight"]


def test_options_of_save_are_those_of_async_save(tmp_path) -> None:
    model = Net()
    options: dict[str, Any] = {
        "include": ["model.*"],
        "exclude": lambda key: "running" in key,
        "cast": {"*": torch.bfloat16},
        "metadata": {"note": 1},
        "max_file_size": 100_000,
    }
    holdfast.save({"model": model, "other": 1}, tmp_path / "now", **options)
    for writer in ("thread", "process"):
        holdfast.async_save({"model": model, "other": 1}, tmp_path / writer, writer=writer, **options).result()
        assert_same_content(tmp_path / writer, tmp_path / "now")
        assert holdfast.open(tmp_path / writer).metadata["note"] == 1
        assert len(list((tmp_path / writer).iterdir())) == len(list((tmp_path / "now").iterdir()))


# --- loads ------------------------------------------------------------------------------------------------------------


def load_natively(state: Any, path: Any) -> None:
    holdfast.load(state, path)


def load_like_dcp(state: Any, path: Any) -> None:
    dcp.load({"m": dict(state["m"].state_dict())}, checkpoint_id=path)


@pytest.mark.parametrize("load", [load_natively, load_like_dcp])
def test_a_load_waits_for_the_copy_of_what_it_overwrites(tmp_path, load: Callable[..., None]) -> None:
    model = nn.Linear(200, LARGE)
    optimizer = adam(model)
    before = {"m": model}
    if load is load_natively:
        holdfast.save(before, tmp_path / "before")
    else:
        dcp.save({"m": model.state_dict()}, checkpoint_id=tmp_path / "before")
    backward(model)
    optimizer.step()
    holdfast.save(before, tmp_path / "now")
    with held_back() as held:
        pending = holdfast.async_save(before, tmp_path / "later", optimizers=optimizer)
        load(before, tmp_path / "before")
        assert held.waits == 1
    pending.result()
    assert_same_content(tmp_path / "later", tmp_path / "now")


def test_a_forked_child_does_not_wait_for_the_copies_of_its_parent(tmp_path) -> None:
    model = nn.Linear(200, LARGE)
    optimizer = adam(model)
    backward(model)
    with held_back():
        pending = holdfast.async_save({"m": model}, tmp_path / "x", optimizers=optimizer)
        child = os.fork()
        if child == 0:
            gc.freeze()
            step_hooks._wait_for_copies(optimizer)  # not a step, since torch's threads are the parent's, too
            finish_copies()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    pending.result()
