"""What to save and how: the options that ``save``, ``async_save`` and the manager share, spelled once, and checked."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, get_args

from holdfast._base.arguments import Size, check_choice, checked_budget, checked_size
from holdfast._base.patterns import Choice, Pattern, Patterns, Selection
from holdfast._formats.native.torch_elements import floating_dtype_from_user
from holdfast._settings import OnFinding


class SaveOptions(TypedDict, total=False):
    """Arguments of ``save`` and ``async_save``, and what ``CheckpointManager(save_options=...)`` takes."""

    metadata: Mapping[str, Any] | None
    """Anything that JSON can hold, to be found in the checkpoint by people and programs."""
    include: Patterns | None
    """Which keys to save; all by default. Patterns such as ``"model.*"``, regular expressions, functions."""
    exclude: Patterns | None
    """Which of these not to save."""
    cast: Mapping[Pattern, Any] | None
    """Patterns and the dtype to store their floating point tensors as: ``{"model.*": torch.bfloat16}``."""
    replica_mismatch: OnFinding
    """What to do if ranks hold different values of what is stored once. ``"ignore"`` does not even compare them."""
    allow_pickle: bool
    """Store values that the format has no place for as pickles. Loading them needs the same."""
    max_file_size: Size | None
    """The most bytes of data in one file, such as ``"5GB"``. Larger tensors are cut."""
    memory_budget: Size | None
    """How much may be allocated beyond the state, such as ``"256MB"``."""


_DEFAULTS: SaveOptions = {
    "metadata": None,
    "include": None,
    "exclude": None,
    "cast": None,
    "replica_mismatch": "error",
    "allow_pickle": False,
    "max_file_size": None,
    "memory_budget": None,
}

_F = TypeVar("_F", bound=Callable[..., Any])


def shows_save_options(function: _F) -> _F:
    """Have ``help`` and editors show each option of a function that takes ``**options: Unpack[SaveOptions]``."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    types = SaveOptions.__annotations__
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name].__forward_arg__)
        for name, default in _DEFAULTS.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    return function


def refuse_unknown_options(where: str, options: Mapping[str, Any]) -> None:
    """Raise as Python does for arguments that there are not.

    >>> refuse_unknown_options("holdfast.save()", {"exlude": "model.*"})
    Traceback (most recent call last):
    TypeError: holdfast.save() got an unexpected 'exlude'; it takes: metadata, include, exclude, cast, ...
    """
    unknown = [name for name in options if name not in _DEFAULTS]
    if unknown:
        raise TypeError(f"{where} got an unexpected {unknown[0]!r}; it takes: {', '.join(_DEFAULTS)}")


@dataclass(frozen=True)
class CheckedOptions:
    """The options of one save, checked, as answers to the questions that come up on the way."""

    selection: Selection
    cast: Choice
    """The dtype to store a key's floating point tensor as."""
    metadata: Mapping[str, Any]
    overwrite: bool
    replica_mismatch: OnFinding
    allow_pickle: bool
    max_file_size: int | None
    memory_budget: int | None
    is_everything: bool
    """Whether no key is left out."""

    @classmethod
    def of(cls, options: SaveOptions | None = None, *, overwrite: bool = False) -> CheckedOptions:
        """What a caller gave, and the defaults for the rest."""
        given: SaveOptions = {**_DEFAULTS, **(options or {})}
        include, exclude = given["include"], given["exclude"]
        check_choice("replica_mismatch", given["replica_mismatch"], get_args(OnFinding))
        return cls(
            selection=Selection(include, exclude),
            is_everything=include is None and exclude is None,
            cast=_checked_cast(given["cast"]),
            metadata=checked_metadata(given["metadata"]),
            overwrite=overwrite,
            replica_mismatch=given["replica_mismatch"],
            allow_pickle=given["allow_pickle"],
            max_file_size=checked_size("max_file_size", given["max_file_size"]),
            memory_budget=checked_budget(given["memory_budget"]),
        )

    def without_patterns(self) -> CheckedOptions:
        """For a state that is captured already. Patterns may be functions, which cannot be sent to a process."""
        return replace(self, selection=Selection((), ()), cast=Choice({}))


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A user's notes as they will be read. Raises for what JSON cannot hold, or would change.

    >>> checked_metadata({"betas": (0.9, 0.99)})
    {'betas': [0.9, 0.99]}
    """
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict, not {metadata!r}")
    try:
        _refuse_keys_that_change(metadata)
        noted: dict[str, Any] = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata must be what JSON can hold: {error}. Put other values into the state.") from error
    return noted


def _refuse_keys_that_change(metadata: Any) -> None:
    """JSON would turn other keys into str, and two of them could become the same."""
    if isinstance(metadata, Mapping):
        for key, value in metadata.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a str")
            _refuse_keys_that_change(value)
    elif isinstance(metadata, (list, tuple)):
        for value in metadata:
            _refuse_keys_that_change(value)


def _checked_cast(cast: Mapping[Pattern, Any] | None) -> Choice:
    if cast is not None and not isinstance(cast, Mapping):
        raise TypeError(f"cast takes patterns with the dtype for each, such as {{'model.*': 'bfloat16'}}, not {cast!r}")
    return Choice({pattern: floating_dtype_from_user(wish) for pattern, wish in (cast or {}).items()})
