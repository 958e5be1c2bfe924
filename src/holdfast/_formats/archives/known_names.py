"""What a reader of pickles knows about the names in them, and the stand-ins it uses while it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from holdfast._formats.archives.pickle_machine import Machine


Name = tuple[str, str]
"""A module and the name of something in it."""


@dataclass(frozen=True)
class AllowedName:
    """What a file may do with one name. What is None is refused."""

    value: Any
    """What the name stands for where it is used as a value."""
    call: Callable[..., Any] | None = None
    """Makes the object of a call: ``name(*arguments)``."""
    new: Callable[..., Any] | None = None
    """Makes the object of a construction without ``__init__``: ``name.__new__(name, *arguments)``."""
    build: Callable[[Any, Any], Any] | None = None
    """``(object, state)`` to the finished object."""
    hashes_items: bool = False
    """Whether a call hashes the items of its argument."""
    hint: Any = None
    """Whatever shortcuts want to know of each other."""
    shortcut: Callable[[Machine], bool] | None = None
    """Tried before a construction without arguments: does all of it and moves on, or leaves all as it was."""


class Inert:
    """Stands for a function or class of which the file's name is all that is known."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Draft:
    """An object whose state comes later in the file. The finished object then takes its place.

    Until then nothing may refer to it. The machine sees to that: what is unfinished at the end is an error.
    """

    __slots__ = ("build", "slots")

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.build = build
        self.slots: list[int] = []


def draft_of(name: str, finish: Callable[[Any], Any]) -> AllowedName:
    """A class whose objects are made from nothing but their state, by ``finish``."""

    def start(*arguments: Any) -> Draft:
        if arguments:
            raise ValueError(f"{name} with arguments")
        return Draft(finish)

    return AllowedName(Inert(name), new=start)


class Refusal(Exception):
    """Raised by what a name does, when it is asked for more than is safe. Arguments: the module and the name."""


Find = Callable[[str, str], AllowedName | None]


class _Skipped:
    """Fills memo slots of what a shortcut did not make."""


SKIPPED = _Skipped()


def brief(value: Any) -> str:
    """A value for a message. Never the text of a container: a forged one can have an endless text."""
    if isinstance(value, (str, int, float, Inert, type)) or value is None:
        return f"{value!r:.80}"
    return f"a {type(value).__name__}"


def one_bit_away(text: str) -> Iterator[str]:
    """The texts that one flipped bit makes of an ASCII text.

    >>> "size" in one_bit_away("sire"), "size" in one_bit_away("strides")
    (True, False)
    """
    if text.isascii():
        for position, character in enumerate(text):
            for bit in range(7):
                yield text[:position] + chr(ord(character) ^ 1 << bit) + text[position + 1 :]


PLAIN_KEYS = frozenset({str, int, float, bool, bytes, complex, type(None)})
_DEEPEST_KEY = 64


def hash_work(key: Any, most: int) -> int:
    """How many objects a hash of ``key`` visits. An error if they are more than ``most``, or nested too deeply.

    A forged tuple can overflow the stack of the hash function, or keep it busy for ever: a few dozen tuples that
    hold each other twice are endless to it.
    """
    pending = [(key, 0)]
    seen = 0
    while pending:
        item, depth = pending.pop()
        if isinstance(item, tuple):
            seen += 1 + len(item)
            if depth > _DEEPEST_KEY or seen > most:
                raise ValueError("keys that are nested too deeply, or too large")
            pending.extend((inner, depth + 1) for inner in item)
    return seen


# Classes and functions that the user has declared safe through ``torch.serialization.add_safe_globals``.


def find_registered(module: str, name: str) -> AllowedName | None:
    """The entry for something the user declared safe; None for everything else."""
    wanted = f"{module}.{name}"
    for entry in torch.serialization.get_safe_globals():
        value, full_name = entry if isinstance(entry, tuple) else (entry, _full_name(entry))
        if full_name == wanted:
            return known_class(value) if isinstance(value, type) else AllowedName(value, call=value)
    return None


def known_class(cls: type) -> AllowedName:
    """An entry that makes objects of ``cls`` the way pickle does."""

    def new(*arguments: Any, **keywords: Any) -> Any:
        return cls.__new__(cls, *arguments, **keywords)

    return AllowedName(cls, call=cls, new=new, build=_set_state)


def _full_name(value: Any) -> str:
    return f"{value.__module__}.{getattr(value, '__qualname__', None) or value.__name__}"


def _set_state(target: Any, state: Any) -> Any:
    # Only reached for objects whose class is registered, never for the class itself: its type is `type`.
    own = getattr(target, "__setstate__", None)
    if own is not None:
        own(state)
        return target
    in_dict, in_slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if in_dict:
        vars(target).update(_named(in_dict))
    for name, value in _named(in_slots or {}).items():
        object.__setattr__(target, name, value)
    return target


def _named(attributes: Any) -> dict[str, Any]:
    if type(attributes) is not dict or any(type(name) is not str or name.startswith("__") for name in attributes):
        raise TypeError("a state that is not a dictionary of attributes")
    return attributes
