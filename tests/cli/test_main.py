"""The frame of the command: exit statuses, errors, pipes, Ctrl-C, and what is imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import typer

from holdfast._cli import main
from holdfast._cli.app import COMMANDS, app, command
from holdfast._cli.console import reply
from holdfast._cli.options import Json, pairs, size_in_bytes
from holdfast.errors import DamagedCheckpointError

HOLDFAST = [sys.executable, "-m", "holdfast"]


@pytest.fixture
def a_command():
    """Declares a command for one test; what it does is the function that is given."""
    declared = []

    def declare(function):
        main.import_commands()
        command("a-command")(function)
        declared.append(function)

    yield declare
    app.registered_commands[:] = [one for one in app.registered_commands if one.callback not in declared]
    COMMANDS.pop("a-command", None)


def start(*arguments, **options):
    return subprocess.Popen(
        [*HOLDFAST, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_a_command_that_returns_nothing_is_fine(cli, a_command):
    a_command(lambda: reply({"a": 1}, "text", as_json=False))

    ran = cli("a-command")

    assert (ran.status, ran.out, ran.err) == (0, "text\n", "")


def test_the_number_that_a_command_returns_is_its_exit_status(cli, a_command):
    a_command(lambda: 1)

    assert cli("a-command").status == 1


def test_an_error_is_a_message_and_status_2(cli, a_command):
    def fail(as_json: Json = False) -> None:
        raise DamagedCheckpointError("the file [bold]x[/bold] is damaged", file="x", key="w", expected=1, found=b"2")

    a_command(fail)

    ran = cli("a-command")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == "Error: the file [bold]x[/bold] is damaged\n"
    ran = cli("a-command", "--json")
    assert (ran.status, ran.err) == (2, "")
    assert ran.json["error"] == {
        "type": "DamagedCheckpointError",
        "message": "the file [bold]x[/bold] is damaged",
        "file": "x",
        "key": "w",
        "expected": 1,
        "found": "b'2'",
    }


def test_an_error_that_nobody_expected_says_that_it_is_a_defect(cli, a_command):
    def fail() -> None:
        raise ZeroDivisionError("division by zero")

    a_command(fail)

    ran = cli("a-command")
    assert ran.status == 2
    assert "ZeroDivisionError: division by zero" in ran.err
    assert "Traceback" not in ran.err
    with pytest.raises(ZeroDivisionError):  # and with it Python's traceback
        cli("a-command", "--debug")


@pytest.mark.parametrize("arguments", [["no-such-command"], ["ls", "--no-such-option"], ["ls", "--sort", "colour"]])
def test_wrong_usage_is_status_2(cli, arguments):
    ran = cli(*arguments)
    assert (ran.status, ran.out) == (2, "")
    assert "Usage: holdfast" in ran.err
    ran = cli(*arguments, "--json")
    assert (ran.status, ran.err) == (2, "")
    assert ran.json["error"]["type"] == "UsageError"


def test_what_stands_behind_two_dashes_is_no_option(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    ran = cli("ls", "--", "--json")

    assert (ran.status, ran.out) == (2, "")
    assert f"{tmp_path}/--json" in ran.err


def test_ctrl_c_in_a_command_is_status_130(cli, a_command):
    def interrupted() -> None:
        raise KeyboardInterrupt

    a_command(interrupted)

    assert cli("a-command").status == 130


def test_numbers_that_json_lacks_become_texts(cli, a_command):
    a_command(lambda: reply({"loss": float("nan"), "most": float("inf"), "text": "\udce9ü"}, "", as_json=True))

    ran = cli("a-command")

    assert ran.json == {"loss": "nan", "most": "inf", "text": "\udce9ü"}


def test_sizes_are_read_as_people_write_them():
    assert size_in_bytes("64KiB") == 65536
    assert size_in_bytes("1.5 gb") == 1_500_000_000
    for wrong in ("", "-1", "5 parsec", "MB", "0", "1e3"):
        with pytest.raises(typer.BadParameter):
            size_in_bytes(wrong)


def test_pairs_are_split_at_the_last_sign():
    assert pairs(["a=b=float16"], option="--cast") == {"a=b": "float16"}
    assert pairs(None, option="--cast") == {}
    with pytest.raises(typer.BadParameter, match="OLD=NEW"):
        pairs(["nothing"], option="--cast")


def test_ls_and_help_do_not_import_torch(prepared):
    lines = [["--help"], ["ls", "runs/a"], ["ls", "dcp", "model.pt", "hf-model"], ["du", "runs/a/step-00000200"]]
    program = (
        "import sys; from holdfast._cli.main import run\n"
        f"statuses = [run(line) for line in {lines}]\n"
        "torch = [name for name in sys.modules if name == 'torch' or name.startswith('torch.')]\n"
        "sys.exit(f'{statuses} {torch}')"
    )

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ran.stderr.strip() == "[0, 0, 0, 0] []"


def test_a_pipe_gets_plain_lines_and_json_alone(prepared):
    with start("ls", "runs/a") as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert "step-00000200  committed" in out
    assert all(line == line.rstrip() for line in out.splitlines())
    with start("ls", "nowhere", "--json") as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (2, "")
    assert json.loads(out)["error"]["type"] == "CheckpointNotFoundError"


def test_a_reader_that_has_seen_enough_ends_the_command_in_silence(prepared):
    with start("ls", *["model.safetensors"] * 60, pipesize=4096) as process:  # more lines than the pipe holds
        assert process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()

    assert process.wait() == 128 + signal.SIGPIPE
    assert err == ""


def test_ctrl_c_ends_a_real_process_with_130(tmp_path):
    reading, writing = os.pipe()
    program = (
        "import os, sys, time\n"
        "from holdfast._cli.app import command\n"
        "from holdfast._cli import main\n"
        "@command('wait')\n"
        "def wait() -> None:\n"
        f"    os.write({writing}, b'waiting')\n"
        "    time.sleep(60)\n"
        "sys.argv[1:] = ['wait']\n"
        "main.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[writing]
    )
    with process:
        assert os.read(reading, 7) == b"waiting"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    os.close(reading)
    os.close(writing)

    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


def test_a_terminal_gets_colours_unless_no_color_is_set(prepared):
    (prepared / "runs/a/step-00000100/set-aside.json").write_text("looks odd")
    for environment, has_colours in (({}, True), ({"NO_COLOR": "1"}, False)):
        master, slave = os.openpty()
        variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **environment}
        if not environment:
            variables.pop("NO_COLOR", None)
        with subprocess.Popen([*HOLDFAST, "ls", "runs/a"], stdout=slave, stderr=slave, env=variables) as process:
            os.close(slave)
            seen = b""
            while part := _read(master):
                seen += part
        os.close(master)
        assert process.returncode == 0
        assert b"step-00000200" in seen
        assert (b"\x1b[33mset aside: looks odd" in seen) == has_colours


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed
        return b""
