"""The pictures in docs/: a real server with the default model, the traffic of `traffic.py`, and the page as it is then.

python -m tests.serve.ui.screenshots [MODEL]
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from headwater.config import ModelConfig
from tests.serve.harness import ROOT, Server, launched
from tests.serve.ui.browser import browser, complaints, resize
from tests.serve.ui.steps import opened, until
from tests.serve.ui.traffic import send

SETTLE_S = 2.0
SHORT_S = 0.4

OPEN_A_MISS = """
const miss = [...document.querySelectorAll("#request-list > li")].find((li) => li.textContent.includes("differs"));
miss?.querySelector(".open").click();
return miss !== undefined;
"""

PRESS = "document.getElementById('cells').dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]}))"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else ModelConfig().model
    command = [sys.executable, "-m", "headwater", "serve", model, "--served-model-name", ModelConfig().model]
    command += ["--port", "0", "--num-blocks", "384", "--max-model-len", "2048"]
    with launched(command, ready=r"^Serving on (http\S+)") as server, browser() as driver:
        for seed in range(1, 4):
            send(server, seed=seed, n_rounds=2, lone=2)
            time.sleep(2)
        busy = threading.Thread(target=send, args=(server,), kwargs={"seed": 9, "n_rounds": 8, "max_tokens": 32})
        busy.start()
        for width, height in ((1440, 1000), (390, 844)):
            picture(driver, server, width, height, ROOT / "docs" / f"ui-{width}.png")
        busy.join()
        print("console:", complaints(driver))


def picture(driver: Any, server: Server, width: int, height: int, path: Path) -> None:
    """The page at this width, as long as it is, with one block pointed at and one miss opened."""
    resize(driver, width, height)
    opened(driver, server)
    time.sleep(SETTLE_S)
    until(lambda: driver.execute_script(OPEN_A_MISS))
    driver.execute_script(PRESS, "Home")
    for _ in range(9):
        driver.execute_script(PRESS, "ArrowRight")
    time.sleep(SHORT_S)
    resize(driver, width, driver.execute_script("return document.querySelector('main').getBoundingClientRect().bottom"))
    time.sleep(SHORT_S)
    driver.save_screenshot(str(path))


if __name__ == "__main__":
    main()
