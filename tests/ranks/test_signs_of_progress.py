"""What shows from outside that a process gets on."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from holdfast._ranks.signs_of_progress import SignsOfProgress

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a process moves")
MB = 1 << 20


def test_reading_files_counts(tmp_path: Path):
    (tmp_path / "large").write_bytes(bytes(4 * MB))
    signs = SignsOfProgress()
    assert signs.look() == 0
    (tmp_path / "large").read_bytes()
    assert 4 * MB <= signs.look() < 6 * MB
    assert signs.look() < 6 * MB


def send(size: int, signs: SignsOfProgress | None = None) -> int:
    """Send bytes over TCP, look in between, and close the connection: what the last look found."""
    found = 0
    with socket.create_server(("localhost", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            if signs is not None:
                signs.look()
            for _ in range(size // MB):
                sender.sendall(bytes(MB // 16) * 1)
                for _ in range(15):
                    receiver.recv(MB // 16, socket.MSG_WAITALL)
                    sender.sendall(bytes(MB // 16))
                receiver.recv(MB // 16, socket.MSG_WAITALL)
            if signs is not None:
                found = signs.look()
    return found


def test_bytes_over_a_network_count_on_both_ends():
    assert 7 * MB <= send(4 * MB, SignsOfProgress()) <= 9 * MB


def test_connections_that_are_closed_take_nothing_back():
    signs = SignsOfProgress()
    before = send(4 * MB, signs)
    assert signs.look() >= before
    assert send(4 * MB, signs) >= before + 7 * MB


def test_a_process_that_only_computes_shows_no_sign():
    signs = SignsOfProgress()
    signs.look()
    sum(range(10**6))
    assert signs.look() == 0


@pytest.mark.parametrize("state", ["D", "S"])
def test_what_the_machine_writes_back_counts_for_a_process_that_waits_for_a_disk(state, tmp_path: Path):
    task = tmp_path / "self/task/7"
    task.mkdir(parents=True)
    (task / "stat").write_text(f"7 (a (name) of D) {state} 1 7 7 0")
    (tmp_path / "vmstat").write_text("nr_dirty 5\nnr_written 1000000\n")
    signs = SignsOfProgress(tmp_path)
    assert signs.look() == 0
    (tmp_path / "vmstat").write_text("nr_dirty 5\nnr_written 1001024\n")
    assert signs.look() == (4 * MB if state == "D" else 0)


def test_where_the_system_says_nothing_there_are_no_signs(tmp_path: Path):
    signs = SignsOfProgress(tmp_path)
    assert [signs.look(), signs.look()] == [0, 0]
    assert os.listdir(tmp_path) == []
