"""Writes ``docs/cli.md`` and ``docs/holdfast.1`` from the help of the commands: ``make docs``.

A test compares the files with the help, so that they cannot tell something else.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast._cli.app import STATUSES
from holdfast._cli.described import Described, described_commands
from holdfast._cli.main import import_commands

_HEAD = """# The `holdfast` command

Made from the help of the commands by `make docs`; change it there.

`holdfast COMMAND --help` shows the same for one command. Every command takes checkpoints of all formats that the
library reads: Holdfast's own, `torch.distributed.checkpoint`, safetensors files, Hugging Face folders, files of
`torch.save`. No process group, no GPU and no model class is needed; for Holdfast's own format and safetensors not even
torch.

- `--json` makes the answer one JSON object on the standard output. Errors too: `{"error": {"type", "message"}}`.
- Progress, questions and messages go to the standard error. There are no colours in pipes, or if `NO_COLOR` is set.
- `--debug`, anywhere, shows where in the program an error comes from.
- Sizes are written like `256MB`, `1.5GiB` or `4096`.
"""


def markdown(commands: Sequence[Described]) -> str:
    """The page of the documentation."""
    return "\n".join([_HEAD, *_statuses(), *_contents(commands), *(line for one in commands for line in _section(one))])


def manual(commands: Sequence[Described]) -> str:
    """The manual page, for ``man``."""
    lines = ['.TH HOLDFAST 1 "" "Holdfast" "User Commands"', ".SH NAME"]
    lines += ["holdfast \\- look inside, check, compare and convert checkpoints of PyTorch", ".SH SYNOPSIS"]
    lines += [f".B holdfast {command.name}\n[OPTIONS]\n.br" for command in commands]
    lines.append(".SH COMMANDS")
    for command in commands:
        lines += [f".SS {_roff(command.usage)}", _roff(command.title), ".PP", _roff(_unwrapped(command.text))]
        for option in command.options:
            names = ", ".join(option.names) + (f" {option.metavar}" if option.metavar else "")
            lines += [".TP", f".B {_roff(names)}", _roff(option.help)]
        for example in command.examples:
            lines += [".TP", f".B {_roff(example.line)}", _roff(example.says)]
    lines.append(".SH EXIT STATUS")
    for status, meaning in STATUSES.items():
        lines += [".TP", f".B {status}", _roff(meaning)]
    return "\n".join(lines) + "\n"


def _statuses() -> Iterator[str]:
    yield "| Exit status | Meaning |"
    yield "|---|---|"
    for status, meaning in STATUSES.items():
        yield f"| {status} | {meaning} |"
    yield ""


def _contents(commands: Sequence[Described]) -> Iterator[str]:
    yield "| Command | What it does |"
    yield "|---|---|"
    for command in commands:
        yield f"| [`{command.name}`](#holdfast-{command.name}) | {command.title} |"
    yield ""


def _section(command: Described) -> Iterator[str]:
    yield f"## holdfast {command.name}\n"
    yield f"{command.title}\n"
    yield f"```\n{command.usage}\n```\n"
    if command.text:
        yield f"{_filled(command.text)}\n"
    rows = [(argument.metavar, argument.help or ", ".join(argument.choices)) for argument in command.arguments]
    for option in command.options:
        names = ", ".join(option.names) + (f" {option.metavar}" if option.metavar else "")
        default = f" Default: {option.default}." if option.default else ""
        rows.append((names, f"{option.help}{default}"))
    if rows:
        yield "| Argument or option | Meaning |"
        yield "|---|---|"
        for name, meaning in rows:
            yield f"| `{_cell(name)}` | {_cell(meaning)} |"
        yield ""
    if command.examples:
        width = max(len(example.line) for example in command.examples)
        lines = "\n".join(f"{example.line:{width}}  # {example.says}" for example in command.examples)
        yield f"```sh\n{lines}\n```\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _unwrapped(text: str) -> str:
    """Paragraphs as one line each; those that begin with a control character keep their lines."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        textwrap.dedent(part[1:]).strip() if part.startswith("\b") else " ".join(part.split()) for part in paragraphs
    )


def _filled(text: str) -> str:
    parts = _unwrapped(text).split("\n\n")
    return "\n\n".join(part if "\n" in part else textwrap.fill(part, 120, break_on_hyphens=False) for part in parts)


def _roff(text: str) -> str:
    """A text in which nothing is taken for an instruction."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in escaped.splitlines())


def write(docs: Path) -> list[Path]:
    """Write both documents into a folder. Returns their paths."""
    import_commands()
    commands = described_commands()
    page, man = docs / "cli.md", docs / "holdfast.1"
    page.write_text(markdown(commands))
    man.write_text(manual(commands))
    return [page, man]


if __name__ == "__main__":
    for path in write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")):
        print(path)
