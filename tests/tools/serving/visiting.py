"""Plain HTTP, without a browser's manners."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from holdfast._tools.serving import RunServer


@dataclass(frozen=True)
class Visit:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def visit(server: RunServer, target: str, *, method: str = "GET", **headers: str) -> Visit:
    """One request, with the target exactly as it is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.putrequest(method, target, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return Visit(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()
