"""Models come back whole, under names that do not depend on what they are wrapped in."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from holdfast._state.expanding import Context, adapter_for
from tests.state.memory_checkpoint import MemoryCheckpoint, difference, load, save


class Net(nn.Module):
    """Batch norm, tied weights, a buffer that is not saved, and a child with the name of a wrapper's."""

    def __init__(self, *, wrap: Any = lambda module: module) -> None:
        super().__init__()
        self.norm = wrap(nn.BatchNorm1d(3))
        self.module = wrap(nn.Linear(3, 3, bias=False))
        self.head = nn.Linear(3, 3)
        (self.head._modules.get("_checkpoint_wrapped_module") or self.head).weight = next(self.module.parameters())
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(self.norm(x)))


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        value.copy_(torch.randint(1, 100, value.shape, generator=generator))
    return model


def eager(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPPINGS = {
    "plain": lambda: Net(),
    "compiled": lambda: eager(Net()),
    "data parallel": lambda: nn.DataParallel(Net()),
    "checkpointed": lambda: checkpoint_wrapper(Net()),
    "checkpointed inside": lambda: Net(wrap=checkpoint_wrapper),
    "compiled inside": lambda: Net(wrap=eager),
    "all at once": lambda: nn.DataParallel(eager(Net(wrap=lambda m: checkpoint_wrapper(eager(m))))),
}


@pytest.mark.parametrize("loaded", WRAPPINGS)
@pytest.mark.parametrize("saved", WRAPPINGS)
def test_a_model_loads_into_any_wrapping(saved: str, loaded: str):
    model, other = randomized(WRAPPINGS[saved](), 1), randomized(WRAPPINGS[loaded](), 2)
    checkpoint = save({"model": model})
    assert list(checkpoint.tree["model"]) == list(Net().state_dict())
    load(checkpoint, {"model": other})
    assert difference(adapter_for(model).saved(), adapter_for(other).saved()) is None


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_optimizers_of_wrapped_models_know_the_plain_names(wrapping: str):
    model = WRAPPINGS[wrapping]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = adapter_for(optimizer, ("optimizer",), Context.of({"model": model, "optimizer": optimizer})).saved()
    assert saved["param_groups"][0]["params"] == [name for name, _ in Net().named_parameters()]


def test_a_load_reads_into_the_memory_of_the_model():
    model, other = randomized(Net(), 1), randomized(Net(), 2)
    places = {name: value.data_ptr() for name, value in other.state_dict().items()}
    adapter = adapter_for(other)
    template = adapter.template(save({"model": model}).tree["model"])
    assert {name: value.data_ptr() for name, value in template.items()} == places
    weight = other.head.weight
    load(save({"model": model}), {"model": other})
    assert other.head.weight is weight
    assert {name: value.data_ptr() for name, value in other.state_dict().items()} == places


def test_tied_weights_are_one_object():
    saved = adapter_for(Net()).saved()
    assert saved["module.weight"] is saved["head.weight"]
    assert saved["module.weight"].requires_grad is False


def test_parameters_that_the_checkpoint_lacks_and_has_too_many_of_are_found():
    checkpoint = save({"model": Net()})
    checkpoint.tree["model"]["other"] = checkpoint.tree["model"].pop("head.bias")
    load(checkpoint, {"model": Net()}, strict=False)
    assert checkpoint.missing == [".model.head.bias"]
    assert checkpoint.unexpected == [".model.other"]


def test_another_shape_is_found():
    checkpoint = save({"model": nn.Linear(2, 3)})
    checkpoint.fill({"model": adapter_for(nn.Linear(2, 4)).template(checkpoint.tree["model"])})
    assert checkpoint.misfits == [".model.weight", ".model.bias"]


# --- meta ----------------------------------------------------------------------------------------------------------


def test_a_model_on_the_meta_device_gets_memory_and_stays_the_same_objects():
    model = randomized(Net())
    with torch.device("meta"):
        other = Net()
    other.head.bias.requires_grad_(False)
    parameters = dict(other.named_parameters())
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    load(save({"model": model}), {"model": other})
    assert difference(dict(model.state_dict()), dict(other.state_dict())) is None
    assert other.head.weight is other.module.weight
    assert not other.head.bias.requires_grad
    for name, parameter in other.named_parameters():
        assert parameter is parameters[name]
        assert type(parameter) is nn.Parameter
    other.scratch = torch.zeros(2)
    other(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    assert not other.head.weight.equal(model.head.weight)


def test_tied_weights_on_the_meta_device_get_memory_once():
    with torch.device("meta"):
        other = Net()
    template = adapter_for(other).template(None)
    assert template["module.weight"] is template["head.weight"]
    assert not template["head.weight"].is_meta


def test_only_the_parameters_on_the_meta_device_are_replaced():
    model, other = randomized(Net(), 1), randomized(Net(), 2)
    other.norm.to("meta")
    weight, place = other.head.weight, other.head.weight.data_ptr()
    load(save({"model": model}), {"model": other})
    assert difference(dict(model.state_dict()), dict(other.state_dict())) is None
    assert other.head.weight is weight
    assert weight.data_ptr() == place


def test_meta_parameters_get_optimizer_state_with_memory():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    checkpoint = save({"model": model, "optimizer": optimizer})
    with torch.device("meta"):
        other = Net()
    again = torch.optim.Adam(other.parameters())
    load(checkpoint, {"model": other, "optimizer": again})
    assert difference(optimizer.state_dict(), again.state_dict()) is None


def test_a_meta_parameter_that_cannot_change_is_replaced_with_a_note():
    model = randomized(Net())
    with torch.device("meta"):
        other = Net()
    held = weakref.ref(other.head.bias)
    before = other.head.weight
    (note,) = load(save({"model": model}), {"model": other})
    assert difference(dict(model.state_dict()), dict(other.state_dict())) is None
    assert other.head.bias is not held()
    assert other.head.weight is before
    assert "1 parameters on the meta device, such as 'head.bias'" in note


def test_a_lazy_module_gets_its_shape_from_the_checkpoint():
    model, lazy = nn.Linear(5, 2), nn.LazyLinear(2)
    load(save({"model": model}), {"model": lazy})
    assert difference(dict(model.state_dict()), dict(lazy.state_dict())) is None


# --- modules with a will of their own ------------------------------------------------------------------------------


class Counting(nn.Module):
    """Keeps something beside its tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("kept", [{"calls": 3, "scales": [torch.ones(2)]}, torch.arange(4), "text", None, 5])
@pytest.mark.parametrize("before", [None, torch.zeros(4, dtype=torch.int64), torch.zeros(1)])
def test_extra_state_comes_back(kept: Any, before: Any):
    other = nn.Sequential(Counting(before))
    load(save({"model": nn.Sequential(Counting(kept))}), {"model": other})
    assert difference(other[0].extra, kept) is None


def test_extra_state_that_was_not_stored_is_reported_and_left_alone():
    checkpoint = save({"model": Counting("text")})
    del checkpoint.tree["model"]["_extra_state"]
    other = Counting("mine")
    load(checkpoint, {"model": other}, strict=False)
    assert checkpoint.missing == [".model._extra_state"]
    assert other.extra == "mine"


class Transposing(nn.Module):
    """Has another state dict than parameters, made by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.register_state_dict_post_hook(self._transpose)
        self.register_load_state_dict_pre_hook(self._transpose)

    @staticmethod
    def _transpose(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "turned"] = state.pop(prefix + "weight").t().contiguous() if prefix + "weight" in state else None
        if state[prefix + "turned"] is None:
            del state[prefix + "turned"]


class TurnedBack(Transposing):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.register_state_dict_post_hook(self._transpose)
        self.register_load_state_dict_pre_hook(self._turn_back)

    @staticmethod
    def _turn_back(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "turned").t()


def test_hooks_that_change_the_state_dict_are_heeded():
    checkpoint = save({"model": nn.Sequential(Transposing())})
    assert list(checkpoint.tree["model"]) == ["0.turned"]
    other = nn.Sequential(TurnedBack())
    load(checkpoint, {"model": other})
    assert other[0].weight.tolist() == [[0, 1, 2], [3, 4, 5]]


class OwnMethods(nn.Linear):
    """Overrides both methods, with fewer arguments."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"parts": {"w": self.weight.data}, "version": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        assert state["version"] == 2
        self.weight.data.copy_(state["parts"]["w"])


def test_overridden_methods_are_used():
    model, other = OwnMethods(2, 2), OwnMethods(2, 2)
    load(save({"model": model}), {"model": other})
    assert model.weight.equal(other.weight)


class LooksAtLoading(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        self.loaded = True
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize("how", ["method", "hook before", "hook after"])
def test_code_of_users_for_loading_runs_wherever_it_is(how: str):
    inner = LooksAtLoading(2, 2) if how == "method" else nn.Linear(2, 2)
    seen: list[Any] = []
    if how == "hook before":
        inner.register_load_state_dict_pre_hook(lambda *_: seen.append(1))
    if how == "hook after":
        inner.register_load_state_dict_post_hook(lambda *_: seen.append(1))
    load(save({"model": nn.Sequential(nn.Linear(2, 2))}), {"model": nn.Sequential(inner)})
    assert seen == [1] or inner.loaded


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_model_that_was_filled_in_place_is_not_loaded_again(wrapping: str, monkeypatch):
    """`load_state_dict` takes seconds with thousands of layers."""
    model, other = randomized(WRAPPINGS[wrapping](), 1), randomized(WRAPPINGS[wrapping](), 2)
    checkpoint = save({"model": model})
    monkeypatch.setattr(nn.Module, "_load_from_state_dict", lambda *_: pytest.fail("it was"))
    monkeypatch.setattr(nn.Module._load_from_state_dict, "__module__", "torch.nn")
    load(checkpoint, {"model": other})
    assert difference(dict(model.state_dict()), dict(other.state_dict())) is None


def test_modules_are_not_taken_for_something_to_convert():
    """A batch norm without a version would be taken for one from before it counted batches."""
    model, other = randomized(nn.BatchNorm1d(2), 1), nn.BatchNorm1d(2)
    seen: list[Any] = []
    other._register_load_state_dict_pre_hook(lambda state, prefix, metadata, *_: seen.append(metadata.get("version")))
    load(save({"model": model}), {"model": other})
    assert seen == [nn.BatchNorm1d._version]


class Wider(nn.DataParallel):
    """A wrapper with a parameter of its own, which has the name of one inside."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1))
        self.weight = nn.Parameter(torch.full((2,), 3.0))


def test_names_that_would_collide_stay_apart():
    model, other = randomized(Wider(), 1), randomized(Wider(), 2)
    checkpoint = save({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    assert sorted(checkpoint.tree["model"]) == ["bias", "module.weight", "weight"]
    assert sorted(checkpoint.tree["optimizer"]["param_groups"][0]["params"]) == ["bias", "module.weight", "weight"]
    load(checkpoint, {"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=0.1)})
    assert difference(dict(model.state_dict()), dict(other.state_dict())) is None


def test_nothing_stored_makes_everything_missing():
    checkpoint = MemoryCheckpoint.of({"model": {}})
    checkpoint.fill({"model": adapter_for(nn.Linear(1, 1)).template(None)})
    assert checkpoint.missing == [".model.weight", ".model.bias"]
