"""What the parts of a state know of each other: an optimizer's parameters have names in a model beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.formats.native.values import Path
from holdfast.states.module_names import parameter_names
from holdfast.states.per_rank import PerRank
from holdfast.states.unwrapping import bare_module


@dataclass(frozen=True)
class Context:
    """The models of a state, in order, with their places.

    >>> model = torch.nn.Linear(2, 2)
    >>> context = Context.of({"model": model, "step": 3})
    >>> context.names_of([model.bias, model.weight])
    ['bias', 'weight']
    """

    modules: tuple[tuple[Path, torch.nn.Module], ...] = ()
    _names: dict[int, dict[int, str]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, state: Any) -> Context:
        """Look through the containers of a state for models."""
        found: list[tuple[Path, torch.nn.Module]] = []
        _find_modules(state, (), found, set())
        return cls(tuple(found))

    def names_of(self, parameters: list[torch.Tensor]) -> list[str | None]:
        """What the models of the state call these parameters; None for those that are in no model.

        If one model has all of them, the names are those that this model uses. Otherwise the place of the model in the
        state comes first.
        """
        for number in range(len(self.modules)):
            names = self._names_in(number)
            if all(id(parameter) in names for parameter in parameters):
                return [names[id(parameter)] for parameter in parameters]
        return [self._name_with_place(parameter) for parameter in parameters]

    def module_of(self, parameters: list[torch.Tensor]) -> torch.nn.Module | None:
        """The first model that has any of these parameters."""
        for number, (_, module) in enumerate(self.modules):
            if any(id(parameter) in self._names_in(number) for parameter in parameters):
                return module
        return None

    def _name_with_place(self, parameter: torch.Tensor) -> str | None:
        for number, (path, _) in enumerate(self.modules):
            name = self._names_in(number).get(id(parameter))
            if name is not None:
                return ".".join([*map(str, path), name])
        return None

    def _names_in(self, number: int) -> dict[int, str]:
        module = self.modules[number][1]
        if number not in self._names:
            self._names[number] = parameter_names(module)
        return self._names[number]


NEVER_LIVE = frozenset({torch.Tensor, torch.nn.Parameter, np.ndarray, bool, int, float, str, bytes, type(None)})
"""Most values are of these types, and need no closer look."""

DEEPEST = 200
"""How far a state is looked through. Nothing that is deeper can be stored."""


def _find_modules(value: Any, path: Path, found: list[tuple[Path, torch.nn.Module]], open_: set[int]) -> None:
    if isinstance(value, torch.nn.Module):
        found.append((path, bare_module(value)))
        return
    if isinstance(value, PerRank):
        _find_modules(value.value, path, found, open_)
        return
    items: Any
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return
    if id(value) in open_ or len(path) > DEEPEST:  # it contains itself, or lies too deep: whoever stores it will say so
        return
    open_.add(id(value))
    for key, element in items:
        if type(element) not in NEVER_LIVE:
            _find_modules(element, (*path, key), found, open_)
    open_.discard(id(value))
