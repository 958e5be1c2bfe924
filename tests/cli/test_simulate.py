"""``holdfast simulate``."""

from __future__ import annotations


def test_simulate_says_it_in_words(cli):
    lines = cli("simulate", "--ranks", "64", "--tensors", "10", "--layout", "hsdp").out.splitlines()

    assert lines[0] == "64 ranks in groups of 8, 10 tensors (hsdp), 1.0 TB"
    assert [line.split()[0] for line in lines[1:]] == ["root", "rank", "memory", "files", "record", "estimated"]


def test_simulate_takes_sizes_and_speeds_as_people_write_them(cli):
    words = ("--ranks", "16", "--tensors", "10", "--bytes", "4GB", "--disk-speed", "500MB/s", "--network-speed", "1GB")
    result = cli("simulate", *words, "--ranks-per-machine", "4", "--json").json

    assert abs(result["bytes"] - 4e9) < 1e7
    assert result["machine"] == {"ranks": 4, "disk_speed": 500_000_000, "network_speed": 1_000_000_000}
    assert result["root"]["number"] == 0 != result["rank"]["number"]


def test_simulate_refuses_groups_that_do_not_divide_the_ranks(cli):
    ran = cli("simulate", "--ranks", "10", "--layout", "hsdp", "--group", "4", "--json")

    assert ran.status == 2
    assert "give a --group that divides them" in ran.json["error"]["message"]


def test_simulate_refuses_a_layout_and_a_speed_that_there_are_not(cli):
    assert cli("simulate", "--layout", "zero").status == 2
    assert cli("simulate", "--disk-speed", "fast").status == 2
