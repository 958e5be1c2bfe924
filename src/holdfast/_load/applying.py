"""What the places of a state become once all tensors were read. Making these changes nothing; finishing them does."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast._base.notices import add_note
from holdfast._formats.native.refs import ANYTHING
from holdfast._formats.native.trees import children_of, is_named, substituted
from holdfast._state.contract import Adapter
from holdfast._state.per_rank import PerRank
from holdfast._state.unwrapping import refresh


class Outcome(ABC):
    """A place of the state, as it will be."""

    @property
    def replaces(self) -> bool:
        """Whether there will be another object at this place, rather than the same one with other content."""
        return False

    @abstractmethod
    def finish(self) -> Any:
        """Bring the place up to date, and return what belongs there."""


@dataclass
class Kept(Outcome):
    """Stays as it is: a tensor that is filled in place, or something that is not touched."""

    target: Any

    def finish(self) -> Any:
        return self.target


@dataclass
class Put(Outcome):
    """Something that comes here instead: a tensor with memory, a value that a function makes, or nothing at all."""

    value: Any = ANYTHING

    @property
    def replaces(self) -> bool:
        return True

    def put(self, value: Any) -> None:
        """Say what it is."""
        self.value = value

    def finish(self) -> Any:
        return self.value


@dataclass
class Taken(Outcome):
    """A stored value, with the fresh memory of its tensors put in."""

    value: Any
    fresh: Mapping[str, Any]

    @property
    def replaces(self) -> bool:
        return True

    def finish(self) -> Any:
        return substituted(self.value, lambda ref: self.fresh[ref.key])


@dataclass
class FilledUp(Outcome):
    """An empty dict or list of the state, which gets all that is stored in such a one."""

    target: Any
    taken: Taken

    def finish(self) -> Any:
        content = self.taken.finish()
        if isinstance(self.target, list):
            self.target.extend(content)
        else:
            self.target.update(content)
        return self.target


@dataclass
class Container(Outcome):
    """A container of the state. Those that can be changed are changed in place; others are made anew if they must."""

    target: Any
    children: Mapping[Any, Outcome]
    """Those that may change; of a container that cannot be changed, all."""

    @property
    def replaces(self) -> bool:
        return not is_changeable(self.target) and any(child.replaces for child in self.children.values())

    def finish(self) -> Any:
        if not self.children:
            return self.target
        before = dict(children_of(self.target) or [])
        finished = {name: child.finish() for name, child in self.children.items()}
        changed = {name: value for name, value in finished.items() if value is not before[name]}
        if not changed:
            return self.target
        if is_changeable(self.target):
            _set_children(self.target, changed)
            return self.target
        return _made_anew(self.target, finished)


@dataclass
class Template(Outcome):
    """A container that belongs to a live object. It may be the object's own, so it is copied rather than changed."""

    target: Any
    children: Mapping[Any, Outcome]
    """Those that may change; of a container that cannot be changed, all."""

    def finish(self) -> Any:
        finished = {name: child.finish() for name, child in self.children.items()}
        return _made_anew(self.target, finished)


@dataclass
class LiveObject(Outcome):
    """A live object, which takes over its filled template."""

    target: Any
    adapter: Adapter
    content: Outcome
    key: str

    def finish(self) -> Any:
        loaded = self.content.finish()
        try:
            self.adapter.apply(self.adapter.completed(loaded))
            refresh(self.target)
        except Exception as error:
            add_note(error, f"This is from the {type(self.target).__name__} at '{self.key}', which was to be loaded.")
            raise
        return self.target


@dataclass
class Own(Outcome):
    """The per-rank value of this rank."""

    target: Any
    rule: PerRank
    outcome: Outcome

    def finish(self) -> Any:
        value = self.outcome.finish()
        if self.target is self.rule:
            self.rule.value = value
        return self.target


@dataclass
class Chosen(Outcome):
    """What this rank gets from the values of all ranks that saved."""

    target: Any
    rule: PerRank
    values: Sequence[Outcome]
    saved: int
    rank: int
    world_size: int
    adapter: Adapter | None

    def finish(self) -> Any:
        chosen = self.rule.chosen([value.finish() for value in self.values], self.saved, self.rank, self.world_size)
        if self.adapter is not None:
            self.adapter.apply(chosen)
        else:
            self.rule.value = chosen
        return self.target


def is_changeable(container: Any) -> bool:
    """Whether the elements of a container can be replaced."""
    if isinstance(container, (MutableMapping, list)):
        return True
    settings = getattr(container, "__dataclass_params__", None)
    return settings is not None and not settings.frozen


def can_be_made_anew(container: Any) -> bool:
    """Whether another one with other elements can be made, if it cannot be changed."""
    return isinstance(container, tuple) or dataclasses.is_dataclass(container)


def _made_anew(container: Any, elements: Mapping[Any, Any]) -> Any:
    if isinstance(container, tuple):
        kind: Any = type(container)
        return kind(*elements.values()) if is_named(container) else kind(elements.values())
    made = copy.copy(container)
    _set_children(made, elements)
    return made


def _set_children(container: Any, elements: Mapping[Any, Any]) -> None:
    for name, value in elements.items():
        if isinstance(container, (MutableMapping, list)):
            container[name] = value
        else:
            object.__setattr__(container, name, value)
