"""Headless Chromium for tests, by Debian's packages chromium and chromium-driver."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def missing() -> str | None:
    """Why no browser can be started here; None if one can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install -e '.[dev]')"
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed (on Debian: apt-get install chromium chromium-driver)"
    return None


@contextmanager
def browser(width: int = 1440, height: int = 1000, *, dark: bool = False) -> Iterator[Chrome]:
    """A browser of its own, with a profile that is thrown away. Skips the test where there is none."""
    if (why := missing()) is not None:
        pytest.skip(why)
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory() as profile:
        options = ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for option in (*OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options, Service(shutil.which("chromedriver")))
        try:
            resize(driver, width, height, dark=dark)
            yield driver
        finally:
            driver.quit()


def resize(driver: Any, width: int, height: float, *, dark: bool = False) -> None:
    """A page of exactly this size (a window has a least width), in light or dark."""
    metrics = {"width": width, "height": round(height), "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def complaints(driver: Any) -> list[str]:
    """What the browser's console has that is no plain message."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]
