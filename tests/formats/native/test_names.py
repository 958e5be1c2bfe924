"""Our files are recognized by their names alone, so nothing that is only similar may pass for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._formats.native.names import data_file, generation_of, index_file, is_generation, new_generation


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1))
def test_the_generation_of_every_name_that_is_made_is_known(number, rank, file):
    generation = f"{number:016x}"
    assert is_generation(generation)
    assert generation_of(data_file(generation, rank, file)) == generation
    assert generation_of(index_file(generation)) == generation


def test_no_generation_is_drawn_twice():
    drawn = {new_generation() for _ in range(10_000)}
    assert len(drawn) == 10_000
    assert all(map(is_generation, drawn))


@pytest.mark.parametrize(
    "name",
    [
        "holdfast.json",
        "data-00112233aabbccdd-0-0.safetensors.bak",
        "data-00112233aabbccdd-0-0.safetensors\n",
        "xdata-00112233aabbccdd-0-0.safetensors",
        "data-00112233AABBCCDD-0-0.safetensors",
        "data-00112233aabbccd-0-0.safetensors",
        "data-00112233aabbccdd0-0-0.safetensors",
        "data-00112233aabbccdd-0.safetensors",
        "data-00112233aabbccdd-0-0-0.safetensors",
        "data-00112233aabbccdd--1-0.safetensors",
        "data-00112233aabbccdd-\u0663-0.safetensors",
        "data-00112233aabbccdd-0-0xsafetensors",
        "index-00112233aabbccdd-0.safetensors",
        "../index-00112233aabbccdd.safetensors",
        "index-00112233aabbccdd.safetensors/x",
        "model.safetensors",
        "",
    ],
)
def test_similar_names_are_not_ours(name):
    assert generation_of(name) is None
