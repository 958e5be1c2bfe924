"""Where a handler for the records of saves and loads is put before ``holdfast.dcp.logger`` is imported."""

from __future__ import annotations

from holdfast._compat.groups import log_handlers
from holdfast._dcp.events import DCP_LOGGER_NAME

__all__ = ["DCP_LOGGER_NAME", "_log_handlers"]

_log_handlers = log_handlers()
