"""By which names of files, and by which first bytes, a checkpoint of each format is known."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias

from holdfast._formats.dcp.names import DATA_SUFFIX, METADATA_NAME, is_index
from holdfast._formats.hf_folder import names as hf_names
from holdfast._formats.native.names import RECORD, generation_of

Format: TypeAlias = Literal["native", "dcp", "safetensors", "torch"]

SAFETENSORS = hf_names.SUFFIX
SAFETENSORS_INDEX = ".safetensors.index.json"
SAFETENSORS_COMMIT = ".safetensors.commit.json"
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
"""What files of ``torch.save`` are called, as a rule."""
FILE_ENDINGS = (SAFETENSORS, SAFETENSORS_INDEX, *TORCH_ENDINGS, RECORD, METADATA_NAME)
"""What ends like this is a file, and not a folder, as a rule."""
START = 9
"""How many bytes of a file show its format."""

ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80\x02"
"""How files of ``torch.save`` began before torch 1.6."""


def format_of_folder(names: Collection[str]) -> Format | None:
    """The format of the checkpoint in a folder with these files; None if there is none, or not yet.

    >>> format_of_folder({".metadata", "__0_0.distcp"}), format_of_folder({"__0_0.distcp"})
    ('dcp', None)
    """
    if RECORD in names:
        return "native"
    if any(map(is_index, names)):
        return "dcp"
    return "safetensors" if any(map(_is_safetensors, names)) else None


def format_of_unfinished(names: Collection[str]) -> Format | None:
    """The format of the save that left these files in a folder without a checkpoint, or is writing them.

    >>> format_of_unfinished({"__0_0.distcp"}), format_of_unfinished({"notes.txt"})
    ('dcp', None)
    """
    if any(generation_of(name) is not None for name in names):
        return "native"
    if any(name.endswith(DATA_SUFFIX) for name in names):
        return "dcp"
    return "safetensors" if any(hf_names.generation_of(name) is not None for name in names) else None


def format_of_file(name: str, start: bytes) -> Format | None:
    """The format of a file that is a checkpoint by itself, of which ``start`` are the first bytes.

    >>> format_of_file("model.pt", b"PK\\x03\\x04....."), format_of_file("notes.txt", b"Buy milk.")
    ('torch', None)
    """
    # First, because the length that a safetensors file begins with may look like the beginning of a pickle.
    if start[8:9] == b"{" and not any(start[5:8]):
        return "safetensors"
    if start.startswith((ZIP_MAGIC, _PICKLE_MAGIC)):
        return "torch"
    return "safetensors" if start[8:9] == b"{" or name.endswith(SAFETENSORS) else None


def is_of_a_checkpoint(name: str) -> bool:
    """Whether a file of this name belongs to the checkpoint in its folder, of whatever format.

    >>> is_of_a_checkpoint("model.safetensors.index.json"), is_of_a_checkpoint("config.json")
    (True, False)
    """
    endings = (SAFETENSORS, SAFETENSORS_INDEX, SAFETENSORS_COMMIT, DATA_SUFFIX)
    return name == RECORD or is_index(name) or name.endswith(endings) or generation_of(name) is not None


def stands_for_its_folder(name: str) -> bool:
    """Whether a file is the record or the index of the checkpoint in its folder."""
    return name == RECORD or is_index(name) or name.endswith(SAFETENSORS_INDEX)


def _is_safetensors(name: str) -> bool:
    return name.endswith((SAFETENSORS, SAFETENSORS_INDEX, SAFETENSORS_COMMIT)) and generation_of(name) is None
