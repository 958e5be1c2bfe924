"""JSON out of files that anyone may have written: what is not as it should be is refused, and the file is named."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from holdfast.errors import DamagedCheckpointError


def parse_json_object(
    data: bytes | str, source: str, part: str | None = None, *, instead_of_nan: Any = None
) -> dict[str, Any]:
    """The JSON object in ``data``, which is the file ``source`` or a ``part`` of it.

    A name that is there twice is refused: which of the two counts would depend on who reads it. ``instead_of_nan`` is
    put where there is a NaN, which JSON has none of: whoever has taken something out can put one there.

    >>> parse_json_object(b'{"weight": 1}', "index.json")
    {'weight': 1}
    >>> try:
    ...     parse_json_object(b"[1]", "index.json")
    ... except DamagedCheckpointError as error:
    ...     print(error)
    index.json is not a JSON object, but a list. Copy the file again, or load another checkpoint.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    _refuse(source, part, f"is not clear: {name!r} is listed twice in it", name, key=name)
                seen.add(name)
        return found

    left_out = [] if instead_of_nan is None else [instead_of_nan]

    def constant(name: str) -> Any:
        if name == "NaN" and left_out:
            return left_out.pop()
        raise ValueError(f"there is no {name} in JSON")

    def finite(digits: str) -> float:
        number = float(digits)
        if math.isinf(number):  # and could not be written again
            raise ValueError(f"{digits[:40]} is too large for a number")
        return number

    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        content = json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_float=finite)
    except (ValueError, RecursionError) as error:
        _refuse(source, part, f"is not JSON ({error!s:.200})", type(error).__name__)
    if not isinstance(content, dict):
        kind = type(content).__name__
        _refuse(source, part, f"is not a JSON object, but a {kind}", kind)
    return content


def are_sizes(value: Any) -> bool:
    """Whether these are numbers that no sum of two takes beyond 63 bits, where arithmetic elsewhere would go wrong."""
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 62 for number in value)


def _refuse(source: str, part: str | None, what: str, found: str, key: str | None = None) -> NoReturn:
    subject = source if part is None else f"{source}: {part}"
    raise DamagedCheckpointError(
        f"{subject} {what}. Copy the file again, or load another checkpoint.",
        file=source,
        key=key,
        expected="a JSON object",
        found=found,
    )
