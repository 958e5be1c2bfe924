"""What a repair replaces is kept beside it, under another name."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.stores.store import Store

KEPT = ".before-repair"
"""At the end of the names of what was replaced."""


def keep_copy(store: Store, name: str) -> bytes | None:
    """What is in a file, of which a copy is kept beside it; None if there is no such file."""
    try:
        content = store.read(name)
    except FileNotFoundError:
        return None
    taken = {listed.name for listed in store.list()}
    copies: Iterable[str] = (f"{name}{KEPT}{number}" for number in ("", *range(2, 1000)))
    free = next((copy for copy in copies if copy not in taken or store.read(copy) == content), None)
    if free is not None and free not in taken:
        store.put(free, content)
    return content
