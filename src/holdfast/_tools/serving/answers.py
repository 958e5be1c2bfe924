"""What the server answers to each URL. Nothing in a URL becomes a path: it is looked up among what is there."""

from __future__ import annotations

import html
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib import resources
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote_to_bytes, urlsplit

from holdfast._tools.reporting.assets import BRAND, asset
from holdfast._tools.serving.run_facts import CheckpointFacts, RunFacts, RunWatch, quoted
from holdfast._watching.progress import OnProgress
from holdfast.errors import CheckpointNotFoundError, HoldfastError

# Reports of checkpoints, made when somebody asks for one and kept for the next who does.


Key: TypeAlias = tuple[str, ...]
"""By what a report is known: the names and identities of its checkpoints."""


class _Closed(Exception):
    """Nobody waits for the report any more."""


@dataclass
class Job:
    """A report that is being made, or is done."""

    future: Future[str] = field(default_factory=Future)
    done: int = 0
    total: int = 0

    def ready_within(self, seconds: float) -> bool:
        """Wait for it, but not longer. Whether it is done, or has failed."""
        wait([self.future], timeout=seconds)
        return self.future.done()


class Reports:
    """Makes one report at a time, since each takes what the disk gives, and keeps the last few.

    >>> with Reports() as reports:
    ...     job = reports.job(("step-1", "00ff"), lambda on_progress: "<p>a report</p>")
    ...     job.future.result()
    '<p>a report</p>'
    """

    def __init__(self, keep: int = 8) -> None:
        self._keep = keep
        self._jobs: OrderedDict[Key, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closing = False
        self._pool = ThreadPoolExecutor(1, "holdfast-report")

    def job(self, key: Key, make: Callable[[OnProgress], str]) -> Job:
        """The report of this key: begun now, if there is none yet."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = Job()
                job.future = self._pool.submit(self._make, job, make)
            self._jobs.move_to_end(key)
            self._drop_oldest()
            return job

    def known(self, key: Key) -> Job | None:
        """The report of this key, if it was begun."""
        with self._lock:
            return self._jobs.get(key)

    def forget(self, key: Key) -> None:
        """Make this report anew for the next who asks, such as one that failed."""
        with self._lock:
            self._jobs.pop(key, None)

    def close(self) -> None:
        """Give up what is being made, and wait for that."""
        self._is_closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make(self, job: Job, make: Callable[[OnProgress], str]) -> str:
        def on_progress(done: int, total: int) -> None:
            job.done, job.total = done, total
            if self._is_closing:
                raise _Closed

        on_progress(0, 0)
        return make(on_progress)

    def _drop_oldest(self) -> None:
        finished = [key for key, job in self._jobs.items() if job.future.done()]
        for key in finished[: max(0, len(self._jobs) - self._keep)]:
            del self._jobs[key]


_PATIENCE = 1.5
"""Seconds in which a report is waited for, before a page is shown that waits."""

_OWN_PAGES = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REPORT_PAGES = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""A report is one file with its scripts inside, and says more strictly itself which of them may run."""

_SHARED = ("base.css", "dom.js", "units.js", "memory.js", "theme.js")
"""What the pages of reports are made of too."""
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True)
class Response:
    """One response."""

    content: bytes
    type: str = "text/html; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    policy: str = _OWN_PAGES
    tag: str | None = None
    """An answer with the same tag is the same."""


