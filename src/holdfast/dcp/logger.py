"""Records of saves and loads: a decorator, and the logger that gets them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from holdfast._dcp.events import describe_arguments, describe_step, recorded
from holdfast._dcp.events import logger as _dcp_logger
from holdfast.dcp.logging_handlers import DCP_LOGGER_NAME

__all__ = ["DCP_LOGGER_NAME", "_dcp_logger", "_dcp_method_logger", "_get_msg_dict", "_init_logger", "logger"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

logger = logging.getLogger("holdfast")

_RECORDED = {"checkpoint_id", "process_group", "group", "pg", "storage_writer", "storage_reader", "planner"}


def _dcp_method_logger(
    log_exceptions: bool = False, **wrapper_kwargs: Any
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Record the calls of a function. ``wrapper_kwargs`` stand for arguments that it is not given by name.

    Example:
        >>> import logging
        >>> class Show(logging.Handler):
        ...     def emit(self, record):
        ...         print(record.msg["func_name"], record.msg["event"], record.msg["checkpoint_id"])
        >>> handler = Show()
        >>> _dcp_logger.addHandler(handler)
        >>> @_dcp_method_logger(checkpoint_id="run/7")
        ... def save_something():
        ...     return "done"
        >>> save_something()
        save_something start run/7
        save_something end run/7
        'done'
        >>> _dcp_logger.removeHandler(handler)
    """

    def decorate(func: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(func)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            about = {key: value for key, value in {**wrapper_kwargs, **kwargs}.items() if key in _RECORDED}
            with recorded(func.__name__, log_exceptions=log_exceptions, **about):
                return func(*args, **kwargs)

        return wrapper

    return decorate


def _msg_dict_from_dcp_method_args(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The part of a record that comes from the arguments."""
    return describe_arguments(**kwargs)


def _get_msg_dict(func_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """A record without an event."""
    return describe_step(func_name, **kwargs)


def _init_logger(rank: int) -> None:
    """Show what Holdfast logs on this rank, for processes of their own. Other loggers stay as they are."""
    logger.setLevel(logging.INFO)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _OfRank)]:
        logger.removeHandler(handler)
    logger.addHandler(_OfRank(rank))


class _OfRank(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines that begin with the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"[rank {rank}] %(asctime)s %(levelname)s %(name)s: %(message)s"))
