"""What a test does with an open page."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.serve.harness import Server

WAIT_S = 20


def opened(driver: Any, server: Server) -> None:
    driver.get(server.url + "/ui")
    until(lambda: css(driver, "#status").get_attribute("data-state") == "live")


def css(driver: Any, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def all_css(driver: Any, selector: str) -> list[Any]:
    return driver.find_elements("css selector", selector)


def text(driver: Any, selector: str) -> str:
    return driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)


def until(condition: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    """The first true value; elements that were just redrawn are looked up again."""
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException

    end = time.monotonic() + within_s
    while True:
        try:
            if found := condition():
                return found
        except (NoSuchElementException, StaleElementReferenceException):
            pass
        assert time.monotonic() < end, f"not within {within_s} s"
        time.sleep(0.05)


def row_of(driver: Any, answer: dict[str, Any]) -> str:
    """The selector of an answered request's row, once the page shows it with the account of its hit."""
    row = f"#request-list > [data-request='{answer['id']}']"
    until(lambda: text(driver, f"{row} .why"))
    return row


def press(driver: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(driver).send_keys(*keys).perform()
