"""Typed values: states as JSON that gives back the same types and the same bits. docs/format.md is the specification.

This is the door to the modules that do it: ``encoding`` (states to JSON), ``decoding`` (back), ``leaves`` and ``keys``
(what the parts of a state are called), ``declared`` (classes of the program).

>>> from datetime import timedelta
>>> stored = Encoder(take=lambda path, tensor: None).encode({"took": timedelta(hours=1), "best": float("-inf")})
>>> decode(stored, tensor=str)
{'took': datetime.timedelta(seconds=3600), 'best': -inf}
"""

from __future__ import annotations

from holdfast.formats.native.declared import declare
from holdfast.formats.native.decoding import decode
from holdfast.formats.native.encoding import Encoder, Path
from holdfast.formats.native.keys import key_of, keys_of
from holdfast.formats.native.leaves import Leaf, leaves
from holdfast.formats.native.numpy_types import numpy_dtype_from, stored_numpy_dtype
from holdfast.formats.native.stored_members import JSON

__all__ = [
    "JSON",
    "Encoder",
    "Leaf",
    "Path",
    "declare",
    "decode",
    "key_of",
    "keys_of",
    "leaves",
    "numpy_dtype_from",
    "stored_numpy_dtype",
]
