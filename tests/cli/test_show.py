"""``holdfast show``: trees, slices, values, sums, statistics, and layers that are alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import holdfast


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    layers = {str(n): {"w": torch.full((3, 2), float(n)), "b": torch.arange(4)} for n in range(12)}
    layers["12"] = {"w": torch.zeros(5)}
    shared = torch.ones(2)
    state = {"model": {"layers": layers, "one": shared, "again": shared}, "a.b": torch.arange(20.0), "step": 7}
    path = tmp_path_factory.mktemp("show") / "c"
    holdfast.save(state, path)
    return path


def test_the_tree_has_sums_shapes_and_layers_put_together(cli, place):
    ran = cli("show", place)

    lines = [line.split() for line in ran.out.splitlines()]
    assert ran.status == 0
    assert lines[0] == [str(place), "(native):", "27", "tensors,", "1", "value,", "780", "B"]
    assert ["0…11", "(12", "x", "the", "same)", "12", "x", "2", "tensors", "12", "x", "56", "B"] in lines
    assert ["w", "float32", "[3,", "2]", "24", "B", "rank", "0"] in lines
    assert ["w", "float32", "[5]", "20", "B", "rank", "0"] in lines
    assert ["again", "float32", "[2]", "8", "B", "the", "same", "as", "model.one"] in lines
    assert ["step", "7"] in lines
    assert len(lines) == 13


def test_all_shows_every_layer_and_depth_few(cli, place):
    everything = cli("show", place, "--all").out
    assert everything.count("float32 [3, 2]") == 12
    top = cli("show", place, "--depth", "1").out.splitlines()
    assert [line.split()[0] for line in top[1:]] == ["model", "a", "step"]
    assert "26 tensors" in top[1]


def test_patterns_choose_and_what_matches_nothing_is_an_error(cli, place):
    ran = cli("show", place, "--key", "model.layers.1*.b", "--all")
    assert ran.out.count("int64 [4]") == 3
    nothing = cli("show", place, "--key", "nothing.*")
    assert nothing.status == 2
    assert "nothing.*" in nothing.err


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("a.b[3:6]", [3, 4, 5]),
        ("a.b[-1]", 19),
        ("a.b[::-5]", [19, 14, 9, 4]),
        ("model.layers.2.w[0:2, 1]", [2, 2]),
        ("model.layers.0.b", [0, 1, 2, 3]),
    ],
)
def test_parts_of_tensors_are_read(cli, place, part, expected):
    ran = cli("show", place, part, "--json")

    assert ran.status == 0, ran.err
    assert ran.json["elements"] == expected
    assert ran.json["chunks"][0]["rank"] == 0
    shown = cli("show", place, part).out.split("\n", 1)[1]
    assert np.array2string(
        np.array(expected, float if part[0] == "a" else None), separator=", "
    ) in shown or expected == [2, 2]


def test_only_the_edges_of_a_long_tensor_are_shown(cli, tmp_path):
    holdfast.save({"w": torch.arange(90_000).reshape(300, 300)}, tmp_path / "c")

    assert cli("show", tmp_path / "c", "w").out.splitlines()[1].startswith("[[0, 1, 2, ..., 297, 298, 299], [300, ")
    assert cli("show", tmp_path / "c", "w", "--json").json["elements"] is None
    assert len(cli("show", tmp_path / "c", "w", "--all").out) > 300_000
    assert "[[0, 1, 2, ..., 297" in cli("show", tmp_path / "c", "--values").out


def test_values_and_wrong_parts(cli, place):
    assert cli("show", place, "step").out == "step: 7\n"
    assert cli("show", place, "step", "--json").json == {"key": "step", "value": 7}
    for part, message in [
        ("step[0]", "is a value, not a tensor"),
        ("a.b[x]", "there is no such part"),
        ("a.b[50]", "out of range"),
        ("model.layers", "is not one entry but"),
        ("zzz", "there is no 'zzz'"),
    ]:
        ran = cli("show", place, part)
        assert (ran.status, message in ran.err) == (2, True), (part, ran.err)


def test_statistics_and_json(cli, place):
    ran = cli("show", place, "--statistics", "--key", "a.b")
    assert "20 elements, 0 to 19, mean 9.5" in ran.out
    answer = cli("show", place, "--statistics", "--json").json
    assert answer["tensors"]["a.b"]["statistics"]["maximum"] == 19
    assert answer["tensors"]["model.again"]["same_as"] == "model.one"
    assert answer["values"] == {"step": 7}
    assert len(answer["tensors"]) == 28


def test_thousands_of_tensors_are_shown_in_few_lines(cli, tmp_path):
    state = {f"layers.{n}.w{m}": torch.zeros(0) for n in range(1000) for m in range(5)}
    holdfast.save({"model": state}, tmp_path / "c")

    lines = cli("show", tmp_path / "c").out.splitlines()

    assert len(lines) == 9
    assert "0…999  (1,000 x the same)" in lines[3]


def test_without_its_columns_a_checkpoint_is_still_shown(cli, prepared):
    ran = cli("show", "damaged")
    assert ran.status == 0
    assert "float32 [16, 8]" in ran.out
    assert "where it is stored cannot be read" in ran.out


def test_json_has_elements_and_chunks_as_the_text_does(cli, place):
    answer = cli("show", place, "--key", "a.b", "--values", "--json").json
    assert answer["tensors"]["a.b"]["elements"] == list(range(20))
    [chunk] = answer["tensors"]["a.b"]["chunks"]
    assert (chunk["offsets"], chunk["sizes"], chunk["bytes"], chunk["rank"]) == ([0], [20], 80, 0)
    assert "elements" not in cli("show", place, "--key", "a.b", "--json").json["tensors"]["a.b"]


def test_include_is_another_name_of_key_and_exclude_leaves_out(cli, place):
    chosen = cli("show", place, "--include", "model.*", "--exclude", "model.layers", "--json").json
    assert list(chosen["tensors"]) == ["model.one", "model.again"]
    assert chosen["values"] == {}
    nothing = cli("show", place, "--exclude", "*")
    assert (nothing.status, "are excluded by *" in nothing.err) == (2, True)


def test_statistics_of_one_tensor_keep_to_the_memory_that_was_given(cli, place):
    assert cli("show", place, "a.b", "--statistics", "--memory", "1MB", "--quiet").status == 0
    for arguments in (["a.b"], []):
        refused = cli("show", place, *arguments, "--statistics", "--memory", "1")
        assert (refused.status, "memory_budget" in refused.err) == (2, True), refused.err


def test_parts_that_a_tensor_does_not_have_are_reported_with_its_shape(cli, place):
    ran = cli("show", place, "a.b[5:, 9]")
    assert ran.status == 2
    assert "[20]" in ran.err
    assert "defect" not in ran.err


def test_keys_do_nothing_to_the_terminal(cli, tmp_path):
    holdfast.save({"model": {"\x1b[31mred\n": torch.ones(2)}}, tmp_path / "c")
    out = cli("show", tmp_path / "c").out
    assert "\\x1b[31mred\\n" in out
    assert "\x1b" not in out
