"""Whether an object does what one of our classes does, so that a shorter way to the same result can be taken."""

from __future__ import annotations

from typing import Any


def methods_of(cls: type, *names: str) -> dict[str, Any]:
    """The methods of a class as they are now."""
    return {name: vars(cls)[name] for name in names}


def is_unchanged(target: object, cls: type, methods: dict[str, Any]) -> bool:
    """Whether ``target`` has these methods of ``cls``: neither a subclass nor anybody else has replaced one.

    >>> class Plain:
    ...     def go(self): ...
    >>> class Other(Plain):
    ...     def go(self): ...
    >>> methods = methods_of(Plain, "go")
    >>> is_unchanged(Plain(), Plain, methods), is_unchanged(Other(), Plain, methods)
    (True, False)
    """
    return isinstance(target, cls) and all(
        getattr(type(target), name, None) is method and name not in vars(target) for name, method in methods.items()
    )
