"""What functions of the user make out of a checkpoint, checked against the state that it is for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.boxes import place_of
from holdfast.checkpoint import Checkpoint
from holdfast.errors import HoldfastError
from holdfast.formats.native.dtypes import dtype_named
from holdfast.formats.native.refs import TensorRef
from holdfast.tensor_handles import TensorHandle
from holdfast.verbs.filling import regions_of
from holdfast.verbs.fills import Fill
from holdfast.verbs.findings import Findings, Transform
from holdfast.verbs.load_options import Casts
from holdfast.verbs.shared_memory import Write
from holdfast.verbs.targets import shape_and_dtype, takes_numbers, why_not_fillable, why_not_real


def make(transform: Transform, checkpoint: Checkpoint, found: Findings, casts: Casts) -> list[Write]:
    """Call the function; returns the parts of what it made that this rank holds. What is wrong goes to ``found``."""
    key = transform.key
    try:
        made = transform.function(checkpoint, key)
        if isinstance(made, TensorHandle):
            made = made[...]
        if transform.target is None:
            transform.take(made)
            return []
        return _parts(transform, made, found, casts)
    except HoldfastError as error:
        found.errors[key] = error
    except Exception as error:
        found.misfits[key] = f"has a transform that failed with {type(error).__name__}: {error}"
    return []


def _parts(transform: Transform, made: Any, found: Findings, casts: Casts) -> list[Write]:
    key, target = transform.key, transform.target
    if not isinstance(made, (np.ndarray, torch.Tensor)):
        found.misfits[key] = f"is a tensor, and its transform made a {type(made).__name__}"
        return []
    (made_shape, made_dtype), (shape, dtype) = shape_and_dtype(made), shape_and_dtype(target)
    reason = why_not_fillable(key, target) or why_not_real(key, made_dtype, dtype)
    if reason is not None:
        found.misfits[key] = reason
        return []
    if made_shape != shape:
        found.shapes[key] = (made_shape, shape)
        return []
    if made_dtype != dtype:
        if not (casts.allow(key, dtype) and takes_numbers(target)):
            found.dtypes[key] = (made_dtype, dtype)
            return []
        found.cast[key] = (made_dtype, dtype)
    writes = []
    for region in regions_of(Fill(key, TensorRef(key, dtype_named("uint8"), shape), target)):
        part = made[place_of(region.box.offsets, region.box.sizes)]
        writes.append(Write(region, part.copy() if isinstance(part, np.ndarray) else part.detach().clone()))
    return writes
