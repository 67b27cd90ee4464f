"""A real browser without a screen, for pages that lie in files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
NO_CHROMIUM = "needs chromium on PATH; .ci/run installs it through apt"

_ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_LIMIT_MS = 60_000
_FORCE_FONT = """
    const style = document.createElement("style");
    style.textContent = "* { FONT }";
    document.addEventListener("readystatechange", () => document.head.append(style), {once: true});
"""


@dataclass
class OpenPage:
    """A page, and what it did while it was open.

    Attributes:
        page: to look at.
        complaints: errors, and whatever was written to the console.
        requests: addresses that it asked for, without its own and those of data in it.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def evaluate(self, code: str) -> Any:
        return self.page.evaluate(code)


@contextmanager
def started_browser() -> Iterator[Browser]:
    """Starts one browser; it ends with the context."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_ARGUMENTS), timeout=_LIMIT_MS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser,
    path: Path,
    *,
    width: int = 1600,
    has_touch: bool = False,
    font: str = "",
    color_scheme: Literal["light", "dark"] = "light",
) -> Iterator[OpenPage]:
    """Opens a file, and waits until it is loaded.

    Args:
        browser: as `started_browser` gives it.
        path: of the page.
        width: of the window, in pixels.
        has_touch: whether it is touched rather than clicked.
        font: CSS declarations that hold for every text; empty for the page's own.
        color_scheme: what the reader prefers.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900}, has_touch=has_touch, color_scheme=color_scheme
    )
    context.set_default_timeout(_LIMIT_MS)
    page = context.new_page()
    if font:
        page.add_init_script(_FORCE_FONT.replace("FONT", font))
    found = OpenPage(page)
    page.on("console", lambda message: found.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.goto(path.as_uri())
    found.requests = [url for url in found.requests if url != path.as_uri() and not url.startswith(("data:", "blob:"))]
    try:
        yield found
    finally:
        context.close()
