"""Checkpoints in the layout of Hugging Face models."""

from __future__ import annotations

from holdfast._dcp.hf_reader import HuggingFaceStorageReader
from holdfast._dcp.hf_writer import HuggingFaceWriter
from holdfast._formats.hf_folder.names import INDEX_NAME, OFFSETS_KEY, SHARDED_FOLDER, SHARDING_KEY
from holdfast._formats.hf_folder.names import SUFFIX as _SUFFIX

# The keys are here too because torch 2.8 has them here.
from holdfast.dcp._hf_utils import DATA_KEY as DATA_KEY
from holdfast.dcp._hf_utils import DATA_OFFSETS_KEY as DATA_OFFSETS_KEY
from holdfast.dcp._hf_utils import DEFAULT_EXTRA_METADATA_KEY as DEFAULT_EXTRA_METADATA_KEY
from holdfast.dcp._hf_utils import DTYPE_KEY as DTYPE_KEY
from holdfast.dcp._hf_utils import SHAPE_KEY as SHAPE_KEY
from holdfast.dcp.filesystem import FileSystemWriter

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]

_metadata_fn: str = INDEX_NAME
SHARDED_DIR_NAME: str = SHARDED_FOLDER
SUFFIX: str = _SUFFIX
CUSTOM_METADATA_KEY: str = SHARDING_KEY
SAVED_OFFSETS_KEY: str = OFFSETS_KEY


class HuggingFaceStorageWriter(HuggingFaceWriter, FileSystemWriter):
    """Writes a state of tensors as a Hugging Face folder.

    Args:
        path: the folder.
        fqn_to_index_mapping: the number of the model file that each tensor goes into; all go into one by default.
        thread_count: how many files a rank writes at a time.
        save_distributed: leave the parts of each rank in files of their own, ``shard-…``, instead of whole model files.
        enable_consolidation: with ``save_distributed``, make whole model files and an index out of the parts, which go
            into the folder ``sharded``.
        thread_count_consolidation: how many model files are made out of parts at a time.

    Example:
        >>> import os, tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> path = tempfile.mkdtemp()
        >>> writer = HuggingFaceStorageWriter(path, {"weight": 1, "bias": 2})
        >>> _ = dcp.save({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, storage_writer=writer, no_dist=True)
        >>> sorted(os.listdir(path))[:2]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
