"""Names and small helpers of the Hugging Face layout."""

from __future__ import annotations

import io
from typing import Any, cast

import torch

from holdfast._base.json_objects import parse_json_object
from holdfast._dcp.hf_files import _HFStorageInfo
from holdfast._formats.hf_folder import names as hf_names
from holdfast._formats.hf_folder import names as hf_notes
from holdfast._formats.hf_folder.names import file_name
from holdfast._formats.safetensors.header import LENGTH_BYTES, METADATA_KEY, ByteSource, read_header_text
from holdfast._formats.safetensors.torch_dtypes import BY_NAME

__all__ = [
    "CUSTOM_METADATA_KEY",
    "DATA_KEY",
    "DATA_OFFSETS_KEY",
    "DCP_SHARDING_INFO_KEY",
    "DCP_VERSION_KEY",
    "DEFAULT_EXTRA_METADATA_KEY",
    "DTYPE_KEY",
    "DTYPE_MAP",
    "FILE_NAME",
    "FORMAT_KEY",
    "FORMAT_VALUE",
    "HF_DCP_VERSION",
    "NUM_BYTES_FOR_HEADER_LEN",
    "SAVED_OFFSETS_KEY",
    "SHAPE_KEY",
    "SHARDED_DIR_NAME",
    "SHARDED_FILE_NAME",
    "SUFFIX",
    "_HFStorageInfo",
    "_gen_file_name",
    "_get_dcp_custom_metadata",
    "_get_dtype",
    "_get_safetensors_file_metadata",
    "_metadata_fn",
]

_metadata_fn: str = hf_names.INDEX_NAME
SUFFIX: str = hf_names.SUFFIX
SHARDED_DIR_NAME: str = hf_names.SHARDED_FOLDER
FILE_NAME: str = "model-{cpt_idx}-of-{num_files}"
SHARDED_FILE_NAME: str = "shard-{shard_idx}-model-{cpt_idx}-of-{num_files}"

CUSTOM_METADATA_KEY: str = hf_notes.SHARDING_KEY
DCP_SHARDING_INFO_KEY: str = hf_notes.SHARDING_KEY
SAVED_OFFSETS_KEY: str = hf_notes.OFFSETS_KEY
DCP_VERSION_KEY: str = hf_notes.VERSION_KEY
HF_DCP_VERSION: float = hf_notes.VERSION
FORMAT_KEY: str = hf_notes.FORMAT_KEY
FORMAT_VALUE: str = hf_notes.FORMAT

DEFAULT_EXTRA_METADATA_KEY: str = METADATA_KEY
NUM_BYTES_FOR_HEADER_LEN: int = LENGTH_BYTES
DTYPE_KEY: str = "dtype"
SHAPE_KEY: str = "shape"
DATA_KEY: str = "data"
DATA_OFFSETS_KEY: str = "data_offsets"
DTYPE_MAP: dict[str, torch.dtype] = dict(BY_NAME)


def _gen_file_name(index: int, largest_index: int, shard_index: int | None = None) -> str:
    """The name of a model's file, or of a part of it."""
    return file_name(index, largest_index, shard_index)


def _get_dtype(dtype_str: str) -> torch.dtype:
    """The dtype that a name in a header stands for."""
    if dtype_str not in DTYPE_MAP:
        raise ValueError(f"safetensors dtype {dtype_str!r} has no counterpart in torch; known are {sorted(DTYPE_MAP)}")
    return DTYPE_MAP[dtype_str]


def _get_safetensors_file_metadata(file_bytes: io.IOBase) -> tuple[Any, int]:
    """The header of an open file as it stands there, and where the data begins."""
    source = str(getattr(file_bytes, "name", "the file"))
    text, _ = read_header_text(cast("ByteSource", file_bytes), source)
    return parse_json_object(text, source, "its header"), LENGTH_BYTES + len(text)


def _get_dcp_custom_metadata(metadata: Any) -> Any | None:
    """The offsets of parts of tensors that a header states; None if it states none."""
    stated = (metadata.get(METADATA_KEY) or {}).get(hf_notes.SHARDING_KEY)
    return None if stated is None else parse_json_object(stated, f"the note {hf_notes.SHARDING_KEY}")
