"""The tree of a state of which nothing but keys is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_JSON = json.JSONDecoder()


def tree_of_keys(keys: Sequence[str]) -> Any:
    """The tree, as a record has it, in which every tensor is under its key.

    Dots in keys may be steps of a path or not, and loading takes both, so the tree is flat; but keys in brackets tell
    their paths.

    >>> tree_of_keys(["model.weight", '["a.b"][0]'])["model.weight"]
    {'$': 'tensor', 'key': 'model.weight'}
    >>> tree_of_keys(["model.weight", '["a.b"][0]'])["a.b"]
    {'$': 'dict', 'items': [[0, {'$': 'tensor', 'key': '["a.b"][0]'}]]}
    """
    tree = _Branch()
    for key in keys:
        path = _path_in_brackets(key)
        if path is None or not tree.put(path, key):
            tree.children[json.dumps(key)] = key
    return tree.encoded()


class _Branch:
    """A dict while it is being filled. Its keys are JSON texts, since some cannot be keys of Python's dicts."""

    def __init__(self) -> None:
        self.children: dict[str, _Branch | str] = {}

    def put(self, path: Sequence[Any], tensor: str) -> bool:
        """Put a tensor at its path. False if something is in the way, which no state had."""
        branch = self
        for step in path[:-1]:
            below = branch.children.setdefault(json.dumps(step), _Branch())
            if not isinstance(below, _Branch):
                return False
            branch = below
        return branch.children.setdefault(json.dumps(path[-1]), tensor) == tensor

    def encoded(self) -> Any:
        """As a typed value of the format."""
        items = [
            (json.loads(step), {"$": "tensor", "key": child} if isinstance(child, str) else child.encoded())
            for step, child in self.children.items()
        ]
        if all(isinstance(step, str) and step != "$" for step, _ in items):
            return dict(items)
        return {"$": "dict", "items": [list(item) for item in items]}


def _path_in_brackets(key: str) -> list[Any] | None:
    """The steps of a key in brackets, as typed values; None for other keys."""
    steps: list[Any] = []
    end = 0
    while key.startswith("[", end):
        try:
            step, end = _JSON.raw_decode(key, end + 1)
        except ValueError:
            return None
        if not key.startswith("]", end):
            return None
        end += 1
        steps.append(step)
    return steps if steps and end == len(key) else None
