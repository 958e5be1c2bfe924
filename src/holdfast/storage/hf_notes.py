"""The notes in the header of a Hugging Face file: where the parts of tensors in it belong, and which save it is of.

``DCP_SHARDING_INFO``, ``DCP_VERSION`` and ``format`` are torch's. ``HOLDFAST_SAVE`` is ours, and
other readers pass over it: the id of the save, by which files of different saves are told apart, and the full sizes of
tensors of which the file holds a part, by which a missing part is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from holdfast.errors import DamagedCheckpointError
from holdfast.formats.json_objects import are_sizes, parse_json_object

SHARDING_KEY = "DCP_SHARDING_INFO"
OFFSETS_KEY = "saved_offsets"
VERSION_KEY = "DCP_VERSION"
VERSION = 1.0
FORMAT_KEY = "format"
FORMAT = "pt"
SAVE_KEY = "HOLDFAST_SAVE"


@dataclass(frozen=True)
class FileNotes:
    """What the notes of a file say."""

    save_id: str | None = None
    offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Full sizes of tensors that the file holds a part of."""


def notes_of_parts(notes: FileNotes) -> dict[str, str]:
    """Notes for a file that holds tensors or parts of tensors."""
    sharding = {key: {OFFSETS_KEY: list(offsets)} for key, offsets in notes.offsets.items()}
    return {SHARDING_KEY: json.dumps(sharding), VERSION_KEY: str(VERSION), **notes_of_whole_tensors(notes)}


def notes_of_whole_tensors(notes: FileNotes) -> dict[str, str]:
    """Notes for a file in which all tensors are whole."""
    written = {FORMAT_KEY: FORMAT}
    if notes.save_id is not None:
        save: dict[str, Any] = {"id": notes.save_id}
        if notes.sizes:
            save["sizes"] = {key: list(size) for key, size in notes.sizes.items()}
        written[SAVE_KEY] = json.dumps(save)
    return written


def read_notes(notes: Mapping[str, str], source: str) -> FileNotes:
    """Check the notes of the file ``source``. Files without any hold whole tensors."""
    sharding = _parse(notes, SHARDING_KEY, source)
    save = _parse(notes, SAVE_KEY, source)
    offsets: dict[str, Sequence[int]] = {}
    for key, entry in sharding.items():
        if not isinstance(entry, dict) or not are_sizes(entry.get(OFFSETS_KEY)):
            _refuse(source, key, SHARDING_KEY)
        offsets[key] = entry[OFFSETS_KEY]
    save_id, sizes = save.get("id"), save.get("sizes", {})
    if not isinstance(save_id, (str, type(None))) or not isinstance(sizes, dict):
        _refuse(source, None, SAVE_KEY)
    for key, size in sizes.items():
        if not are_sizes(size):
            _refuse(source, key, SAVE_KEY)
    return FileNotes(save_id, offsets, sizes)


def _parse(notes: Mapping[str, str], note: str, source: str) -> dict[str, Any]:
    return parse_json_object(notes.get(note, "{}"), source, f"its note {note}")


def _refuse(source: str, key: str | None, note: str) -> NoReturn:
    about = "" if key is None else f" about '{key}'"
    raise DamagedCheckpointError(
        f"{source} has a note {note}{about} that makes no sense. Copy the file again, or load another one.",
        file=source,
        key=key,
        expected="offsets and sizes as lists of numbers",
        found=note,
    )
