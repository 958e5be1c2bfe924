"""Contenders remark on every save without a process group. A benchmark need not repeat it."""

from __future__ import annotations

import logging
import warnings


def silence() -> None:
    """Show no warnings and no log lines."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
