"""Callbacks that get every event. What they raise stays with them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

from holdfast._watching.event import Event

logger = logging.getLogger(__name__)

Callback = Callable[[Event], object]

_changing = threading.Lock()
_subscriptions: tuple[Subscription, ...] = ()
"""Replaced and never changed, so that whoever publishes an event need not lock."""


class Subscription:
    """A callback that gets events until this is cancelled, or its ``with`` block is left."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self._has_failed = False
        self._busy_in: set[int] = set()

    def cancel(self) -> None:
        """No further calls. One that is under way in another thread goes on."""
        global _subscriptions
        with _changing:
            _subscriptions = tuple(other for other in _subscriptions if other is not self)

    def publish(self, event: Event) -> None:
        """Call the callback. A save is worth more than a word about it, so errors end here, in the log."""
        thread = threading.get_ident()
        if thread in self._busy_in:
            return  # the callback itself saves or loads; calling it again might never end
        self._busy_in.add(thread)
        try:
            self.callback(event)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            if not self._has_failed:
                self._has_failed = True
                logger.exception(
                    "a subscriber failed with the event %s of %s: %r. Its further failures are not logged.",
                    event.name,
                    event.path,
                    self.callback,
                )
        finally:
            self._busy_in.discard(thread)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def subscribe(callback: Callback) -> Subscription:
    """Have a function called with every event of this process: when a phase of a save or load ends, and the whole.

    It is called in the thread where things happen, so the save goes on when it returns. What it raises is logged once
    and breaks nothing. It is not called for saves and loads that it makes itself.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = holdfast.save({"w": torch.ones(4)}, path)
        >>> with holdfast.subscribe(lambda event: print(event.name)):
        ...     loaded = holdfast.load({"w": torch.zeros(4)}, path)
        load.plan
        load.read
        load.apply
        load
    """
    if not callable(callback):
        raise TypeError(f"a subscriber is a function that takes an event, not {callback!r}")
    global _subscriptions
    subscription = Subscription(callback)
    with _changing:
        _subscriptions = (*_subscriptions, subscription)
    return subscription


def subscriptions() -> tuple[Subscription, ...]:
    """Those of now."""
    return _subscriptions
