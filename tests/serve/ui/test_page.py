"""The live page in a real browser, on a server whose cache is real and whose model is not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.serve.harness import Server, launched
from tests.serve.ui.browser import browser, complaints, missing, resize
from tests.serve.ui.steps import all_css, css, opened, press, row_of, text, until

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

SYSTEM = "You are the guide of a museum about rivers. A headwater is where a river begins. "
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@contextmanager
def real_cache(model: str = "fake?blocks=256", *options: str, port: int = 0) -> Iterator[Server]:
    with launched([sys.executable, "-m", "tests.serve.ui.real_cache", model, str(port), *options]) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with real_cache() as server:
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as driver:
        yield driver


@pytest.fixture
def page(chromium: Any, server: Server) -> Iterator[Any]:
    """The page, connected; at the end its console must be clean."""
    resize(chromium, 1440, 1000)
    complaints(chromium)  # what other tests left
    opened(chromium, server)
    yield chromium
    assert complaints(chromium) == []


# ---- what it shows ------------------------------------------------------------------------------------


def test_an_idle_server_has_a_designed_empty_state(page: Any) -> None:
    assert "No request has finished yet" in css(page, "#requests-empty").text
    assert "Nothing is recorded yet" in css(page, "#tree-empty").text
    assert "256 free" in until(lambda: text(page, "#legend"))


def test_a_hit_that_a_request_just_made_appears(page: Any, server: Server) -> None:
    answers = [server.complete(SYSTEM + q, max_tokens=8) for q in ("What is a delta?", "What is a weir?")]
    n_shared = len(SYSTEM + "What is a ") // 16 * 16
    row = css(page, row_of(page, answers[1]))
    assert f"{100 * n_shared // len(SYSTEM + 'What is a weir?')} % cached" in row.text
    assert f"{n_shared} tokens cached" in css(row, ".bar").get_attribute("aria-label")
    until(lambda: text(page, "#f-reused").endswith(" %") and text(page, "#f-reused") != "0 %")
    branches = until(lambda: [b for b in all_css(page, "#tree .text") if "You are the guide" in b.text])
    assert branches[0].get_attribute("title").startswith(SYSTEM[:32])


def test_a_miss_says_why_and_a_click_tells_the_whole_account(page: Any, server: Server) -> None:
    server.complete("abcdefghijklmnopqrstuvwxyz 0123456789", max_tokens=2)
    answer = server.complete("abcdefghijklmnopqrsXuvwxyz 0123456789", max_tokens=2)
    row = row_of(page, answer)
    assert "differs" in text(page, f"{row} .why") and "19" in text(page, f"{row} .why")
    button = css(page, f"{row} .open")
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    account = css(page, f"{row} .account").text
    assert "X" in account and "t" in account and "16 tokens" in account
    button.click()
    assert not all_css(page, f"{row} .account")


def test_a_blocks_text_is_shown_on_pointing_at_it(page: Any, server: Server) -> None:
    from selenium.webdriver import ActionChains

    server.complete("A block that says hello to its reader. " * 2, max_tokens=1)
    picture = server_view(server)
    block = picture["queue"][-1]
    pool = page.execute_script("return document.getElementById('cells').getBoundingClientRect().toJSON()")
    columns, cell = geometry(256, pool["width"], pool["height"])
    x = block % columns * cell + cell / 2 - pool["width"] / 2
    y = block // columns * cell + cell / 2 - pool["height"] / 2
    ActionChains(page).move_to_element_with_offset(css(page, "#cells"), round(x), round(y)).perform()
    until(lambda: f"Block {block} " in text(page, "#block-title"))
    assert "cached, last used" in text(page, "#block-title")
    facts = css(page, "#block-facts").text
    for name in ("Tokens", "References", "Key", "Namespace", "Children", "Hits that ended here"):
        assert name in facts


def geometry(n_blocks: int, width: float, height: float) -> tuple[int, float]:
    """Columns and size of the cells, from the canvas alone."""
    for size in range(18, 2, -1):
        columns = int(width // size)
        if -(-n_blocks // columns) * size == round(height):
            return columns, size
    raise AssertionError("the map has no cells that fit")


def server_view(server: Server) -> dict[str, Any]:
    return httpx.get(server.url + "/admin/view", timeout=30).json()


def test_text_of_prompts_is_never_markup(page: Any, server: Server) -> None:
    server.complete(HOSTILE, max_tokens=2)
    until(lambda: any("<img" in branch.text for branch in all_css(page, "#tree .text")))
    assert not all_css(page, "#tree img") and not all_css(page, "img")
    assert page.title != "owned"


def test_a_pasted_request_is_explained(page: Any, server: Server) -> None:
    server.complete("Explain me: the same beginning and then some more of that.", max_tokens=1)
    box = css(page, "#body")
    box.send_keys('{"prompt": "Explain me: the same beginning and then less or more of it."}')
    css(page, "#explain-go").click()
    until(lambda: "differs" in text(page, "#explain-answer .sentence"))
    assert "reused" in text(page, "#explain-answer")
    box.clear()
    box.send_keys("{not JSON")
    css(page, "#explain-go").click()
    assert "This is not JSON" in text(page, "#explain-answer")
    box.clear()
    box.send_keys('{"promt": "x"}')
    css(page, "#explain-go").click()
    until(lambda: "the body must be" in text(page, "#explain-answer .error"))
    assert [line for line in complaints(page) if "400" not in line] == []  # the browser notes the refusal


# ---- how it is used -----------------------------------------------------------------------------------


def test_the_map_is_used_with_the_keyboard_alone(page: Any, server: Server) -> None:
    from selenium.webdriver import Keys

    server.complete("Keys lead to the first block, and on from there.", max_tokens=1)
    page.execute_script("document.activeElement.blur()")
    for _ in range(12):
        press(page, Keys.TAB)
        if page.execute_script("return document.activeElement.id") == "cells":
            break
    assert page.execute_script("return document.activeElement.id") == "cells"
    press(page, Keys.HOME)
    until(lambda: text(page, "#block-title").startswith("Block 0 "))
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    until(lambda: text(page, "#block-title").startswith("Block 2 "))
    press(page, Keys.END)
    until(lambda: text(page, "#block-title").startswith("Block 255 "))
    assert "free" in text(page, "#block-title")
    press(page, "n")
    until(lambda: f"Block {server_view(server)['queue'][0]} " in text(page, "#block-title"))
    assert "evicted next" in text(page, "#block-title")
    assert css(page, "#block-title").get_attribute("aria-live") == "polite"
    press(page, Keys.ESCAPE)
    assert css(page, "#block-empty").is_displayed()


def test_the_tree_is_used_with_the_keyboard_alone(page: Any, server: Server) -> None:
    from selenium.webdriver import Keys

    for last in "ABC":
        server.complete("A trunk of forty letters, and no more, yes: " + last * 20, max_tokens=1)
    until(lambda: any("A trunk" in label(item) for item in all_css(page, "#tree [role=treeitem]")))
    page.execute_script("document.querySelector('#tree [role=treeitem]').focus()")

    def focused() -> Any:
        return page.execute_script("return document.activeElement")

    assert "namespace" in label(focused())
    for _ in range(60):
        if "A trunk" in label(focused()):
            break
        press(page, Keys.ARROW_DOWN)
    assert focused().get_attribute("aria-expanded") == "true"
    press(page, Keys.ARROW_LEFT)
    assert focused().get_attribute("aria-expanded") == "false"
    press(page, Keys.ARROW_RIGHT)
    assert focused().get_attribute("aria-expanded") == "true"
    press(page, Keys.ARROW_RIGHT)
    assert focused().get_attribute("aria-level") == "3"
    press(page, Keys.ARROW_LEFT)
    assert "A trunk" in label(focused())


def label(item: Any) -> str:
    return item.get_attribute("aria-label") or ""


def test_everything_that_can_be_used_has_a_name(page: Any) -> None:
    nameless = page.execute_script(
        """return [...document.querySelectorAll("button, input, textarea, canvas:not([aria-hidden]), [role], section")]
        .filter((e) => !(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.textContent.trim()
          || (e.id && document.querySelector(`label[for="${e.id}"]`))))
        .filter((e) => !["none", "presentation", "status", "alert", "group"].includes(e.getAttribute("role")))
        .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert nameless == []


