"""What a program asks an S3 server for, and answers that go wrong on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


class Requests:
    """Every request of this process, while a test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from aiobotocore.client import AioBaseClient

        self.made: list[tuple[str, dict[str, Any]]] = []
        self.before: Callable[[str, dict[str, Any]], None] = lambda method, arguments: None
        """Called with each request before it is made; what it raises is the answer."""
        self.after: Callable[[str, dict[str, Any]], None] = lambda method, arguments: None
        """Called with each request once the server has done it; what it raises comes in place of the answer."""
        real = AioBaseClient._make_api_call

        async def make(client: Any, method: str, arguments: dict[str, Any]) -> Any:
            self.made.append((method, arguments))
            self.before(method, arguments)
            answer = await real(client, method, arguments)
            self.after(method, arguments)
            return answer

        monkeypatch.setattr(AioBaseClient, "_make_api_call", make)

    def count(self, method: str) -> int:
        return sum(made == method for made, _ in self.made)

    def ranges(self, ending: str = "") -> list[tuple[int, int]]:
        """The first and last byte of everything that was read of objects with such names."""
        found = []
        for method, arguments in self.made:
            if method == "GetObject" and arguments["Key"].endswith(ending):
                first, _, last = arguments["Range"].removeprefix("bytes=").partition("-")
                found.append((int(first), int(last)))
        return found


def refusal(code: str) -> Exception:
    """An answer that says no."""
    from botocore.exceptions import ClientError

    return ClientError({"Error": {"Code": code, "Message": "no"}}, "an operation")
