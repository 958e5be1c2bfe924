"""The names that files of a Hugging Face folder have, and which of them belong to a checkpoint."""

from __future__ import annotations

import re
from pathlib import PurePath

INDEX_NAME = "model.safetensors.index.json"
COMMIT_NAME = "model.safetensors.commit.json"
"""There from the moment a save is complete until all of its files have their final names. See ``hf_commit``."""
SUFFIX = ".safetensors"
SHARDED_FOLDER = "sharded"

_FILE = r"(?:shard-\d{5,}-)?model-\d{5,}-of-\d{5,}\.safetensors"
_DATA_FILE = re.compile(_FILE)
_SHARD = re.compile(r"shard-(\d{5,})-model-\d{5,}-of-\d{5,}\.safetensors")
_NUMBERED = re.compile(r"model-(\d{5,6})-of-(\d{5,6})\.safetensors")
_TEMPORARY = re.compile(
    rf"(?:{_FILE}|{re.escape(INDEX_NAME)}|{re.escape(COMMIT_NAME)})\.(?P<generation>[0-9a-f]{{8}})\.tmp"
)


def file_name(index: int, largest_index: int, shard: int | None = None) -> str:
    """The name of a model's ``index``-th file, or of a part of it.

    >>> file_name(1, 3), file_name(1, 3, shard=2)
    ('model-00001-of-00003.safetensors', 'shard-00002-model-00001-of-00003.safetensors')
    """
    whole = f"model-{index:05d}-of-{largest_index:05d}{SUFFIX}"
    return whole if shard is None else f"shard-{shard:05d}-{whole}"


def temporary_name(final: str, generation: str) -> str:
    """What a file is called until the save that it belongs to is complete."""
    return f"{final}.{generation}.tmp"


def final_name(temporary: str) -> str:
    """What an unfinished file is going to be called.

    >>> final_name(temporary_name("model-00001-of-00001.safetensors", "0a1b2c3d"))
    'model-00001-of-00001.safetensors'
    """
    return temporary.rsplit(".", 2)[0]


def is_data_file(name: str) -> bool:
    """Whether a file is a model file or a part of one, as writers of the layout name them."""
    return _DATA_FILE.fullmatch(name) is not None


def number_of(name: str) -> tuple[int, int] | None:
    """Which file of how many a model file is, by its name; None for files that are not numbered.

    >>> number_of("model-00002-of-00003.safetensors"), number_of("model.safetensors")
    ((2, 3), None)
    """
    match = _NUMBERED.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def is_shard(name: str) -> bool:
    """Whether a file is a part of a model file."""
    return _SHARD.fullmatch(name) is not None


def generation_of(name: str) -> str | None:
    """The save that an unfinished file is of, given by its name or by its path in the folder; None for other files."""
    match = _TEMPORARY.fullmatch(PurePath(name).name)
    return match["generation"] if match else None


def lies_inside(name: str) -> bool:
    """Whether a name that was read from a file stays inside of the folder that it is relative to.

    >>> lies_inside("sharded/a.safetensors"), lies_inside("../a.safetensors"), lies_inside("/a.safetensors")
    (True, False, False)
    """
    path = PurePath(name)
    return bool(path.name) and not path.anchor and ".." not in path.parts and "\0" not in name
