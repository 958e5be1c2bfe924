"""Classes that behave like the wrappers of other libraries, with the names of their modules and classes.

The libraries are not installed for the tests. What is here was compared with accelerate 1.15.0 and lightning 2.6.6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class UnheardOfOptimizer(torch.optim.Optimizer):
    """Shows what is in the optimizer that it wraps, and never calls the constructor of the base class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class AcceleratedOptimizer(UnheardOfOptimizer):
    """Made in the same way."""

    __module__ = "accelerate.optimizer"


class _FabricOptimizer:
    """Becomes an instance of the class that it wraps, and asks it for all that it lacks."""

    __module__ = "lightning.fabric.wrappers"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def __getattr__(self, item: str) -> Any:
        return getattr(self._optimizer, item)


class LightningOptimizer(_FabricOptimizer):
    """The trainer's, which is made in the same way."""

    __module__ = "lightning.pytorch.core.optimizer"


class OlderFabricOptimizer(_FabricOptimizer):
    """As it was once: it has a copy of the attributes of what it wraps."""

    __module__ = "lightning_fabric.wrappers"
    __qualname__ = "_FabricOptimizer"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._refresh()

    def _refresh(self) -> None:
        self.__dict__.update({key: value for key, value in vars(self._optimizer).items() if key != "step"})


class _FabricModule(nn.Module):
    """Has the model twice: with the wrappers that the forward pass needs, and as it was."""

    __module__ = "lightning.fabric.wrappers"

    def __init__(self, forward_module: nn.Module, original_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original_module

    def forward(self, *args: Any) -> Any:
        return self._forward_module(*args)

    def state_dict(self, **options: Any) -> Any:  # type: ignore[override]
        return self._original_module.state_dict(**options)

    def load_state_dict(self, state_dict: Any, strict: bool = True, **options: Any) -> Any:  # type: ignore[override]
        return self._original_module.load_state_dict(state_dict, strict, **options)


class DeepSpeedEngine(nn.Module):
    """Has the model in ``module``."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class Lookahead(torch.optim.Optimizer):
    """A wrapper that has a state of its own, and calls no constructor either."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.slow = [value.detach().clone() for group in optimizer.param_groups for value in group["params"]]

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def state_dict(self) -> Any:
        return {**self.optimizer.state_dict(), "slow": list(self.slow)}

    def load_state_dict(self, state_dict: Any) -> None:
        self.slow = list(state_dict["slow"])
        self.optimizer.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Unfinished(torch.optim.Optimizer):
    """Calls no constructor, and leaves loading to the base class, where it fails."""

    def __init__(self, parameters: Any) -> None:
        self.defaults = {}
        self.state = {}
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]

    def state_dict(self) -> Any:
        return {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
