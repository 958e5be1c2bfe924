"""A record of every step of a save or a load, for programs that watch them.

The records are dicts, sent to the logger where ``torch.distributed.checkpoint`` sends its own, and look like those. So
handlers that a program has installed there see both. Unless there are any, nothing is written anywhere.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from holdfast._compat.groups import describe_ranks, distributed_logger, log_handlers

P = ParamSpec("P")
T = TypeVar("T")

DCP_LOGGER_NAME = "dcp_logger"

# A program may have put a handler of its own there before.
log_handlers().setdefault(DCP_LOGGER_NAME, logging.NullHandler())
logger: logging.Logger = distributed_logger(DCP_LOGGER_NAME)

_NAMED_BY_CLASS = ("storage_writer", "storage_reader", "planner")


@contextmanager
def recorded(name: str, /, *, log_exceptions: bool = False, **about: Any) -> Iterator[None]:
    """Record the beginning and the end of a block, and with ``log_exceptions`` how it failed.

    ``about`` may hold ``checkpoint_id``, ``process_group``, ``storage_writer``, ``storage_reader`` and ``planner``.
    """
    if not _somebody_listens():
        yield
        return
    started = time.time_ns()
    record = {**describe_step(name, **about), "event": "start", "time": started, "log_exceptions": log_exceptions}
    logger.debug(record)
    try:
        yield
    except BaseException as error:
        if log_exceptions:
            failed = {**record, "event": "exception", "time": time.time_ns(), "error": str(error)}
            logger.error(failed)  # noqa: TRY400 - the record is a dict; whoever called gets the traceback
        raise
    ended = time.time_ns()
    logger.debug({**record, "event": "end", "time": ended, "times_spent": ended - started})


def _somebody_listens() -> bool:
    """Whether a record would get anywhere. Making one takes longer than many a step does."""
    place: logging.Logger | None = logger
    while place is not None:
        if place.filters or any(type(handler) is not logging.NullHandler for handler in place.handlers):
            return True
        place = place.parent if place.propagate else None
    return False


def recorded_step(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Record the calls of a method. The ``about`` of its object is a dict of what ``recorded`` takes."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            about: dict[str, Any] = vars(args[0])["about"]
            with recorded(name, **about):
                return method(*args, **kwargs)

        return wrapper

    return decorate


def describe_step(name: str, /, **about: Any) -> dict[str, Any]:
    """What the records of a step have in common: what is saved or loaded, by what, and by which ranks."""
    try:
        ranks = describe_ranks(name, **about)
    except Exception:
        ranks = {"func_name": name}  # the group is gone, which is no reason for a background save to fail
    return {**describe_arguments(**about), **ranks}


def describe_arguments(**about: Any) -> dict[str, Any]:
    """The part of a record that the arguments of ``save`` or ``load`` determine, and an id of the call."""
    checkpoint_id = about.get("checkpoint_id")
    for storage in (about.get("storage_writer"), about.get("storage_reader")):
        if checkpoint_id is None:
            checkpoint_id = getattr(storage, "checkpoint_id", None)
    classes = {key: type(about[key]).__name__ for key in _NAMED_BY_CLASS if about.get(key) is not None}
    return {
        "checkpoint_id": None if checkpoint_id is None else str(checkpoint_id),
        "uuid": str(uuid.uuid4().int),
        **classes,
    }
