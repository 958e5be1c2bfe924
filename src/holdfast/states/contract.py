"""What it takes to save and load one live object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal


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

        Leaves are still ``ANYTHING`` if they were not stored, or not to be loaded. Most objects can tell by that what
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
