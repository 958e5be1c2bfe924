"""Typed values: states as JSON that gives back the same types and the same bits. docs/format.md is the specification.

This is the door to the modules that do it: ``encoding`` (states to JSON), ``decoding`` (back), ``leaves`` and ``keys``
(what the parts of a state are called), ``registered_types`` (classes of the program).

>>> from datetime import timedelta
>>> stored = Encoder(take=lambda path, tensor: None).encode({"took": timedelta(hours=1), "best": float("-inf")})
>>> decode(stored, tensor=str)
{'took': datetime.timedelta(seconds=3600), 'best': -inf}
"""

from __future__ import annotations

from holdfast._formats.native.decoding import decode
from holdfast._formats.native.encoding import Encoder, Path
from holdfast._formats.native.keys import key_of, keys_of
from holdfast._formats.native.leaves import Leaf, leaves
from holdfast._formats.native.members import JSON
from holdfast._formats.native.numpy_types import numpy_dtype_from, stored_numpy_dtype
from holdfast._formats.native.registered_types import register_type

__all__ = [
    "JSON",
    "Encoder",
    "Leaf",
    "Path",
    "decode",
    "key_of",
    "keys_of",
    "leaves",
    "numpy_dtype_from",
    "register_type",
    "stored_numpy_dtype",
]
