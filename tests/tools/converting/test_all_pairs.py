"""From every format to every format: the same keys, values and bits, read by the libraries that own the formats."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast._tools.converting import outgoing
from tests.exact import assert_same
from tests.formats.regions import random_tensor
from tests.properties import examples
from tests.tools.converting.formats import SOURCES, TARGETS, read, tensors_in, values_in, write

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint32,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]

# Hundreds of small files are made durable, which is not what is tested here.
FAST_DISK = "/dev/shm" if Path("/dev/shm").is_dir() else None

names = st.sampled_from(["weight", "bias", "exp_avg", "layers.0.wq", "été", "a b"])
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple) | st.just((7, 9))
tensors = st.builds(random_tensor, st.sampled_from(DTYPES), shapes, st.integers(0, 99))
values = st.one_of(
    st.integers(-5, 5),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.booleans(),
    st.none(),
    st.just((0.9, 0.999)),
    st.just([1, 2.5, "x"]),
)
states = st.fixed_dictionaries(
    {"model": st.dictionaries(names, tensors, min_size=1, max_size=4), "first": tensors},
    optional={
        "step": values,
        "optim": st.fixed_dictionaries(
            {"state": st.dictionaries(st.sampled_from("pq"), st.dictionaries(names, tensors, min_size=1), min_size=1)},
            optional={"rate": values, "history": st.lists(tensors, min_size=1, max_size=3)},
        ),
    },
)


def in_small_pieces(most: int) -> ExitStack:
    """Tensors go through in pieces of a few elements."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(outgoing, "PIECE_BYTES", most))
    stack.enter_context(mock.patch.object(outgoing, "_SMALL_PIECE", 1))
    return stack


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=examples(6), suppress_health_check=[HealthCheck.too_slow])
@given(state=states, piece=st.sampled_from([1, 24, 100, 1 << 20]), cut=st.sampled_from([16, 64, 1 << 20]))
def test_every_element_and_value_arrives(source: str, target: str, state: dict[str, Any], piece: int, cut: int) -> None:
    with tempfile.TemporaryDirectory(dir=FAST_DISK) as folder:
        path = write(source, state, Path(folder), most=cut)
        place = Path(folder) / {"safetensors": "new.safetensors", "torch": "new.pt"}.get(target, "new")
        to = target.partition(" ")[0]
        only_tensors = to == "safetensors" and bool(values_in(state))
        with in_small_pieces(piece):
            shards = {"max_file_size": piece} if target == "safetensors folder" else {}
            report = holdfast.convert(path, place, to=to, only_tensors=only_tensors, **shards)
        found, found_values = read(target, place)
        expected = tensors_in(state)
        assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))
        if "safetensors" not in (source, to):
            assert_same(dict(sorted(found_values.items())), dict(sorted(values_in(state).items())))
        assert report.checked
        assert report.tensors == len(expected)
        assert report.elements == sum(tensor.numel() for tensor in expected.values())


@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.too_slow])
@given(state=states)
def test_the_digest_is_that_of_the_content_in_every_format(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(dir=FAST_DISK) as folder:
        digests = set()
        for source in SOURCES:
            path = write(source, state, Path(folder))
            for number, (to, name) in enumerate([("native", "n"), ("torch", "t"), ("safetensors", "s.safetensors")]):
                place = Path(folder) / f"{source}-{number}-{name}"
                digests.add(holdfast.convert(path, place, to=to, only_tensors=True, check=False).digest)
        assert len(digests) == 1
