"""The report of a load: what it says to people, and how those of several ranks become one."""

from __future__ import annotations

import pickle

from holdfast._load.report import LoadReport

FULL = LoadReport(
    path="runs/a/step-100",
    format="native",
    identity="0123456789abcdef",
    read=[f"model.layers.{number}.weight" for number in range(7)],
    renamed={"net.w": "model.w"},
    cast={"model.w": ("float32", "bfloat16")},
    transformed=["model.qkv"],
    missing=["head.bias"],
    unexpected=["old.weight", "old.bias"],
    untouched=["optim"],
    not_requested=[f"data.{number}" for number in range(12)],
    notes=["optimizer: parameters were matched by position, since only one side knows their names"],
    bytes_read=12_345_678,
    elements=3_000_000,
    seconds=0.5,
    world_size=4,
)


def test_a_report_tells_all_that_happened():
    assert str(FULL) == (
        "loaded 7 keys from runs/a/step-100 (native) on 4 ranks\n"
        "  3,000,000 elements, 12,345,678 bytes read in 0.50 s, 25 MB/s\n"
        "  renamed: 1: net.w -> model.w\n"
        "  cast: 1: model.w (float32 -> bfloat16)\n"
        "  transformed: 1: model.qkv\n"
        "  missing, left as they were: 1: head.bias\n"
        "  unexpected, not loaded: 2: old.weight, old.bias\n"
        "  untouched: 1: optim\n"
        "  in the checkpoint, not asked for: 12: data.0, data.1, data.2, data.3, data.4, …\n"
        "  note: optimizer: parameters were matched by position, since only one side knows their names"
    )


def test_a_report_of_nothing_special_is_short():
    plain = LoadReport("a", "safetensors", "x", ["w"], bytes_read=10, elements=2)
    assert str(plain) == "loaded 1 key from a (safetensors)\n  2 elements, 10 bytes read in 0.00 s"


def test_no_rate_is_reported_of_a_load_that_read_nothing():
    assert "MB/s" in str(LoadReport("a", "native", "x", ["w"], bytes_read=10, seconds=2.0))
    assert "MB/s" not in str(LoadReport("a", "native", "x", ["step"], bytes_read=0, seconds=2.0))


def test_reports_travel_and_compare():
    assert pickle.loads(pickle.dumps(FULL)) == FULL


def test_reports_of_ranks_become_one_with_every_key_once_and_in_order():
    one = LoadReport(
        "a", "dcp", "x", ["w", "v"], {"o": "w"}, {"w": ("a", "b")}, missing=["m"], notes=["n"], world_size=2
    )
    two = LoadReport(
        "a", "dcp", "x", ["v", "u"], {"p": "u"}, {"w": ("c", "d")}, missing=["k"], notes=["n"], world_size=2
    )
    merged = LoadReport.merged([one, two], bytes_read=7, elements=8, seconds=9.0)
    assert merged == LoadReport(
        "a",
        "dcp",
        "x",
        ["w", "v", "u"],
        {"o": "w", "p": "u"},
        {"w": ("a", "b")},
        transformed=[],
        missing=["m", "k"],
        unexpected=[],
        untouched=[],
        not_requested=[],
        notes=["n"],
        bytes_read=7,
        elements=8,
        seconds=9.0,
        world_size=2,
    )
