"""``holdfast bench`` and ``holdfast completion``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast._cli.described import described_commands


def completed(cli, *words):
    """What bash offers behind these words, of which the last is being typed."""
    script = cli("completion", "bash").out
    line = " ".join(f"'{word}'" for word in ("holdfast", *words))
    ask = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _holdfast; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split()


def test_bench_measures_and_leaves_nothing(tmp_path, cli):
    result = cli("bench", tmp_path, "--size", "8MiB", "--json").json

    assert result["bytes"] == 8 << 20
    for name in ("write", "read", "save", "load"):
        assert result[name] > 0
    assert result["save_ratio"] == result["save"] / result["write"]
    assert result["load_ratio"] == result["load"] / result["read"]
    assert 0 < result["fsync_ms"]["median"] <= result["fsync_ms"]["slowest"]
    assert os.listdir(tmp_path) == []


def test_bench_says_it_in_words(tmp_path, cli):
    lines = cli("bench", tmp_path, "--size", "8MiB").out.splitlines()

    assert lines[0].startswith(f"{tmp_path}: 8.4 MB each, ")
    assert "plain file" in lines[1]
    assert "of the plain file)" in lines[2]


def test_bench_cleans_up_after_a_failure(tmp_path, cli, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("no such luck")))

    ran = cli("bench", tmp_path, "--size", "8MiB", "--json")

    assert (ran.status, ran.json["error"]["message"]) == (2, "no such luck")
    assert os.listdir(tmp_path) == []


def test_bench_refuses_what_does_not_fit_and_what_is_no_folder(tmp_path, cli):
    ran = cli("bench", tmp_path, "--size", "9000TB", "--json")
    assert "give a smaller --size" in ran.json["error"]["message"]
    assert cli("bench", tmp_path / "nowhere", "--json").json["error"]["type"] == "NotAFolderError"


def test_bench_without_torch_measures_the_disk_alone(tmp_path):
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from holdfast._cli.main import run\n"
        f"sys.exit(run(['bench', {str(tmp_path)!r}, '--size', '8MiB']))"
    )

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert "not measured: torch is not installed" in ran.stdout


def test_bash_completes_commands_options_and_values(cli):
    names = {command.name for command in described_commands()}
    assert set(completed(cli, "")) == names | {"--help", "--version", "--debug"}
    assert completed(cli, "comp") == ["completion"]
    assert completed(cli, "ls", "--so") == ["--sort"]
    assert completed(cli, "ls", "--sort", "") == ["step", "age", "size", "name"]
    assert completed(cli, "completion", "fi") == ["fish"]
    assert completed(cli, "ls", "runs/") == []  # bash looks for files then


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_name_every_command_and_every_option(cli, shell):
    script = cli("completion", shell, "--json").json["script"]

    for command in described_commands():
        assert command.name in script
        for option in command.options:
            for name in option.names:
                assert (name if shell != "fish" else name.lstrip("-")) in script


@pytest.mark.parametrize(
    ("shell", "file"),
    [
        ("bash", ".local/share/bash-completion/completions/holdfast"),
        ("zsh", ".zfunc/_holdfast"),
        ("fish", ".config/fish/completions/holdfast.fish"),
    ],
)
def test_install_writes_one_file_and_changes_no_other(tmp_path, cli, monkeypatch, shell, file):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)

    ran = cli("completion", shell, "--install")

    assert ran.status == 0
    assert str(tmp_path / file) in ran.out
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / file]
    assert Path(tmp_path / file).read_text() == cli("completion", shell).out
