"""Nested ShardedTensors as flat ones."""

from holdfast._layout.sharded_tensors import flatten_sharded_tensors as _flatten_sharded_tensors

__all__ = ["_flatten_sharded_tensors"]
