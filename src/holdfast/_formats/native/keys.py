"""What the leaves of a state are called: their paths joined by dots, or in brackets where dots would not be clear."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

from holdfast._formats.native.encoding import Encoder, Path
from holdfast._formats.native.members import LARGEST_PLAIN_INT, SURROGATE
from holdfast.errors import UnsupportedValueError

_DOTTED = {str, int}


def keys_of(paths: Iterable[Path]) -> list[str]:
    """The keys of all leaves of a state, which are different for different paths.

    >>> keys_of([("model", "layer.weight"), ("steps", 0)])
    ['model.layer.weight', 'steps.0']
    >>> keys_of([("a.b",), ("a", "b"), ("c",)])
    ['["a.b"]', '["a"]["b"]', 'c']
    """
    paths = list(paths)
    keys = _dotted_at_once(paths) or [key_of(path) for path in paths]
    if len(set(keys)) == len(keys):
        return keys
    shared = {key for key, count in collections.Counter(keys).items() if count > 1 and not key.startswith("[")}
    bracketed = {n: _in_brackets(paths[n]) for n, key in enumerate(keys) if key in shared}
    # The same path may have been given twice, which is no collision.
    meanings = {(keys[n], text) for n, text in bracketed.items()}
    unclear = {key for key, count in collections.Counter(key for key, _ in meanings).items() if count > 1}
    return [bracketed[n] if key in unclear else key for n, key in enumerate(keys)]


def _dotted_at_once(paths: list[Path]) -> list[str] | None:
    """The keys that ``key_of`` makes, if it is plain for all of them that they are steps joined by dots."""
    if not {str}.issuperset(map(type, chain.from_iterable(paths))):
        return None
    keys = [".".join(path) for path in paths]
    together = "".join(keys)
    return keys if together.isascii() and "[" not in together else None


def key_of(path: Path) -> str:
    """The key of a path that shares its key with no other path of the state."""
    if _DOTTED.issuperset(map(type, path)):
        try:
            key = ".".join(path)
        except TypeError:
            if any(type(part) is int and abs(part) >= LARGEST_PLAIN_INT for part in path):
                return _in_brackets(path)
            key = ".".join(map(str, path))
        # What begins with a bracket is a path in brackets, and nothing else.
        if not key.startswith("[") and (key.isascii() or SURROGATE.search(key) is None):
            return key
    return _in_brackets(path)


def readable(path: Path) -> str:
    """The key of a path for messages; never fails."""
    try:
        return key_of(path)
    except UnsupportedValueError:
        return "".join(_in_brackets_or_type(part) for part in path)


def _in_brackets(path: Path) -> str:
    encoder = Encoder(_no_tensors, allow_pickle=True)
    parts = (json.dumps(encoder.encode(part), ensure_ascii=False, separators=(",", ":")) for part in path)
    return "".join(f"[{part}]" for part in parts)


def _in_brackets_or_type(part: Any) -> str:
    try:
        return _in_brackets((part,))
    except UnsupportedValueError:
        return f"[<{type(part).__module__}.{type(part).__qualname__}>]"


def _no_tensors(path: Path, tensor: Any) -> str:
    raise UnsupportedValueError("a tensor cannot be the key of a dict", key="")
