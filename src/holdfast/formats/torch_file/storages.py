"""Whether the storages that a ``torch.save`` file describes are as large as the entries that hold them.

Elements are read from the file by the size that the description claims, which torch does not compare: a wrong one would
show bytes of something else as elements.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

from holdfast.formats.dcp.zip_layout import Entry, damaged
from holdfast.formats.torch_file.claims import Claims


def check_storage_sizes(description: bytes, entries: Mapping[str, Entry], *, source: str) -> None:
    """Compare the sizes that ``description`` claims with those of the file's ``entries``."""
    claims = Claims()
    try:
        claims.follow(io.BytesIO(description))
    except (ValueError, LookupError, TypeError):  # torch says what is wrong with it, in its own words
        pass
    for storage in claims.storages:
        name = f"data/{storage.key}"
        if name in entries and storage.item_size is not None and entries[name].length != storage.nbytes:
            raise damaged(source, name, "another number of bytes than described", storage.nbytes, entries[name].length)
    there = sum(entry.length for entry in entries.values())
    if claims.reserved > there:
        raise damaged(source, "data.pkl", "more memory asked for than the file has bytes", there, claims.reserved)
