"""Test the server's page in a browser.

Covers streaming, stop, reload, restart, a long document, keyboard, screen reader, phone and dark mode. Run with
`make stress PART=page` if Chromium is installed (Debian's `chromium`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.serving import TEMPLATE, served
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, AsyncLLM

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if not os.environ.get("OFFLOAD_RT_STRESS"):
    pytest.skip("a browser, for minutes: make stress PART=page", allow_module_level=True)
if CHROMIUM is None:
    pytest.skip("no Chromium on this machine: apt-get install chromium", allow_module_level=True)

from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

BOOK = Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt"
NAME = "e => e.labels?.[0]?.textContent || e.ariaLabel || e.textContent || ''"
"""Accessible name of an element."""

PATIENCE = 240_000
"""Milliseconds. High, because the machine may be busy."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a two-layer model with room for 200 KB of text."""
    where = tmp_path_factory.mktemp("model") / "tiny"
    folder: Path = tiny_checkpoint(where, "llama", num_hidden_layers=2, max_position_embeddings=131072)
    return folder


@contextmanager
def serving(model: Path, store: Path | None, port: int = 0) -> Iterator[str]:
    llm = LLM(model, policy="infinigen", verify="off", host_memory="512MiB")
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    named: dict[str, Any] = {} if store is None else {"documents": store / "server"}
    with served(AsyncLLM(llm, store=store), **named, port=port) as url:
        yield url


@contextmanager
def page_of(browser: Browser, url: str, **context: Any) -> Iterator[Page]:
    """Open the page. Fail if it logs an error to the console."""
    said: list[str] = []
    with browser.new_context(**context) as opened:
        page = opened.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        expect(page.locator("#model")).to_have_text("tiny")
        yield page
    assert not said


def ask(page: Page, text: str, most: int = 8) -> None:
    page.locator("#settings").evaluate("e => { e.open = true }")
    page.fill("#most", str(most))
    page.fill("#text", text)
    page.press("#text", "Enter")


def done(page: Page) -> None:
    expect(page.locator("#status")).to_have_text(re.compile("^Done"))


def test_type_stream_stop_reload_and_come_back(browser: Browser, model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as url, page_of(browser, url) as page:
        ask(page, "It was a dark night, and the river was high. " * 12)
        done(page)
        expect(page.locator("article.assistant")).to_have_count(1)
        said = page.locator("article.assistant").inner_text()
        assert len(said) > len("tiny")
        expect(page.locator("#places button").first).to_contain_text("%")
        assert page.locator("#matrix").get_attribute("aria-label") != "No steps yet"
        ask(page, "On and on.", 4000)
        expect(page.locator("#status")).to_have_text("Answering…")
        page.keyboard.press("Escape")
        expect(page.locator("#status")).to_have_text("Stopped.")
        stopped = page.locator("article.assistant").nth(1).inner_text()
        expect(page.locator("#send")).to_be_enabled()
        page.reload()
        expect(page.locator("article")).to_have_count(4)
        assert page.locator("article.assistant").nth(0).inner_text() == said
        # The server has sent more than the page may have read.
        assert page.locator("article.assistant").nth(1).inner_text().startswith(stopped[: len(stopped) // 2])
        state, port = page.context.storage_state(), int(url.rsplit(":", 1)[1])
    with serving(model, tmp_path, port) as url, page_of(browser, url, storage_state=state) as page:
        expect(page.locator("article")).to_have_count(4)
        assert page.locator("article.assistant").nth(0).inner_text() == said
        ask(page, "And then?")
        done(page)
        expect(page.locator("#status")).to_contain_text("prompt tokens reused")
        page.click("#fresh")
        expect(page.locator("article")).to_have_count(0)
        page.locator("#session-list button").first.click()
        expect(page.locator("article")).to_have_count(6)
        page.locator("#session-list .away").first.click()
        expect(page.locator("#session-list li")).to_have_count(0)
        expect(page.locator("article")).to_have_count(0)


def test_a_document_of_200_kilobytes(browser: Browser, model: Path, tmp_path: Path) -> None:
    text = BOOK.read_text(encoding="utf-8")
    text = (text * (1 + 200_000 // len(text)))[:200_000]
    with serving(model, tmp_path) as url, page_of(browser, url) as page:
        page.set_input_files("#upload", {"name": "book.txt", "mimeType": "text/plain", "buffer": text.encode()})
        expect(page.locator("#file-name")).to_contain_text("book.txt")
        ask(page, "Who is Dick?", 4)
        expect(page.locator("#prefill-text")).to_contain_text("layer 1 of 2")
        done(page)
        assert 800 < page.locator("#prompt-text span").count() <= 1024
        assert page.locator("#prompt-text").evaluate("e => e.textContent.length") > 200_000
        page.locator("#places button").first.click()
        here = page.locator("#here")
        expect(here).to_be_in_viewport()
        assert len(here.inner_text()) > 50
        box = page.locator("#strip").bounding_box()
        assert box is not None
        page.locator("#strip").click(position={"x": 0.95 * box["width"], "y": 5})
        at = here.evaluate("e => [...e.parentElement.children].indexOf(e) / e.parentElement.children.length")
        assert abs(at - 0.95) < 0.02
        expect(here).to_be_in_viewport()
        page.reload()
        expect(page.locator("summary", has_text="book.txt (200,000 characters)")).to_have_count(1)


def test_without_a_store_the_browser_keeps_one(browser: Browser, model: Path) -> None:
    with serving(model, None) as url, page_of(browser, url) as page:
        ask(page, "<img src=x onerror=alert(1)> **bold**")
        done(page)
        page.reload()
        expect(page.locator("article")).to_have_count(2)
        expect(page.locator("article.user")).to_contain_text("<img src=x")
        assert page.locator("article.user strong").inner_text() == "bold" and page.locator("article img").count() == 0
        expect(page.locator("#sessions")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_the_keyboard_and_a_screen_reader(browser: Browser, model: Path, scheme: str) -> None:
    phone: Any = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
    with serving(model, None) as url, page_of(browser, url, **phone, color_scheme=scheme) as page:
        ask(page, "Hm?")
        done(page)
        assert page.evaluate_handle("document.documentElement").evaluate("e => e.scrollWidth") <= 360, (
            "it scrolls sideways"
        )
        dark = page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(20, 24, 29)"
        assert dark == (scheme == "dark")
        page.reload()
        names = []
        for _ in range(40):  # every control must be reachable with Tab and have a name
            page.keyboard.press("Tab")
            if page.locator(":focus").count() == 0:
                break  # after the last control
            names.append(
                page.locator(":focus").evaluate("e => e.labels?.[0]?.textContent || e.ariaLabel || e.textContent || ''")
            )
        for name in ("Skip to the message", "New conversation", "Message", "Add a text file", "Send", "Settings"):
            assert any(name in found for found in names), name
        assert all(name.strip() for name in names[:8])
        low = contrast(page, "body"), contrast(page, "#status"), contrast(page, "#send"), contrast(page, "dt")
        assert min(low) >= 4.5


def contrast(page: Page, selector: str) -> float:
    """Return the WCAG contrast ratio of an element's text and its background."""
    return float(
        page.locator(selector).first.evaluate(
            """e => {
            const part = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
            const light = (c) => { const [r, g, b] = c.match(/[0-9.]+/g).map((v) => part(v / 255));
              return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
            let behind = e;
            while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
            const [a, b] = [light(getComputedStyle(e).color), light(getComputedStyle(behind).backgroundColor)];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }"""
        )
    )
