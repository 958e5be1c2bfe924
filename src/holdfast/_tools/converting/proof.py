"""The proof of a conversion: what was written is read back and compared with what was taken from the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from holdfast._base.json_parts import dumps
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.values import Encoder
from holdfast._formats.source import Source
from holdfast._load.opening import open_source
from holdfast._tools.converting.outgoing import Outgoing, OutTensor, leaves_of
from holdfast.errors import DamagedCheckpointError, HoldfastError


def prove(
    outgoing: Outgoing, place: str | Path | Source, keys: Mapping[str, str], advance: Callable[[int], None]
) -> list[str]:
    """Raise unless everything that went out is at ``place``: the same keys, shapes, types, values and elements.

    ``keys`` are those by which the result calls things otherwise. ``advance`` gets the bytes that are read.
    Returns the keys of values that cannot be compared, since their classes do not say when two are equal.
    """
    not_compared: list[str] = []
    with place if isinstance(place, Source) else open_source(place, allow_pickle=outgoing.allow_pickle) as result:
        found = leaves_of(result.tree, is_flat=outgoing.is_flat)
        expected = {keys.get(key, key): value for key, value in outgoing.leaves.items()}
        _compare_keys(result, expected, found)
        to_read: dict[str, OutTensor] = {}
        for key, value in expected.items():
            if isinstance(value, TensorRef):
                digest = outgoing.digests[value.key]
                if isinstance(found[key], TensorRef):
                    _compare_descriptions(result, key, value, found[key])
                    to_read.setdefault(found[key].key, _as_it_is(found[key]))
                elif _digest_of_value(found[key]) != digest:
                    raise _differs(result, key, "its elements", digest.hex(), _digest_of_value(found[key]).hex())
            elif (is_equal := _are_equal(value, found[key])) is None:
                not_compared.append(key)
            elif not is_equal:
                raise _differs(result, key, "its value", value, found[key])
        digests = _read(result, to_read, outgoing, advance)
        for key, value in expected.items():
            if isinstance(value, TensorRef) and isinstance(found[key], TensorRef):
                taken, read = outgoing.digests[value.key], digests[found[key].key]
                if taken != read:
                    raise _differs(result, key, "its elements", taken.hex(), read.hex())
    return not_compared


def content_digest(outgoing: Outgoing) -> str:
    """One digest of all keys, types, shapes and elements, whatever the format."""
    hasher = xxhash.xxh3_128()
    for key, tensor in sorted(outgoing.names.items()):
        shape = ",".join(map(str, tensor.shape))
        hasher.update(f"{key}\0{tensor.dtype}\0{shape}\0".encode("utf-8", "surrogatepass"))
        hasher.update(outgoing.digests[tensor.key])
    return hasher.hexdigest()


def _read(
    result: Source, tensors: Mapping[str, OutTensor], outgoing: Outgoing, advance: Callable[[int], None]
) -> Mapping[str, bytes]:
    """The digests of what was written."""
    reading = Outgoing(
        source=result,
        tree=None,
        tensors=tensors,
        leaves={key: TensorRef(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()},
        memory_budget=outgoing.memory_budget,
        advance=advance,
    )
    for _ in reading.stream(tensors):
        pass
    reading.note_empty()
    return reading.digests


def _as_it_is(ref: TensorRef) -> OutTensor:
    return OutTensor(ref.key, ref.key, ref.shape, ref.dtype, ref.dtype)


def _compare_keys(result: Source, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    missing, more = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing or more:
        first = min(missing or more)
        raise _differs(result, first, "it", "there" if missing else "not there", "not there" if missing else "there")


def _compare_descriptions(result: Source, key: str, expected: TensorRef, found: TensorRef) -> None:
    if expected.shape != found.shape:
        raise _differs(result, key, "its shape", list(expected.shape), list(found.shape))
    if expected.dtype != found.dtype:
        raise _differs(result, key, "its element type", expected.dtype.name, found.dtype.name)


def _digest_of_value(value: Any) -> bytes:
    """Of an array that the result holds as a value."""
    if not isinstance(value, np.ndarray):
        from holdfast._formats.native.torch_elements import as_array

        value = as_array(value)
    return xxhash.xxh3_128(np.ascontiguousarray(value).tobytes()).digest()


def _are_equal(one: Any, other: Any) -> bool | None:
    """Whether two values are the same; None if nobody knows."""
    try:
        return _encoded(one) == _encoded(other)
    except HoldfastError:  # it is of a type that only a pickle can hold
        pass
    if type(one) is not type(other):
        return False
    if getattr(type(one), "__eq__", None) is getattr(object, "__eq__", None):
        return None
    try:
        return bool(one == other)
    except Exception:  # whatever the class of the value raises
        return None


def _encoded(value: Any) -> str:
    return dumps(Encoder(_no_tensors).encode(value))


def _no_tensors(path: Any, tensor: Any) -> str:
    from holdfast._formats.native.torch_elements import as_array

    array = tensor if isinstance(tensor, np.ndarray) else as_array(tensor.to_dense())
    return f"{tensor.dtype} {tuple(array.shape)} {xxhash.xxh3_128(array.tobytes()).hexdigest()}"


def _differs(result: Source, key: str, what: str, expected: Any, found: Any) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"what was written is not what was read: {what} of '{key}' should be {expected!s:.200} and is {found!s:.200}. "
        "Nothing was put in place. Check the disk and the memory of this machine, and convert again.",
        file=result.location,
        key=key,
        expected=expected,
        found=found,
    )
