"""Classes that a program registers, so that their values are stored by their fields and come back as what they were.

A checkpoint names classes, but nothing that it names is ever imported: a name means something only if the program that
reads it registered a class under that name.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from holdfast._formats.native.members import CannotStore

T = TypeVar("T", bound=type)

_CONTENT_BESIDE_FIELDS = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex, BaseException)


class DoesNotFit(Exception):
    """Stored fields are not those of the registered class. The text says why."""


@dataclasses.dataclass(frozen=True)
class RegisteredType:
    """A registered class: what kind it is, and the name by which values of it are stored."""

    kind: str
    """``enum``, ``dataclass`` or ``namedtuple``."""
    name: str
    cls: type


@overload
def register_type(cls: T, *, name: str | None = None) -> T: ...
@overload
def register_type(cls: None = None, *, name: str | None = None) -> Callable[[T], T]: ...
def register_type(cls: T | None = None, *, name: str | None = None) -> T | Callable[[T], T]:
    """Let values of this enum, dataclass or named tuple be saved, and be loaded as what they were.

    Values are stored by their fields, or by the name of the enum member, under ``module:qualified name`` of the class.
    Give ``name`` to a class that was moved or renamed: the name under which it was stored. Loading sets the
    fields and calls neither ``__init__`` nor ``__post_init__``. Fields that were added since get their defaults. A
    dataclass with attributes that are not fields is refused, since they would be lost; what a ``cached_property`` keeps
    is made again.

    >>> from holdfast._formats.native.values import Encoder, decode
    >>> @register_type
    ... @dataclasses.dataclass
    ... class Progress:
    ...     epoch: int
    ...     best: float = 0.0
    >>> decode(Encoder(take=lambda path, tensor: None).encode(Progress(3)), tensor=None)
    Progress(epoch=3, best=0.0)
    """
    if cls is None:
        return lambda decorated: register_type(decorated, name=name)
    registered = RegisteredType(_kind_of(cls), name or f"{cls.__module__}:{cls.__qualname__}", cls)
    with _lock:
        other = _by_name.get(registered.name)
        if other is not None and other.cls is not cls and not _is_redefinition(other.cls, cls):
            raise ValueError(
                f"{cls.__module__}.{cls.__qualname__} cannot be registered as {registered.name!r}: "
                f"{other.cls.__module__}.{other.cls.__qualname__} already is. Give it another `name`."
            )
        _by_name[registered.name] = registered
        _by_class[cls] = registered
    return cls


_lock = threading.Lock()
_by_name: dict[str, RegisteredType] = {}
_by_class: dict[type, RegisteredType] = {}


def registered_type(cls: type) -> RegisteredType | None:
    """What was registered of a class; nothing is inherited."""
    return _by_class.get(cls)


def registered_as(kind: str, name: str) -> RegisteredType | None:
    """The class that was registered under a stored name, if it is of the stored kind."""
    found = _by_name.get(name)
    return found if found is not None and found.kind == kind else None


def registrable_kind(cls: type) -> str | None:
    """``enum``, ``dataclass`` or ``namedtuple`` if a class of that kind could be registered."""
    try:
        return _kind_of(cls)
    except TypeError:
        return None


def _kind_of(cls: type) -> str:
    bases: tuple[type, ...] = getattr(cls, "__mro__", ())  # empty if it is not even a class
    if enum.Enum in bases:
        return "enum"
    if tuple in bases and isinstance(getattr(cls, "_fields", None), tuple):
        return "namedtuple"
    if bases and dataclasses.is_dataclass(cls):
        if any(base in _CONTENT_BESIDE_FIELDS for base in bases):
            raise TypeError(f"{cls.__qualname__} holds more than its fields: it is also a container or a number")
        return "dataclass"
    raise TypeError(
        f"{cls!r} is not an enum, a dataclass or a named tuple. (`@register_type` goes above `@dataclass`.) Other "
        "classes can be saved as what their `state_dict()` gives"
    )


def _is_redefinition(old: type, new: type) -> bool:
    """Whether the same source was run again, as in a notebook or by ``importlib.reload``."""
    return (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)


def fields_of(registered: RegisteredType, value: Any) -> dict[str, Any]:
    """The fields of an instance of a registered dataclass or named tuple, by name."""
    if registered.kind == "namedtuple":
        names = registered.cls._fields  # type: ignore[attr-defined]
        return dict(zip(names, tuple(value), strict=True))
    try:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(registered.cls)}
    except AttributeError as error:
        raise CannotStore(f"one of its fields was never set ({error}); set it before the save") from error
    others = [name for name in getattr(value, "__dict__", ()) if name not in fields and not _is_cached(value, name)]
    if others:
        raise CannotStore(
            f"it has attributes that are not fields of its class, {others!r}; make them fields, or keep them elsewhere"
        )
    return fields


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(type(value), name, None), functools.cached_property)


def instance_of(registered: RegisteredType, fields: Mapping[str, Any]) -> Any:
    """An instance of a registered dataclass or named tuple with these fields. Raises ``DoesNotFit``."""
    fields = _completed(registered, fields)
    if registered.kind == "namedtuple":
        return tuple.__new__(registered.cls, fields.values())
    try:
        instance: Any = object.__new__(registered.cls)
        for name, value in fields.items():
            object.__setattr__(instance, name, value)
    except (TypeError, AttributeError) as error:
        raise DoesNotFit(f"the registered class cannot be made from its fields ({error})") from error
    return instance


def _completed(registered: RegisteredType, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in the order of the class, with defaults for those that were added to it since."""
    names, defaults = _names_and_defaults(registered)
    for name in stored:
        if name not in names:
            raise DoesNotFit(f"the registered class has no field {name[:100]!r}")
    complete = {}
    for name in names:
        if name in stored:
            complete[name] = stored[name]
        elif name in defaults:
            complete[name] = defaults[name]
        else:
            raise DoesNotFit(f"field {name!r} of the registered class is not stored, and it has no default")
    return complete


def _names_and_defaults(registered: RegisteredType) -> tuple[tuple[str, ...], dict[str, Any]]:
    cls: Any = registered.cls
    if registered.kind == "namedtuple":
        return cls._fields, cls._field_defaults
    fields = dataclasses.fields(cls)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    for field in fields:
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return tuple(field.name for field in fields), defaults


def member_name(value: enum.Enum) -> str:
    """The name of an enum member; of a combination of flags, their names with ``|`` between them."""
    members = type(value).__members__
    if value._name_ in members:
        return value._name_
    if isinstance(value, enum.Flag):
        single = [name for name, flag in members.items() if flag._value_ & value._value_ == flag._value_ != 0]
        if _combined(type(value), single) == value:
            return "|".join(single)
    raise CannotStore("it is a combination of flags that have no names; give them names")


def member_named(cls: type, name: str) -> enum.Enum:
    """The member of a registered enum that ``member_name`` called so. Raises ``DoesNotFit``."""
    members: Mapping[str, enum.Enum] = cls.__members__  # type: ignore[attr-defined]
    if name in members:
        return members[name]
    if issubclass(cls, enum.Flag):
        parts = name.split("|") if name else []
        if all(part in members for part in parts):
            return _combined(cls, parts)
    raise DoesNotFit(f"the registered class has no member {name[:100]!r}")


def _combined(cls: type[enum.Flag], names: list[str]) -> enum.Flag:
    flags = cls(0)
    for name in names:
        flags |= cls[name]
    return flags
