"""Open the server's page in Chromium, take screenshots, and check its accessibility.

Import this only if playwright and Chromium are installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURES = Path(__file__).parents[2] / "out" / "page"
"""Folder for screenshots. They are for people; no test reads them."""

TIMEOUT_MS = 60_000
"""Timeout in milliseconds. It is high because the machine may be busy."""

DESKTOP: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}

NAME = "e => e.ariaLabel || e.labels?.[0]?.textContent || e.textContent || ''"
"""JavaScript function that returns the accessible name of an element."""


@contextmanager
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def open_page(browser: Browser, url: str, *, allowed: str = "\0", **context: Any) -> Iterator[Page]:
    """Open the page. Fail if an error that does not contain `allowed` is logged to the console."""
    errors: list[str] = []
    with browser.new_context(**(DESKTOP | context)) as opened:
        page = opened.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        yield page
    assert not [line for line in errors if allowed not in line]


def send_message(page: Page, text: str, max_tokens: int | None = None) -> None:
    if max_tokens is not None:
        page.click("#settings-open")
        page.fill("#most", str(max_tokens))
        page.click("#settings-close")
    page.fill("#text", text)
    page.press("#text", "Enter")


def wait_for_answer(page: Page) -> None:
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#status")).to_contain_text("Done")


def click_action(page: Page, role: str, name: str, index: int = -1) -> None:
    page.locator(f"article.{role}").nth(index).get_by_role("button", name=name).click()


def take_screenshot(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")


def check_accessible(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
