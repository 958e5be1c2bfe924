"""A real browser for tests of pages: Debian's Chromium without a window, driven by Playwright.

A test takes the fixture `open_page`, which opens a page and watches it: errors on the console and in
scripts fail the test.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = Path(__file__).parents[1] / "build" / "screenshots"
LAPTOP = (1280, 800)
PHONE = (390, 844)

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class OpenedPage:
    """A page in the browser, with what it asked of the network and what went wrong in it."""

    def __init__(self, context: Any, url: str) -> None:
        self.context = context
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.goto(url)

    def screenshot(self, name: str, **options: Any) -> Path:
        """Keep what can be seen, as build/screenshots/<name>.png."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        self.page.screenshot(path=path, **options)
        return path


# One per file of tests and not one for all: Playwright leaves an event loop running in this thread, and tests of other
# files may want to start theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The browser. Tests are skipped where there is none and none can be installed."""
    program, reason = chromium()
    if program is None:
        pytest.skip(f"NO BROWSER, SO THIS PAGE IS NOT TESTED: {reason}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., OpenedPage]]:
    """`open_page(path or URL, size=PHONE, dark=True)` opens a page. What goes wrong in it fails the test at its end."""
    opened: list[OpenedPage] = []

    def open_page(where: str | os.PathLike[str], *, size: tuple[int, int] = LAPTOP, dark: bool = False) -> OpenedPage:
        url = where if isinstance(where, str) and "://" in where else Path(where).resolve().as_uri()
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            has_touch=size == PHONE,
            device_scale_factor=2 if size == PHONE else 1,
        )
        opened.append(OpenedPage(context, url))
        return opened[-1]

    yield open_page
    for page in opened:
        page.context.close()
    assert [error for page in opened for error in page.errors] == []


@cache
def chromium() -> tuple[str | None, str]:
    """The program, installed if that is possible, or None and why."""
    with open(Path(tempfile.gettempdir()) / f"holdfast-browser-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of these tests may be installing it, and is not done yet
        return _found_or_installed()


def _found_or_installed() -> tuple[str | None, str]:
    found = _installed()
    if found is not None:
        return found, ""
    wanted = "install Debian's package `chromium` (apt-get install chromium) to run these tests"
    if shutil.which("apt-get") is None:
        return None, f"there is no Chromium and no apt-get; {wanted}"
    if os.geteuid() != 0:
        return None, f"there is no Chromium, and only root can install it; {wanted}"
    install = ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]
    for command in (install, ["apt-get", "update"], install):
        done = _run(command)
        found = _installed()
        if found is not None:
            return found, ""
    return None, f"there is no Chromium and `{' '.join(install)}` failed ({done[-300:]}); {wanted}"


def _installed() -> str | None:
    return next((path for path in map(shutil.which, _NAMES) if path is not None), None)


def _run(command: list[str]) -> str:
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=240, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip()
