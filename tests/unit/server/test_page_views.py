"""Test the views of the server's web page in a browser, with scripted answers.

Run with `make stress PART=page` if Chromium is installed (Debian's `chromium`). Screenshots are written to `out/page`.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import ScriptedEngine, run_asgi_app, run_server
from transformers import PreTrainedTokenizerBase
from uvicorn import Server

from offload_rt.errors import InputError
from offload_rt.server.app import make_app
from offload_rt.server.options import ServerOptions
from offload_rt.server.run import Loading
from offload_rt.utils.progress import report

if not os.environ.get("OFFLOAD_RT_STRESS"):
    pytest.skip("a browser, for minutes: make stress PART=page", allow_module_level=True)
if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
    pytest.skip("no Chromium on this machine: apt-get install chromium", allow_module_level=True)

from playwright.sync_api import Browser, Page, Route, expect
from support.browser import (
    DESKTOP,
    NAME,
    PHONE,
    check_accessible,
    chromium,
    click_action,
    open_page,
    send_message,
    take_screenshot,
    wait_for_answer,
)

MARKDOWN = """# The letter

It was *Ellis*. He wrote **four** letters.

<script>alert(1)</script>

| who | when |
|---|--:|
| Dick | 1460 |

1. First
   - inner
     - innermost
2. Second

> A quote.

```python
def answer(x: int) -> str:
    return "forty-two"  # why not
```

