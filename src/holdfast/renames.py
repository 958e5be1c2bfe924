"""New keys for stored ones, as users give them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

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
