"""``holdfast completion``: what the Tab key does in a shell."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.app import Example, command
from holdfast.cli.console import reply
from holdfast.cli.options import Json


class Shell(str, Enum):
    """Shells that a script can be made for."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@command(
    "completion",
    examples=[
        Example("holdfast completion bash", "print the script"),
        Example("holdfast completion zsh --install", "put it where zsh looks for such scripts", runs=False),
    ],
)
def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell.", show_default=False)],
    install: Annotated[
        bool, typer.Option("--install", help="Write it to the folder of the shell, and tell where that is.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Complete commands and options of holdfast with the Tab key.

    The script knows all commands and options of this version, so that the shell need not start holdfast for them. No
    file of settings is changed: bash and fish look into the folder by themselves; for zsh a line is shown to be added.
    """
    from holdfast.cli.completion_scripts import script_for

    script = script_for(shell.value)
    if not install:
        reply({"shell": shell.value, "script": script}, script.rstrip("\n"), as_json=as_json)
        return
    path = _path_for(shell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    hint = (
        ""
        if shell is not Shell.zsh
        else f"\nAdd this to ~/.zshrc: fpath+=({path.parent}); autoload -Uz compinit; compinit"
    )
    reply({"shell": shell.value, "path": str(path)}, f"wrote {path}; it works in new shells{hint}", as_json=as_json)


def _path_for(shell: Shell) -> Path:
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return {
        Shell.bash: data / "bash-completion/completions/holdfast",
        Shell.zsh: Path.home() / ".zfunc/_holdfast",
        Shell.fish: config / "fish/completions/holdfast.fish",
    }[shell]