def test_dark_and_light_follow_the_system_and_the_button(page: Any) -> None:
    def ground() -> str:
        return page.execute_script("return getComputedStyle(document.body).backgroundColor")

    light = ground()
    resize(page, 1440, 1000, dark=True)
    dark = until(lambda: ground() != light and ground())
    css(page, "#theme").click()
    assert ground() == light
    page.refresh()
    until(lambda: ground() == light)
    css(page, "#theme").click()
    assert ground() == dark
    page.execute_script("localStorage.clear()")


@pytest.mark.parametrize("width", [390, 768, 1440])
def test_nothing_is_wider_than_the_window(page: Any, server: Server, width: int) -> None:
    server.complete("Nothing is too wide: " + "w" * 300, max_tokens=1)
    resize(page, width, 844)
    opened(page, server)
    until(lambda: all_css(page, "#request-list > li"))
    assert page.execute_script("return document.documentElement.scrollWidth") <= width


def test_20_000_blocks_stay_fluid(chromium: Any) -> None:
    """A full redraw, and one of 2,000 changed cells, measured in the page itself."""
    with real_cache("fake?blocks=20000&fill=19000") as server:
        resize(chromium, 1440, 1000)
        opened(chromium, server)
        until(lambda: "19,0" in text(chromium, "#legend"))
        took = chromium.execute_async_script(
            """const done = arguments[0];
            import("/ui/pool.js").then(({ PoolMap }) => {
              const map = new PoolMap(() => Promise.reject(new Error("no")));
              const cells = btoa(String.fromCharCode(...new Array(20000).fill(4)));
              map.take({ cells });
              const places = Uint32Array.from({ length: 2000 }, (_, i) => i * 9);
              const at = btoa(String.fromCharCode(...new Uint8Array(places.buffer)));
              const to = btoa(String.fromCharCode(...new Array(2000).fill(1)));
              const time = (work) => { const start = performance.now(); work(); return performance.now() - start; };
              const best = (work) => Math.min(...[1, 2, 3].map(() => time(work)));
              done([best(() => map.drawAll()), best(() => map.take({ at, to }))]);
            });"""
        )
        print("redraw, difference: ms", took)
        assert took[0] < 150 and took[1] < 60  # several frames even on a busy machine; usually a fraction of one


