"""What it takes to save and load one live object, and what the parts of a state know of each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from holdfast._formats.native.values import Path
from holdfast._state.parameter_names import parameter_names
from holdfast._state.per_rank import PerRank
from holdfast._state.unwrapping import bare_module

# What it takes to save and load one live object.


class Adapter(ABC):
    """How one live object is saved and loaded. Adapters only look at the object until ``apply`` is called."""

    @property
    def from_first_rank(self) -> frozenset[str]:
        """Keys of ``saved()`` which belong to the first rank by contract: the copies of other ranks may differ."""
        return frozenset()

    @abstractmethod
    def saved(self) -> Any:
        """The object as plain nested state. It may contain further live objects."""

    @abstractmethod
    def template(self, stored: Any) -> Any:
        """What to load into.

        ``stored`` is what the checkpoint has at this place, with a ``TensorRef`` for every tensor; None if there is
        nothing. The result holds tensors to be filled in place, ``ANYTHING`` where whatever is stored shall be taken,
        further live objects, and plain values, which stored ones will replace. What it has and the checkpoint lacks is
        missing there; what the checkpoint has and it lacks is unexpected.
        """

    @abstractmethod
    def apply(self, loaded: Any) -> None:
        """Take over what was read: the template, filled. A leaf that is still ``ANYTHING`` was not stored."""

    def completed(self, loaded: Any) -> Any:
        """What ``apply`` is to get: the filled template, with what the object has at present where it needs that.

        Leaves are still ``ANYTHING`` if they were not stored, or not to be loaded. Most objects can see from that what
        to keep.
        """
        return loaded

    @property
    def kind(self) -> str | None:
        """What a checkpoint notes about the object beside its state; None if there is nothing to note."""
        return None

    def expect(  # noqa: B027 - most objects have nothing to compare
        self, stored_kind: str | None, on_mismatch: Literal["error", "warn", "ignore"]
    ) -> None:
        """Called before ``template``: what was noted about the object, and what to do if that is another one now."""

    def warnings(self) -> list[str]:
        """What the caller is to be warned of, once the template was made."""
        return []

    def changes(self) -> Mapping[str, tuple[Any, Any]]:
        """Settings that the load has changed, by their keys in the object: what they were, and what they are."""
        return {}

    def notes(self) -> list[str]:
        """Remarks for the report of the load, once the template was made or applied."""
        return []


# What the parts of a state know of each other: an optimizer's parameters have names in a model beside it.


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
    if id(value) in open_ or len(path) > DEEPEST:  # it contains itself, or is too deep: whoever stores it will say so
        return
    open_.add(id(value))
    for key, element in items:
        if type(element) not in NEVER_LIVE:
            _find_modules(element, (*path, key), found, open_)
    open_.discard(id(value))
