"""A drop-in for ``torch.distributed.checkpoint``: the same names, arguments and files, without its traps.

>>> import tempfile, torch
>>> import holdfast.dcp as dcp                                # was: import torch.distributed.checkpoint as dcp
>>> model, path = torch.nn.Linear(2, 3), tempfile.mkdtemp()
>>> metadata = dcp.save({"model": model}, checkpoint_id=path)
>>> dcp.load({"model": model}, checkpoint_id=path)

The modules below this package carry the names that they have in torch. They are thin: the engine is in
``holdfast._dcp.save``, ``holdfast._dcp.load`` and what these build on.
"""

from holdfast.dcp import _extension
from holdfast.dcp.api import CheckpointException
from holdfast.dcp.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from holdfast.dcp.filesystem import FileSystemReader, FileSystemWriter
from holdfast.dcp.fsspec_filesystem import FsspecReader, FsspecWriter
from holdfast.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.dcp.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, TensorStorageMetadata
from holdfast.dcp.optimizer import load_sharded_optimizer_state_dict
from holdfast.dcp.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from holdfast.dcp.protocol import CheckpointableTensor
from holdfast.dcp.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from holdfast.dcp.state_dict_loader import load, load_state_dict
from holdfast.dcp.state_dict_saver import async_save, save, save_state_dict
from holdfast.dcp.storage import StorageReader, StorageWriter

__all__ = [
    "BytesStorageMetadata",
    "CheckpointException",
    "CheckpointableTensor",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "FsspecReader",
    "FsspecWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "_extension",
    "async_save",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "save",
    "save_state_dict",
]