![a picture](http://example.org/x.png) [bad](javascript:alert(1))
"""

Engine = ScriptedEngine


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerBase) -> Engine:
    return ScriptedEngine(tokenizer, lambda prompt: "It was a dark night." if "night" in prompt else MARKDOWN)


@pytest.fixture
def url(engine: Engine, tmp_path: Path) -> Iterator[str]:
    with run_server(engine, documents=tmp_path / "server") as address:
        yield address


def test_markdown(browser: Browser, url: str) -> None:
    with open_page(browser, url, permissions=["clipboard-read", "clipboard-write"]) as page:
        send_message(page, "Who wrote?")
        wait_for_answer(page)
        text = page.locator("article.assistant .text")
        assert text.locator("table td").all_inner_texts() == ["Dick", "1460"]
        assert text.locator("ol > li > ul > li > ul > li").inner_text() == "innermost"
        assert text.locator("blockquote").inner_text().strip() == "A quote."
        assert text.locator("figcaption span").inner_text() == "Python"
        assert text.locator(".hljs-keyword").all_inner_texts()[:2] == ["def", "return"]
        expect(text).to_contain_text("<script>alert(1)</script>")
        assert text.locator("script, img, a[href^=javascript]").count() == 0
        text.get_by_role("button", name="Copy the code").click()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith("def answer") and copied.endswith("# why not")
        click_action(page, "assistant", "Copy the message")
        assert page.evaluate("navigator.clipboard.readText()").strip() == MARKDOWN.strip()


def test_a_sentence_shows_its_sources(browser: Browser, url: str) -> None:
    with open_page(browser, url) as page:
        send_message(page, "Who wrote? " * 40)
        wait_for_answer(page)
        page.locator("article.assistant .sentence", has_text="four").first.click()
        expect(page.locator("#sentence-text")).to_contain_text("He wrote four letters.")
        chosen = page.locator(".sentence.chosen")
        assert "".join(chosen.all_inner_texts()).strip() == "He wrote four letters."
        assert page.locator("#sources button").count() > 0
        page.locator("#sources button").first.click()
        expect(page.locator("#prompt-text .here").first).to_be_in_viewport()
        page.click("#after")
        expect(page.locator("#sentence-text")).not_to_contain_text("He wrote four letters.")
        take_screenshot(page, "sources")
        page.click("#whole")
        expect(page.locator(".sentence.chosen")).to_have_count(0)


def test_search_rename_export_and_undo(browser: Browser, url: str) -> None:
    with open_page(browser, url) as page:
        for question in ("Who wrote the letter?", "What of the night?"):
            page.click("#fresh")
            send_message(page, question)
            wait_for_answer(page)
        titles = page.locator("#session-list .title")
        expect(titles).to_have_count(2)
        page.fill("#search", "INNERMOST ellis")  # words of an answer
        expect(titles).to_have_count(1)
        expect(titles.first).to_contain_text("Who wrote the letter?")
        expect(titles.locator("small")).to_contain_text("Ellis")
        take_screenshot(page, "search")
        page.fill("#search", "no such words")
        expect(page.locator("#no-session")).to_have_text("No conversation contains these words.")
        page.fill("#search", "")
        expect(titles).to_have_count(2)
        page.get_by_role("button", name="Rename Who wrote the letter?").click()
        page.fill("#session-list input", "The letter")
        page.press("#session-list input", "Enter")
        expect(titles.filter(has_text="The letter")).to_have_count(1)
        titles.filter(has_text="The letter").click()
        expect(page.locator("article")).to_have_count(2)
        assert download(page, "#export-markdown")[:3] == ("The letter.md", "# The letter", "## You")
        name, *lines = download(page, "#export-json")
        assert name == "The letter.json" and json.loads("\n".join(lines))["messages"][0]["role"] == "user"
        name, *lines = download(page, "#export-all")
        assert {each["title"] for each in json.loads("\n".join(lines))} == {"The letter", "What of the night?"}
        page.get_by_role("button", name="Delete The letter").click()
        expect(titles).to_have_count(1)
        expect(page.locator("#toast")).to_contain_text("Deleted “The letter”.")
        page.click("#undo")
        expect(titles).to_have_count(2)
        expect(page.locator("article")).to_have_count(2)
        page.get_by_role("button", name="Delete The letter").click()
        page.reload()  # a deletion is final when the page is closed
        expect(titles).to_have_count(1)


def test_a_page_that_could_not_load_tries_again(browser: Browser, url: str) -> None:
    with open_page(browser, url, allowed="net::ERR_FAILED") as page:
        refused: list[Route] = []
        page.route("**/v1/models", lambda route: (refused.append(route), route.abort())[1], times=1)
        page.reload()
        expect(page.locator("#model")).to_have_text("scripted")
        assert refused


@pytest.mark.parametrize("status", [500, None], ids=["refused", "no connection"])
def test_a_failed_deletion_is_reported(browser: Browser, url: str, status: int | None) -> None:
    def fail(route: Route) -> None:
        if route.request.method != "DELETE":
            route.continue_()
        elif status is None:
            route.abort()
        else:
            route.fulfill(status=status, json={"error": {"message": "a file cannot be deleted"}})

    with open_page(browser, url, allowed="Failed to load resource") as page:
        send_message(page, "Who wrote?")
        wait_for_answer(page)
        page.route("**/v1/sessions/*", fail)
        page.get_by_role("button", name="Delete Who wrote?").click()
        expect(page.locator("#session-list .title")).to_have_count(0)
        reason = "because the server does not respond" if status is None else "a file cannot be deleted"
        expect(page.locator("#problem")).to_contain_text("The conversation was not deleted")
        expect(page.locator("#problem")).to_contain_text(reason)
        expect(page.locator("#session-list .title")).to_have_count(1)


def fail_during_action(page: Page, engine: Engine, server: Server, label: str, lost: bool) -> None:
    """Start the action `label` on the page. After one token, abort all connections if `lost`, else raise an error."""
    engine.pause, engine.fails_after = 2, 1
    engine.fails = None if lost else InputError("the disk is full")
    click_action(page, "assistant", label)
    if lost:
        expect(page.locator("#status")).to_have_text("Answering…")
        for connection in list(server.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)  # type: ignore[union-attr]
    expect(page.locator("#problem")).to_have_text("The server does not respond." if lost else "the disk is full")


@pytest.mark.parametrize("lost", [True, False], ids=["connection lost", "engine failed"])
def test_an_answer_stays_if_its_continuation_fails(
    browser: Browser, engine: Engine, tmp_path: Path, lost: bool
) -> None:
    prompts: list[str] = []
    engine.say = lambda prompt: prompts.append(prompt) or "It was a dark night."  # type: ignore[func-returns-value]
    options = ServerOptions(port=0, grace=5, documents=tmp_path / "server")
    with (
        run_asgi_app(make_app(engine, options), options) as (url, server),  # type: ignore[arg-type]
        open_page(browser, url, allowed="net::ERR_") as page,
    ):
        send_message(page, "What of the night?", 3)
        wait_for_answer(page)
        answer = page.locator("article.assistant .text")
        before = answer.inner_text()
        fail_during_action(page, engine, server, "Continue the answer", lost)
        expect(page.locator("#status")).to_have_text("The answer was not continued.")
        assert answer.inner_text() == before
        expect(page.locator("article.failed")).to_have_count(0)
        engine.fails, engine.pause = None, 0
        click_action(page, "assistant", "Continue the answer")
        wait_for_answer(page)
        assert prompts[-1].endswith(before)
        assert answer.inner_text().startswith(before) and answer.inner_text() != before


@pytest.mark.parametrize("lost", [True, False], ids=["connection lost", "engine failed"])
def test_an_answer_stays_if_it_cannot_be_replaced(browser: Browser, engine: Engine, tmp_path: Path, lost: bool) -> None:
    options = ServerOptions(port=0, grace=5, documents=tmp_path / "server")
    with (
        run_asgi_app(make_app(engine, options), options) as (url, server),  # type: ignore[arg-type]
        open_page(browser, url, allowed="net::ERR_") as page,
    ):
        engine.say = lambda prompt: "It was a dark night."
        send_message(page, "What of the night?")
        wait_for_answer(page)
        answer = page.locator("article.assistant .text")
        expect(answer).to_have_text("It was a dark night.")
        engine.say = lambda prompt: "Another answer, which is never complete."
        fail_during_action(page, engine, server, "Regenerate the answer", lost)
        expect(page.locator("#status")).to_have_text("The earlier answer was kept.")
        expect(answer).to_have_text("It was a dark night.")
        expect(page.locator("article.failed")).to_have_count(0)
        engine.fails, engine.pause = None, 0
        click_action(page, "assistant", "Regenerate the answer")
        wait_for_answer(page)
        expect(answer).to_have_text("Another answer, which is never complete.")


def download(page: Page, button: str) -> tuple[str, ...]:
    """Click `button`, and return the name and the non-empty lines of the downloaded file."""
    with page.expect_download() as saving:
        page.click(button)
    text = Path(saving.value.path()).read_text(encoding="utf-8")
    return (saving.value.suggested_filename, *filter(None, text.splitlines()))


def test_files_of_any_suffix_are_added_and_dropped(browser: Browser, url: str, engine: Engine) -> None:
    prompts: list[str] = []
    engine.say = lambda prompt: prompts.append(prompt) or "Yes."  # type: ignore[func-returns-value]
    with open_page(browser, url) as page:
        names = ("main.rs", "Makefile", "notes.weird")
        files: list[Any] = [{"name": name, "mimeType": "", "buffer": f"text of {name}".encode()} for name in names]
        page.set_input_files("#upload", files)
        expect(page.locator("#files li")).to_have_count(3)
        drop = """([name, text]) => {
            const data = new DataTransfer();
            data.items.add(new File([text], name));
            for (const kind of ["dragenter", "dragover", "drop"])
              document.querySelector("#log").dispatchEvent(
                new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true})); }"""
        page.evaluate(drop, ["dropped.sql", "select 1"])
        expect(page.locator("#files li")).to_have_count(4)
        page.evaluate(drop, ["picture.bin", "a\0b"])
        expect(page.locator("#problem")).to_have_text("picture.bin is not a text file.")
        page.get_by_role("button", name="Remove Makefile").click()
        expect(page.locator("#files li")).to_have_count(3)
        take_screenshot(page, "files")
        send_message(page, "What is this?")
        wait_for_answer(page)
        prompt = prompts[-1]
        assert [prompt.count(f"text of {name}") for name in names] == [1, 0, 1] and "select 1" in prompt


def test_settings_are_one_click_away_and_kept(browser: Browser, url: str, engine: Engine) -> None:
    prompts: list[str] = []
    engine.say = lambda prompt: prompts.append(prompt) or "Yes."  # type: ignore[func-returns-value]
    with open_page(browser, url) as page:
        page.click("#settings-open")
        page.fill("#system", "Answer in verse.")
        page.fill("#temperature", "0.3")
        page.fill("#top-k", "7")
        page.fill("#seed", "5")
        page.select_option("#theme", "dark")
        assert page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(20, 24, 29)"
        take_screenshot(page, "settings_dark")
        page.keyboard.press("Escape")
        page.reload()
        send_message(page, "Well?")
        wait_for_answer(page)
        assert "Answer in verse." in prompts[-1]
        assert (engine.params.temperature, engine.params.top_k, engine.params.seed) == (0.3, 7, 5)


def test_the_page_shows_the_progress_of_loading(browser: Browser, engine: Engine) -> None:
    steps = [threading.Event(), threading.Event()]

    def make() -> Any:
        for done_already, step in enumerate(steps):
            report("reading weights", done_already + 1, 4)
            assert step.wait(60)
        return make_app(engine)  # type: ignore[arg-type]

    # the browser logs each response with status 503
    with run_asgi_app(Loading(make)) as (url, _), open_page(browser, url, allowed="503") as page:
        expect(page.locator("#loading-text")).to_have_text("Loading the model: reading weights")
        expect(page.locator("#loaded")).to_have_attribute("value", "0.25")
        steps[0].set()
        expect(page.locator("#loaded")).to_have_attribute("value", "0.5")
        page.fill("#text", "Early")
        page.press("#text", "Enter")
        expect(page.locator("#status")).to_have_text("Waiting for the server…")
        take_screenshot(page, "loading")
        check_accessible(page)
        steps[1].set()
        expect(page.locator("#loading")).to_be_hidden()
        expect(page.locator("#model")).to_have_text("scripted")
        wait_for_answer(page)
        expect(page.locator("article.user .text")).to_have_text("Early")


def test_columns_collapse_and_stay_so(browser: Browser, url: str) -> None:
    with open_page(browser, url) as page:
        for name in ("nav", "aside"):
            page.click(f"#{name}-toggle")
            expect(page.locator(f"#{name}")).to_be_hidden()
        page.reload()
        expect(page.locator("#nav")).to_be_hidden()
        expect(page.locator("#aside")).to_be_hidden()
        page.click("#aside-toggle")
        expect(page.locator("#aside")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_accessibility_and_layout(browser: Browser, url: str, device: Any, scheme: str) -> None:
    kind = "phone" if device is PHONE else "desktop"
    with open_page(browser, url, **device, color_scheme=scheme) as page:
        expect(page.locator("#welcome")).to_be_visible()
        check_accessible(page)
        take_screenshot(page, f"{kind}_{scheme}_welcome")
        send_message(page, "Who wrote?")
        wait_for_answer(page)
        check_accessible(page)
        take_screenshot(page, f"{kind}_{scheme}_answer")
        expect(page.locator("#send")).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.documentElement.scrollWidth") <= device["viewport"]["width"], "scrolls sideways"
        page.locator("article.assistant .sentence", has_text="four").first.click()
        expect(page.locator("#sentences")).to_be_visible()
        check_accessible(page)
        take_screenshot(page, f"{kind}_{scheme}_sources")
        page.click("#settings-open")
        check_accessible(page)
        take_screenshot(page, f"{kind}_{scheme}_settings")
        page.click("#settings-close")
        if kind == "phone":
            page.click("#nav-toggle")
            expect(page.locator("#aside")).to_be_hidden()
            check_accessible(page)
            take_screenshot(page, f"{kind}_{scheme}_conversations")


def test_the_keyboard_reaches_every_control(browser: Browser, url: str) -> None:
    with open_page(browser, url) as page:
        send_message(page, "Who wrote?")
        wait_for_answer(page)
        page.reload()
        expect(page.locator("article")).to_have_count(2)
        names = []
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.locator(":focus").count() == 0:
                break  # after the last control
            names.append(page.locator(":focus").evaluate(NAME))
        expected = (
            "Skip to the message", "Conversations", "Settings", "Sources", "New conversation", "Search", "Rename Who",
            "Delete Who", "Markdown", "Message", "Add files", "Send", "Copy the message", "Edit the message",
            "Regenerate the answer",
        )  # fmt: skip
        assert [name for name in expected if not any(name in found for found in names)] == []
        assert all(name.strip() for name in names)
