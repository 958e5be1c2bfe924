"""Every knob in one place, with an environment variable and a context manager for each.

Explicit arguments win over ``override``, which wins over the environment, which wins over the defaults.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

OnFinding = Literal["error", "warn", "ignore"]
"""What to do about something that may be wrong. All arguments, knobs and environment variables use these words."""

PageCache = Literal["auto", "use", "avoid"]
"""How large files are written to disks."""

_PREFIX = "HOLDFAST_"
_A_NUMBER = "a number of seconds that is not negative, such as 600 or inf"


@dataclass(frozen=True)
class Settings:
    """The knobs. The environment variable of a field is ``HOLDFAST_`` and its name in capitals."""

    allow_pickle: bool = False
    """Unpickle stored values that need arbitrary code. Only for checkpoints whose authors you trust."""

    replica_mismatch: OnFinding = "warn"
    """What ``holdfast.dcp`` does when ranks hold different values under one key, of which only one can be stored.
    ``ignore`` does not compare them."""

    dtype_change: OnFinding = "warn"
    """What ``holdfast.dcp`` does when a tensor is loaded into another dtype. ``warn`` allows safe casts, ``ignore``
    allows all."""

    verify: bool = True
    """Check the CRC of everything that is read as a whole. Parts of chunks of DCP's files, and of tensors in files of
    ``torch.save``, have none of their own."""

    keep_staging_memory: bool = True
    """Keep the memory of the last background save's copy for the next one: fresh memory doubles the time it takes."""

    drain_seconds: float = 600.0
    """How long the end of the program waits for background saves. Then it gives up, says which, and fails."""

    timeout: float = 0.0
    """For how many seconds ranks wait for one that makes no progress, before they give up and name it. 0: as long as
    the process group waits, which is 30 minutes unless ``init_process_group`` was given another ``timeout``."""

    machine: str = ""
    """A name for the machine that this rank is on, the same for all of its ranks and for no others. By default the
    system says which machine it is, and the launcher how many ranks each has (``LOCAL_WORLD_SIZE``)."""

    page_cache: PageCache = "auto"
    """Whether large files are written to disks through the page cache and stay in it (``use``), or past it (``avoid``).
    ``auto`` tries to go past it and through a little of it, and goes on with what was faster."""

    def __post_init__(self) -> None:
        for knob in fields(self):
            check(knob.name, getattr(self, knob.name))


def check(name: str, value: Any) -> None:
    """Raise if the knob ``name`` does not take ``value``: a misspelt ``"error"`` must not pass for ``"ignore"``."""
    default = getattr(Settings, name)
    if isinstance(default, float):
        # Neither a switch, which Python takes for a number, nor "not a number", which is below nothing.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise ValueError(f"{name}={value!r} is not understood; use {_A_NUMBER}")
        return
    if default == "":
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r} is not understood; use a str")
        return
    accepted = (True, False) if isinstance(default, bool) else _choices(name)
    if value not in accepted:
        raise ValueError(f"{name}={value!r} is not understood; use one of {list(accepted)}")


def _choices(name: str) -> tuple[str, ...]:
    return get_args(PageCache if name == "page_cache" else OnFinding)


def _from_environment() -> Settings:
    changes: dict[str, Any] = {}
    for knob in fields(Settings):
        text = os.environ.get(_PREFIX + knob.name.upper())
        if text is not None:
            changes[knob.name] = _parse(knob.name, text, getattr(Settings, knob.name))
    return Settings(**changes)


def _parse(name: str, text: str, default: Any) -> Any:
    lowered = text.strip().lower()
    if isinstance(default, float):
        return _parse_number(name, text)
    if default == "":
        return text.strip()
    accepted: dict[str, Any] = {choice: choice for choice in _choices(name)}
    if isinstance(default, bool):
        accepted = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
    if lowered not in accepted:
        raise ValueError(f"{_PREFIX}{name.upper()}={text!r} is not understood; use one of {sorted(accepted)}")
    return accepted[lowered]


def _parse_number(name: str, text: str) -> float:
    try:
        number = float(text)
        check(name, number)
    except ValueError:
        raise ValueError(f"{_PREFIX}{name.upper()}={text!r} is not understood; use {_A_NUMBER}") from None
    return number


_overrides: ContextVar[dict[str, Any] | None] = ContextVar("holdfast_settings", default=None)


def current() -> Settings:
    """The settings that hold here and now."""
    return replace(_from_environment(), **(_overrides.get() or {}))


@contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Change settings inside a ``with`` block of this thread.

    >>> with override(allow_pickle=True) as settings:
    ...     settings.allow_pickle
    True
    """
    token = _overrides.set({**(_overrides.get() or {}), **changes})
    try:
        yield current()
    finally:
        _overrides.reset(token)