class Answers:
    """The pages of one run."""

    def __init__(self, watch: RunWatch, *, allow_pickle: bool = False) -> None:
        self.watch = watch
        self.reports = Reports()
        self._allow_pickle = allow_pickle

    def to(self, target: str) -> Response:
        """The answer to the target of a GET."""
        parts = urlsplit(target)
        asked = dict(parse_qsl(parts.query, encoding="utf-8", errors="surrogateescape"))
        if parts.path == "/":
            return Response(_asset("run.html"))
        if parts.path == "/api/run.json":
            encoded = self.watch.encoded()
            return Response(encoded.content, "application/json", tag=encoded.tag)
        if parts.path == "/api/report.json":
            return self._progress(asked.get("of", ""), asked.get("compare"))
        if parts.path.startswith("/c/"):
            return self._report(os.fsdecode(unquote_to_bytes(parts.path[len("/c/") :])), asked.get("compare"))
        name = parts.path.removeprefix("/assets/")
        if name != parts.path and name in _asset_names():
            return Response(_asset(name), f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8")
        return _page(HTTPStatus.NOT_FOUND, "There is no such page", "The list of checkpoints is where to begin.")

    def close(self) -> None:
        """Give up what is being made."""
        self.reports.close()

    def _report(self, name: str, other: str | None) -> Response:
        facts = self.watch.look()
        chosen = [name] if other is None else [name, other]
        for one in chosen:
            refusal = self._refusal(facts, one)
            if refusal is not None:
                return refusal
        key = _key(facts, chosen)
        job = self.reports.job(key, lambda on_progress: self._made(chosen, on_progress))
        if not job.ready_within(_PATIENCE):
            return _waiting_page(chosen)
        error = job.future.exception()
        if error is None:
            return Response(_with_way_back(job.future.result()), policy=_REPORT_PAGES)
        self.reports.forget(key)  # only now: a page that waits has to hear of it once
        return self._failure(name, error)

    def _progress(self, name: str, other: str | None) -> Response:
        """How far a report is."""
        job = self.reports.known(_key(self.watch.look(), [name] if other is None else [name, other]))
        is_working = job is not None and not job.future.done()
        state: dict[str, Any] = {"is_working": is_working}
        if job is not None:
            state.update(done=job.done, total=job.total)
        return Response(json.dumps(state).encode(), "application/json")

    def _made(self, chosen: list[str], on_progress: OnProgress) -> str:
        from holdfast._tools.reporting.report import make_report

        place, *other = map(self.watch.watched.place, chosen)
        compare = other[0] if other else None
        return make_report(place, compare=compare, allow_pickle=self._allow_pickle, on_progress=on_progress).html

    def _refusal(self, facts: RunFacts, name: str) -> Response | None:
        """Why there is no report of a name; None if there can be one."""
        if facts.checkpoint(name) is not None:
            return None
        if any(save.name == name for save in facts.saves):
            text = f"{name} is not committed: it is being written, or was cut off. It can be looked at once it is."
            return _page(HTTPStatus.CONFLICT, "Not a checkpoint yet", text)
        if self.watch.was_listed(name):
            text = f"{name} was deleted or moved since the list was made."
            return _page(HTTPStatus.GONE, "This checkpoint is gone", text)
        return _page(HTTPStatus.NOT_FOUND, "There is no such checkpoint", f"Nothing here is called {name}.")

    def _failure(self, name: str, error: BaseException) -> Response:
        self.watch.forget_look()
        is_gone = isinstance(error, (CheckpointNotFoundError, FileNotFoundError))
        if is_gone and self.watch.look().checkpoint(name) is None:
            return _page(HTTPStatus.GONE, "This checkpoint is gone", f"{name} was deleted while it was read. {error}")
        if isinstance(error, HoldfastError):
            return _page(HTTPStatus.UNPROCESSABLE_ENTITY, "This checkpoint cannot be shown", str(error))
        if isinstance(error, (OSError, ImportError)):
            return _page(HTTPStatus.INTERNAL_SERVER_ERROR, "This checkpoint cannot be read", str(error))
        raise error


def error_page(status: HTTPStatus, text: str) -> Response:
    """A page about a request that is not answered."""
    return _page(status, status.phrase, text)


def _key(facts: RunFacts, chosen: list[str]) -> Key:
    found = [facts.checkpoint(name) or CheckpointFacts(name, "damaged", "native", "", None, 0) for name in chosen]
    return tuple(part for one in found for part in (one.name, one.identity))


def _page(status: HTTPStatus, title: str, text: str) -> Response:
    return Response(_filled("message.html", title=title, text=text), status=status)


def _waiting_page(chosen: list[str]) -> Response:
    text = " and ".join(chosen)
    content = _filled("waiting.html", text=text, of=quoted(chosen[0]), compare="".join(map(quoted, chosen[1:])))
    return Response(content, status=HTTPStatus.ACCEPTED)


def _with_way_back(report: str) -> bytes:
    """A report with a link to the list in place of its brand."""
    link = '<a class="brand" href="/">← All checkpoints</a>'
    return report.replace(BRAND, link, 1).encode("utf-8", "replace")


def _filled(name: str, **texts: str) -> bytes:
    # In one pass: what was put in is not searched for places.
    page = _PLACE.sub(lambda place: html.escape(texts[place.group(1)]), _asset(name).decode())
    return page.encode("utf-8", "replace")


@cache
def _asset_names() -> frozenset[str]:
    folder = resources.files("holdfast._tools.serving") / "page"
    own = (entry.name for entry in folder.iterdir() if entry.name.endswith((".css", ".js", ".svg")))
    return frozenset([*own, *_SHARED])


@cache
def _asset(name: str) -> bytes:
    if name in _SHARED:
        return asset(name).encode()
    return (resources.files("holdfast._tools.serving") / "page" / name).read_bytes()
