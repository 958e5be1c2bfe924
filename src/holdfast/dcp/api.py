"""Errors of collective calls."""

from holdfast._ranks.failures import is_wrapped_exception as _is_wrapped_exception
from holdfast._ranks.failures import wrap_exception as _wrap_exception
from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException

__all__ = ["WRAPPED_EXCEPTION", "CheckpointException", "_is_wrapped_exception", "_wrap_exception"]