# ---- when things go wrong -----------------------------------------------------------------------------


def test_it_says_when_the_server_is_gone_and_comes_back_with_it(chromium: Any) -> None:
    with real_cache() as server:
        port = int(server.url.rpartition(":")[2])
        opened(chromium, server)
    until(lambda: css(chromium, "#status").get_attribute("data-state") == "lost")
    assert "last state" in css(chromium, "#banner").text
    with real_cache("fake?blocks=100", port=port):
        until(lambda: css(chromium, "#status").get_attribute("data-state") == "live")
        until(lambda: "100 blocks" in text(chromium, "#pool-note"))
        assert not css(chromium, "#banner").is_displayed()
    complaints(chromium)


def test_it_says_when_the_engine_is_gone(chromium: Any) -> None:
    with real_cache() as server:
        opened(chromium, server)
        os.kill(server.engine_pid(), 9)
        until(lambda: "The engine is gone" in css(chromium, "#banner").text)
    complaints(chromium)


# ---- keys ---------------------------------------------------------------------------------------------


def test_with_keys_it_asks_for_the_admin_key_and_shows_no_text(chromium: Any) -> None:
    with real_cache("fake", "--api-key", "tenant", "--admin-key", "boss") as server:
        prompt = "a very secret prompt of some length"
        assert send(server, prompt, "tenant").status_code == 200
        complaints(chromium)
        chromium.get(server.url + "/ui")
        key = until(lambda: css(chromium, "#key").is_displayed() and css(chromium, "#key"))
        assert complaints(chromium) == []  # it asks before it tries
        key.send_keys("tenant\n")
        until(lambda: "operator" in css(chromium, "#key-error").text)
        complaints(chromium)  # the browser notes the refusal
        css(chromium, "#key").send_keys("boss\n")
        until(lambda: css(chromium, "#status").get_attribute("data-state") == "live")
        until(lambda: "differs" in text(chromium, "#requests") or "no record" in text(chromium, "#requests"))
        css(chromium, "#request-list .open").click()
        chromium.execute_script("document.getElementById('cells').focus()")
        press(chromium, "n")
        until(lambda: "not shown here" in text(chromium, "#block-text"))
        assert "secret" not in chromium.page_source
        assert "boss" not in chromium.current_url
        chromium.refresh()  # this tab knows the key
        until(lambda: css(chromium, "#status").get_attribute("data-state") == "live")
        assert complaints(chromium) == []
        chromium.execute_script("sessionStorage.clear()")


def send(server: Server, prompt: str, key: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    body = {"prompt": prompt, "max_tokens": 2}
    return httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=30)
