"""Objects that know how to give and take their state."""

from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["Stateful", "StatefulT"]


@runtime_checkable
class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``: models, optimizers, schedulers, data loaders."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as a nesting of dicts, lists, tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state back."""
        ...


StatefulT = TypeVar("StatefulT", bound=Stateful)
