"""Nested state as a flat mapping and back."""

from holdfast._base.nested import ObjectPath, flatten_state_dict, unflatten_state_dict

__all__ = ["FLATTEN_MAPPING", "flatten_state_dict", "unflatten_state_dict"]

FLATTEN_MAPPING = dict[str, ObjectPath]
