"""``holdfast serve``: the checkpoints of a run in the browser."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import note, print_json
from holdfast._cli.options import AllowPickle, Json


@command(
    "serve",
    examples=[
        Example("holdfast serve runs/a", "shows the checkpoints of a run, until Ctrl-C", runs=False),
        Example("holdfast serve runs/a --port 8000 --open", "at a port of choice, in the browser", runs=False),
    ],
)
def serve(
    root: Annotated[
        str,
        typer.Argument(
            metavar="ROOT", help="The folder of a run, a folder with checkpoints, or a checkpoint.", show_default=False
        ),
    ],
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0 takes one that is free.")] = 0,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen at. Whoever can reach it sees everything.")
    ] = "127.0.0.1",
    opens: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Show the checkpoints of a run in the browser, and what is being saved.

    The page lists the checkpoints, draws metrics, sizes and times over the steps, and shows saves while they run. A
    click opens the report of a checkpoint; two that are ticked are compared. Nothing is ever changed.

    The server can be reached from this machine only, unless --host says otherwise; it asks for no password. From
    another machine: ssh -L 8000:localhost:PORT, then http://localhost:8000.
    """
    import sys
    import webbrowser

    from holdfast._tools.serving import serve as start

    with start(root, host=host, port=port, allow_pickle=allow_pickle) as server:
        if as_json:
            print_json({"url": server.url, "root": server.location})
        else:
            print(f"{server.location} is shown at {server.url}")
            note("Press Ctrl-C to stop.")
        sys.stdout.flush()  # whoever reads it through a pipe waits for the address
        if host not in ("127.0.0.1", "localhost", "::1"):
            note("Whoever can reach this address sees all of it: there is no password.")
        if opens:
            webbrowser.open(server.url)
        server.wait()
