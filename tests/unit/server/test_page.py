"""Test the server's web page in a browser, with a tiny model.

Run with `make stress PART=page` if Chromium is installed (Debian's `chromium`). Screenshots are written to `out/page`.
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
from support.serving import TEMPLATE, run_server
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, AsyncLLM

if not os.environ.get("OFFLOAD_RT_STRESS"):
    pytest.skip("a browser, for minutes: make stress PART=page", allow_module_level=True)
if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
    pytest.skip("no Chromium on this machine: apt-get install chromium", allow_module_level=True)

from playwright.sync_api import Browser, expect
from support.browser import (
    TIMEOUT_MS,
    chromium,
    click_action,
    open_page,
    send_message,
    take_screenshot,
    wait_for_answer,
)

BOOK = Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt"
NIGHT = "It was a dark night, and the river was high. "


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model") / "tiny"
    folder: Path = tiny_checkpoint(where, "llama", num_hidden_layers=2, max_position_embeddings=131072)
    return folder


@contextmanager
def serving(model: Path, store: Path | None, port: int = 0) -> Iterator[str]:
    llm = LLM(model, policy="infinigen", verify="off", host_memory="512MiB")
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    named: dict[str, Any] = {} if store is None else {"documents": store / "server"}
    with run_server(AsyncLLM(llm, store=store), **named, port=port) as url:
        yield url


def test_stream_stop_reload_and_restart(browser: Browser, model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as url, open_page(browser, url) as page:
        expect(page.locator("#model")).to_have_text("tiny")
        send_message(page, NIGHT * 12, 8)
        wait_for_answer(page)
        expect(page.locator("article.assistant")).to_have_count(1)
        answer = page.locator("article.assistant .text").inner_text()
        expect(page.locator("#sources button").first).to_contain_text("%")
        assert page.locator("#matrix").get_attribute("aria-label") != "No steps yet"
        send_message(page, "On and on.", 4000)
        expect(page.locator("#status")).to_have_text("Answering…")
        page.keyboard.press("Escape")
        expect(page.locator("#status")).to_have_text("Stopped.")
        stopped = page.locator("article.assistant .text").nth(1).inner_text()
        expect(page.locator("#send")).to_be_enabled()
        page.reload()
        expect(page.locator("article")).to_have_count(4)
        assert page.locator("article.assistant .text").nth(0).inner_text() == answer
        # The page may not have read all that the server has sent.
        assert page.locator("article.assistant .text").nth(1).inner_text().startswith(stopped[: len(stopped) // 2])
        state, port = page.context.storage_state(), int(url.rsplit(":", 1)[1])
    with serving(model, tmp_path, port) as url, open_page(browser, url, storage_state=state) as page:
        expect(page.locator("article")).to_have_count(4)
        assert page.locator("article.assistant .text").nth(0).inner_text() == answer
        send_message(page, "And then?", 8)
        wait_for_answer(page)
        expect(page.locator("#status")).to_contain_text("prompt tokens reused")
        page.click("#fresh")
        expect(page.locator("article")).to_have_count(0)
        page.locator("#session-list .title").first.click()
        expect(page.locator("article")).to_have_count(6)


def test_a_document_of_200_kilobytes(browser: Browser, model: Path, tmp_path: Path) -> None:
    text = BOOK.read_text(encoding="utf-8")
    text = (text * (1 + 200_000 // len(text)))[:200_000]
    with serving(model, tmp_path) as url, open_page(browser, url) as page:
        page.set_input_files("#upload", {"name": "book.txt", "mimeType": "text/plain", "buffer": text.encode()})
        expect(page.locator("#files")).to_contain_text("book.txt (200,000 characters)")
        expect(page.locator("#tokens")).to_contain_text("of 131,072 tokens")
        send_message(page, "Who is Dick?", 4)
        expect(page.locator("#prefill-text")).to_contain_text("layer 1 of 2", timeout=5 * TIMEOUT_MS)
        take_screenshot(page, "reading")
        wait_for_answer(page)
        assert 800 < page.locator("#prompt-text span").count() <= 1024
        assert page.locator("#prompt-text").evaluate("e => e.textContent.length") > 200_000
        page.locator("#sources button").first.click()
        here = page.locator("#prompt-text .here").first
        expect(here).to_be_in_viewport()
        box = page.locator("#strip").bounding_box()
        assert box is not None
        page.locator("#strip").click(position={"x": 0.95 * box["width"], "y": 5})
        at = here.evaluate("e => [...e.parentElement.children].indexOf(e) / e.parentElement.children.length")
        assert abs(at - 0.95) < 0.02
        expect(here).to_be_in_viewport()
        take_screenshot(page, "document")
        page.reload()
        expect(page.locator("summary", has_text="book.txt (200,000 characters)")).to_have_count(1)


def test_a_message_that_is_too_long_can_be_shortened(browser: Browser, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "short", "llama", num_hidden_layers=2, max_position_embeddings=512)
    with serving(model, None) as url, open_page(browser, url) as page:
        expect(page.locator("#model")).to_have_text("short")
        whole = "".join(f"Line {i} of a long letter. " for i in range(200))
        send_message(page, whole, 8)
        expect(page.locator("#too-long")).to_be_visible()
        expect(page.locator("#status")).to_have_text("The message is too long and was not sent.")
        expect(page.locator("#too-long-text")).to_contain_text("512")
        assert page.input_value("#text") == whole and page.locator("article").count() == 0
        take_screenshot(page, "too_long")
        page.click("#cut-end")
        expect(page.locator("#status")).to_contain_text("Shortened to")
        kept = page.input_value("#text")
        assert 200 < len(kept) < len(whole) and whole.strip().endswith(kept)
        page.click("#uncut")
        assert page.input_value("#text") == whole.strip()
        expect(page.locator("#too-long")).to_be_visible()
        page.click("#cut-both")
        expect(page.locator("#status")).to_contain_text("Shortened to")
        assert "[…]" in page.input_value("#text") and page.input_value("#text").startswith("Line 0")
        page.press("#text", "Enter")
        wait_for_answer(page)
        expect(page.locator("article")).to_have_count(2)


def test_continue_regenerate_and_edit(browser: Browser, model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as url, open_page(browser, url) as page:
        send_message(page, NIGHT * 3, 6)
        wait_for_answer(page)
        answer = page.locator("article.assistant .text")
        expect(page.locator("article.assistant")).to_contain_text("Stopped at the maximum number of new tokens.")
        first = answer.inner_text()
        click_action(page, "assistant", "Continue the answer")
        wait_for_answer(page)
        expect(answer).to_have_count(1)
        assert answer.inner_text().startswith(first.rstrip()) and len(answer.inner_text()) > len(first)
        click_action(page, "assistant", "Regenerate the answer")
        wait_for_answer(page)
        expect(answer).to_have_count(1)
        send_message(page, "Second question.")
        wait_for_answer(page)
        click_action(page, "user", "Edit the message", 0)
        expect(page.locator("#editing")).to_be_visible()
        assert page.input_value("#text") == (NIGHT * 3).strip()
        page.click("#editing-cancel")
        expect(page.locator("article")).to_have_count(4)
        click_action(page, "user", "Edit the message", 0)
        page.fill("#text", "Another question.")
        page.press("#text", "Enter")
        wait_for_answer(page)
        expect(page.locator("article")).to_have_count(2)
        page.reload()
        expect(page.locator("article.user .text")).to_have_text(re.compile("Another question."))
        expect(page.locator("article")).to_have_count(2)


def test_without_a_store_the_browser_keeps_the_conversation(browser: Browser, model: Path) -> None:
    with serving(model, None) as url, open_page(browser, url) as page:
        send_message(page, "<img src=x onerror=alert(1)> **bold**", 8)
        wait_for_answer(page)
        page.reload()
        expect(page.locator("article")).to_have_count(2)
        expect(page.locator("article.user")).to_contain_text("<img src=x")
        assert page.locator("article.user strong").inner_text() == "bold" and page.locator("article img").count() == 0
        expect(page.locator("#stored")).to_be_hidden()
        expect(page.locator("#unstored")).to_be_visible()
