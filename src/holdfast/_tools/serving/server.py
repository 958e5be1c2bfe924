"""``holdfast._tools.serving.serve``: a small web server for the checkpoints of a run, for the people at this machine.

It only ever reads. Browsers are made to keep other sites out: answers go to requests for this machine only (a site
whose name was pointed at this machine is refused), pages of other sites can link to the list and ask for nothing else,
and no page may be put into a frame or run scripts of others.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from holdfast._stores.roots import Root
from holdfast._tools.serving.answers import Answers, Response, error_page
from holdfast._tools.serving.run_facts import RunWatch
from holdfast._version import __version__

logger = logging.getLogger(__name__)

_IDLE = 15.0
"""Seconds after which a connection is closed on which nothing comes: browsers open some in advance."""
_ANYWHERE = ("", "0.0.0.0", "::")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def serve(
    root: str | os.PathLike[str] | Root, *, host: str = "127.0.0.1", port: int = 0, allow_pickle: bool = False
) -> RunServer:
    """Show the checkpoints in a folder, or a single one, at ``url``, until the ``with`` block is left.

    Port 0 takes one that is free. Whoever can reach ``host`` sees everything: there is no password.

    Example:
        >>> import json, tempfile, torch, urllib.request
        >>> import holdfast
        >>> folder = tempfile.mkdtemp()
        >>> with holdfast.CheckpointManager(folder, background=False, save_at_end=False) as manager:
        ...     saved = manager.save(500, {"w": torch.ones(4)})
        >>> with holdfast.serve(folder) as server:
        ...     answer = json.load(urllib.request.urlopen(server.url + "api/run.json"))
        >>> [checkpoint["name"] for checkpoint in answer["checkpoints"]]
        ['step-00000500']
    """
    return RunServer(root, host=host, port=port, allow_pickle=allow_pickle)


class RunServer:
    """A server that runs until it is closed. It answers in threads of its own."""

    def __init__(
        self, root: str | os.PathLike[str] | Root, *, host: str = "127.0.0.1", port: int = 0, allow_pickle: bool = False
    ) -> None:
        self._answers = Answers(RunWatch(root), allow_pickle=allow_pickle)
        try:
            self._server = _Server(host, port, self._answers)
        except BaseException:
            self._answers.close()
            raise
        self.location = self._answers.watch.watched.location
        """What is shown."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="holdfast-serve", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """At which it listens."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Of the list of checkpoints."""
        host = self._server.host
        name = "127.0.0.1" if host in _ANYWHERE else f"[{host}]" if ":" in host else host
        return f"http://{name}:{self.port}/"

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it is closed by another thread, or so long."""
        self._thread.join(seconds)

    def close(self) -> None:
        """Answer nothing more, and end all threads."""
        self._server.shutdown()
        self._thread.join()
        self._answers.close()
        self._server.close_all()

    def __enter__(self) -> RunServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunServer({self.location!r}, url={self.url!r})"


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # they are waited for when it is closed
    allow_reuse_port = False
    request_queue_size = (
        128  # a browser opens six connections at once, and those that find no room try again after a second
    )

    def __init__(self, host: str, port: int, answers: Answers) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.host, self.answers = host, answers
        self._open: set[Any] = set()
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without the search for a name of this machine, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind(self.server_address)
        except OSError as error:
            place = f"{self.host}:{self.server_address[1]}"
            hint = "; port 0 takes one that is free" if error.errno == errno.EADDRINUSE else ""
            raise OSError(error.errno, f"cannot listen at {place}: {error.strerror}{hint}") from error
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.host, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def close_all(self) -> None:
        """Hang up on those who have not asked yet, and wait for the threads of all."""
        with self._lock:
            for request in self._open:
                try:
                    request.shutdown(socket.SHUT_RD)
                except OSError:
                    pass  # it was closed by the other side
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is none."""
        logger.debug("a request of %s was not answered", client_address, exc_info=True)  # noqa: LOG014


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _IDLE
    default_request_version = "HTTP/1.0"  # so that what is not a request gets a whole answer too

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def version_string(self) -> str:
        return f"holdfast/{__version__}"

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Requests that cannot be understood, and methods other than GET and HEAD."""
        status = HTTPStatus(code)
        if status == HTTPStatus.NOT_IMPLEMENTED:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        self.close_connection = True
        self._send(error_page(status, message or status.phrase))

    def _answer(self) -> None:
        if not is_for_this_machine(self.headers.get("Host"), self.server.host):
            text = (
                "This server answers only requests for this machine. Use the address that holdfast serve has printed, "
                "or start it with --host and the name that is used."
            )
            self._send(error_page(HTTPStatus.MISDIRECTED_REQUEST, text))
            return
        if not is_of_this_site(self.headers.get("Sec-Fetch-Site")) and not self._is_a_visit_of_the_list():
            text = "This was asked for by a page of another site. The list of checkpoints is where to begin."
            self._send(error_page(HTTPStatus.FORBIDDEN, text))
            return
        try:
            answer = self.server.answers.to(self.path)
        except Exception as error:
            logger.exception("%s could not be answered", self.path)
            answer = error_page(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
        self._send(answer)

    def _is_a_visit_of_the_list(self) -> bool:
        """Whether somebody follows a link to the list, which costs nothing to show."""
        is_visit = self.headers.get("Sec-Fetch-Mode") == "navigate" and self.headers.get("Sec-Fetch-Dest") == "document"
        return is_visit and self.path == "/"

    def _send(self, answer: Response) -> None:
        headers = getattr(self, "headers", {})  # none if the first line was not a request
        tag = None if answer.tag is None else f'"{answer.tag}"'
        is_known = tag is not None and tag in headers.get("If-None-Match", "")
        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else answer.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", answer.policy)
        self.send_header("Cache-Control", "no-cache")
        if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if tag is not None:
            self.send_header("ETag", tag)
        if not is_known:
            self.send_header("Content-Type", answer.type)
            self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if not is_known and self.command != "HEAD":
            self.wfile.write(answer.content)


def is_of_this_site(header: str | None) -> bool:
    """Whether a request, by its ``Sec-Fetch-Site``, is one of our own pages, of a person, or of no browser.

    >>> is_of_this_site("same-origin"), is_of_this_site("none"), is_of_this_site(None), is_of_this_site("cross-site")
    (True, True, True, False)
    """
    return header in (None, "none", "same-origin")


def is_for_this_machine(header: str | None, host: str) -> bool:
    """Whether the ``Host`` of a request is one that no other site can have: an address, or a name of this machine.

    >>> is_for_this_machine("localhost:8000", "127.0.0.1"), is_for_this_machine("evil.example:8000", "127.0.0.1")
    (True, False)
    """
    try:
        name = (urlsplit(f"//{header}").hostname or "") if header else ""
    except ValueError:
        return False
    if name == "localhost" or name == host.lower():
        return bool(name)
    if host in _ANYWHERE and name in (socket.gethostname().lower(), socket.getfqdn().lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
