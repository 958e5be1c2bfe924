"""What the caller of a load wants and allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from holdfast.budgets import checked_budget
from holdfast.patterns import Choice, Chooser, Pattern, Patterns, Selection, chooser
from holdfast.verbs.user_dtypes import dtype_from_user

if TYPE_CHECKING:
    from holdfast.checkpoint import Checkpoint

Rename: TypeAlias = "Mapping[str, str] | Mapping[re.Pattern[str], str] | Callable[[str], str | None]"
Transforms: TypeAlias = "Mapping[Pattern, Callable[[Checkpoint, str], Any]]"


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of ``load``, as answers to the questions that come up on the way."""

    wanted: Selection
    """Which keys of the state are to be loaded."""
    strict: bool
    """Whether missing and unexpected keys are errors, unless they are allowed."""
    may_be_missing: Callable[[str], bool]
    """Which keys of the state the checkpoint need not have."""
    may_be_unexpected: Callable[[str], bool]
    """Which stored keys the state need not have a place for."""
    casts: Casts
    """Which tensors may change their dtype."""
    renaming: Renaming
    """From stored keys to keys of the state."""
    transform: Choice
    """The function that makes what belongs to a key of the state; None for what is simply read."""
    transform_patterns: Sequence[tuple[str, Chooser]]
    """For which keys there are functions: the patterns as text, and what they mean."""
    verify: bool | Literal["first"]
    """Whether digests are compared: while reading, or also before."""
    memory_budget: int | None
    """How many bytes may be allocated beside the state."""

    @classmethod
    def of(
        cls,
        *,
        strict: bool,
        allow_missing: Patterns | None,
        allow_unexpected: Patterns | None,
        include: Patterns | None,
        exclude: Patterns | None,
        rename: Rename | None,
        cast: bool | Patterns | Mapping[Pattern, Any],
        transform: Transforms | None,
        verify: bool | Literal["first"],
        memory_budget: int | None,
    ) -> LoadOptions:
        """The arguments of ``load``, checked."""
        if verify not in (True, False, "first"):
            raise ValueError(f"verify must be True, False or 'first', not {verify!r}")
        if transform is not None and not isinstance(transform, Mapping):
            raise TypeError(f"transform takes keys of the state with a function for each, not {transform!r}")
        return cls(
            wanted=Selection(include, exclude),
            strict=strict,
            may_be_missing=chooser(allow_missing, otherwise=False) if strict else _always,
            may_be_unexpected=chooser(allow_unexpected, otherwise=False) if strict else _always,
            casts=Casts(cast),
            renaming=Renaming(rename),
            transform=Choice(transform),
            transform_patterns=[(str(pattern), Chooser(pattern)) for pattern in transform or ()],
            verify=verify,
            memory_budget=checked_budget(memory_budget),
        )


class Casts:
    """Which changes of dtype are allowed.

    >>> casts = Casts({"model.*": "bfloat16"})
    >>> casts.allow("model.weight", "bfloat16"), casts.allow("model.weight", "float16"), casts.allow("x", "bfloat16")
    (True, False, False)
    """

    def __init__(self, cast: bool | Patterns | Mapping[Pattern, Any]) -> None:
        self._dtypes = Choice(None)
        self._allowed: Callable[[str], bool] = _always if cast is True else _never
        if isinstance(cast, Mapping):
            self._dtypes = Choice({pattern: dtype_from_user(wish) for pattern, wish in cast.items()})
        elif not isinstance(cast, bool):
            self._allowed = Chooser(cast)

    def allow(self, key: str, current: str) -> bool:
        """Whether stored elements may become of the type that the state has."""
        wish = self._dtypes(key)
        return self._allowed(key) or (wish is not None and str(wish).removeprefix("torch.") == current)

    def dtype_for(self, key: str) -> Any:
        """The type for a tensor that has no memory yet; None for the stored one."""
        return self._dtypes(key)


class Renaming:
    """From stored keys to keys of the state, and which of the given names were of any use.

    >>> renaming = Renaming({"model.encoder": "net", "model.old": "model.new"})
    >>> renaming("model.encoder.weight"), renaming("model.decoder.weight")
    ('net.weight', None)
    >>> renaming.unused
    ['model.old']
    """

    def __init__(self, rename: Rename | None) -> None:
        self._function = rename if callable(rename) else None
        if rename is not None and not callable(rename) and not isinstance(rename, Mapping):
            raise TypeError(f"rename takes a mapping of stored keys to new ones, or a function, not {rename!r}")
        given: Mapping[Any, str] = {} if rename is None or callable(rename) else rename
        for old, new in given.items():
            if not isinstance(new, str):
                raise TypeError(f"rename gives {old!r} the name {new!r}, which is not a text")
            if not isinstance(old, (str, re.Pattern)):
                raise TypeError(f"rename takes texts and compiled regular expressions as keys, not {old!r}")
        texts = {old: new for old, new in given.items() if isinstance(old, str)}
        self._texts = sorted(texts.items(), key=lambda pair: len(pair[0]), reverse=True)
        self._expressions = [(old, new) for old, new in given.items() if isinstance(old, re.Pattern)]
        self._used: set[Any] = set()

    def __bool__(self) -> bool:
        return self._function is not None or bool(self._texts or self._expressions)

    def __call__(self, key: str) -> str | None:
        """The new key; None if it stays the same."""
        if self._function is not None:
            return self._function(key)
        for old, new in self._texts:
            if key == old or key.startswith(f"{old}."):
                self._used.add(old)
                # An empty name takes the prefix away, with its dot.
                return new + key[len(old) :] if new else key[len(old) + 1 :]
        for pattern, new in self._expressions:
            if pattern.search(key):
                self._used.add(pattern)
                return pattern.sub(new, key)
        return None

    @property
    def unused(self) -> list[str]:
        """Names and expressions that no key was like."""
        every = [old for old, _ in self._texts] + [pattern for pattern, _ in self._expressions]
        return [old if isinstance(old, str) else old.pattern for old in every if old not in self._used]


def _always(key: str) -> bool:
    return True


def _never(key: str) -> bool:
    return False
