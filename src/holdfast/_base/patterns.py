"""Choosing keys by wildcards, regular expressions or functions, and giving them other names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import translate
from typing import Any, TypeAlias

# Choosing keys: by wildcards, regular expressions, functions, or several of these.


Pattern: TypeAlias = "str | re.Pattern[str] | Callable[[str], bool]"
Patterns: TypeAlias = "Pattern | Iterable[Pattern]"


class Chooser:
    """Says which keys are meant.

    A str is a pattern with wildcards, of which ``*`` stands for anything, dots too. It means every key that it
    matches, and all that is below: ``"optim"`` means all that ``"optim.*"`` does, and so ``["optim"][null]`` too.
    Every key means itself, whatever characters it has. A compiled regular expression has to match the whole key. A
    function is asked.

    >>> chosen = Chooser(["model.*.bias", "optim"])
    >>> [chosen(key) for key in ("model.layers.0.bias", "model.layers.0.weight", "optim.state.0.step")]
    [True, False, True]
    """

    def __init__(self, patterns: Patterns) -> None:
        # What is not a collection of patterns is taken for a pattern, which it may not be either.
        several: Any = patterns if isinstance(patterns, Iterable) and not isinstance(patterns, str) else [patterns]
        self._tests = [_test(pattern) for pattern in several]

    def __call__(self, key: str) -> bool:
        return any(test(key) for test in self._tests)


def chooser(patterns: Patterns | None, *, otherwise: bool) -> Callable[[str], bool]:
    """A chooser of these patterns; without patterns the answer is always the same."""
    return (lambda key: otherwise) if patterns is None else Chooser(patterns)


class Selection:
    """The keys that are included and not excluded. Without ``include`` all are."""

    def __init__(self, include: Patterns | None, exclude: Patterns | None) -> None:
        self.is_everything = include is None and exclude is None
        self._included = chooser(include, otherwise=True)
        self._excluded = chooser(exclude, otherwise=False)

    def __call__(self, key: str) -> bool:
        return self._included(key) and not self._excluded(key)


class Choice:
    """A value for each key, from a mapping of patterns to values; the first pattern that fits counts.

    >>> Choice({"model.*": "bfloat16"})("model.weight")
    'bfloat16'
    """

    def __init__(self, values: Mapping[Pattern, Any] | None) -> None:
        self._tests = [(_test(pattern), value) for pattern, value in (values or {}).items()]

    def __call__(self, key: str) -> Any:
        """The value for a key; None if there is none."""
        for test, value in self._tests:
            if test(key):
                return value
        return None

    def __bool__(self) -> bool:
        return bool(self._tests)


def dotted(key: str) -> str:
    """A key with dots between its steps also where it is written in brackets, for comparing it with patterns.

    >>> dotted('["data"][null]["a.b"][3]'), dotted("data.x")
    ('data.null.a.b.3', 'data.x')
    """
    steps: list[str] = []
    end = 0
    while key.startswith("[", end):
        try:
            step, after = _JSON.raw_decode(key, end + 1)
        except ValueError:
            return key
        steps.append(step if isinstance(step, str) else key[end + 1 : after])
        end = after + 1
    return ".".join(steps) if steps and end == len(key) else key


_JSON = json.JSONDecoder()


def _test(pattern: Pattern) -> Callable[[str], bool]:
    if isinstance(pattern, str):
        matches = re.compile(f"{translate(pattern)[:-2]}(?:\\..*)?\\Z", re.DOTALL).match
        # Brackets are wildcards in patterns, and yet a key in brackets, as reports show it, must mean that key.
        literally = (f"{pattern}.", f"{pattern}[") if pattern.startswith("[") else (f"{pattern}.",)
        return lambda key: (
            matches(key) is not None
            or key == pattern
            or key.startswith(literally)
            or (key.startswith("[") and matches(dotted(key)) is not None)
        )
    if isinstance(pattern, re.Pattern):
        return lambda key: pattern.fullmatch(key) is not None
    if callable(pattern):
        return lambda key: bool(pattern(key))
    raise TypeError(
        f"{pattern!r} does not say which keys are meant; give a str with wildcards such as 'model.*', a compiled "
        "regular expression, or a function of the key"
    )


# New keys for stored ones, as users give them.


Rename: TypeAlias = "Mapping[str, str] | Mapping[re.Pattern[str], str] | Callable[[str], str | None]"


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
                raise TypeError(f"rename gives {old!r} the name {new!r}, which is not a str")
            if not isinstance(old, (str, re.Pattern)):
                raise TypeError(f"the keys of rename are str and compiled regular expressions, not {old!r}")
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
