"""Errors after which a request may still be carried out, because nobody answered it."""

from __future__ import annotations

import errno

from holdfast.errors import HoldfastError

_NO_ANSWER = {
    errno.ETIMEDOUT,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENOTCONN,
}


def is_unanswered(error: BaseException) -> bool:
    """Whether a request that ended in this error may have an effect later, so that a look at the place proves nothing.

    That is so for lost connections, for Ctrl-C while a thread of fsspec goes on with the request, and for errors of
    which nobody knows what they mean: those of packages behind fsspec that are no errors of the system.

    >>> is_unanswered(OSError(28, "No space left on device")), is_unanswered(TimeoutError())
    (False, True)
    """
    if isinstance(error, HoldfastError):
        return False
    if not isinstance(error, OSError) or isinstance(error, (TimeoutError, ConnectionError)):
        return True
    return error.errno is None or error.errno in _NO_ANSWER
