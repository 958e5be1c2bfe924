"""Local tensors that are parts of larger ones, and say so by attributes.

>>> import torch
>>> rows = torch.ones(2, 4)                                   # rows 2 and 3 of a tensor of four
>>> rows.global_shape, rows.global_offsets = (4, 4), ((2, 0),)
>>> rows.local_offsets, rows.local_sizes = ((0, 0),), ((2, 4),)
>>> isinstance(rows, CheckpointableTensor)
True
"""

from holdfast._layout.checkpointable import CheckpointableTensor
from holdfast._layout.checkpointable import chunks_of as _get_checkpointable_tensor_chunks
from holdfast._layout.checkpointable import copy_fields as _copy_checkpointable_tensor_metadata
from holdfast._layout.checkpointable import is_checkpointable as _is_checkpointable_tensor
from holdfast._layout.checkpointable import refuse_contradictions as _validate_checkpointable_tensor_metadata
from holdfast._layout.checkpointable import shard_of as _get_checkpointable_tensor_shard

__all__ = [
    "CheckpointableTensor",
    "_copy_checkpointable_tensor_metadata",
    "_get_checkpointable_tensor_chunks",
    "_get_checkpointable_tensor_shard",
    "_is_checkpointable_tensor",
    "_validate_checkpointable_tensor_metadata",
]
