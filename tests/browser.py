"""A real browser without a window, for tests of pages."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_SECONDS = 120


class Browser:
    """Chromium, driven through selenium.

    Args:
        profile: a new folder.
    """

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        programs = [_found("chromium", "google-chrome"), _found("chromedriver")]
        options = webdriver.ChromeOptions()
        options.binary_location = programs[0]
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver: Any = webdriver.Chrome(options=options, service=Service(programs[1]))

    def open(self, page: Path, width: int = 1280, *, dark: bool = False) -> None:
        """Open a page of oktopk and wait until it has drawn its plots."""
        self.messages()
        self.requests()
        phone = width < 600
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(page.as_uri())
        self.wait("return document.documentElement.dataset.ready === 'yes'")

    def wait(self, script: str) -> None:
        """Until a script returns true."""
        deadline = time.monotonic() + _SECONDS
        while self.run(script) is not True:
            assert time.monotonic() < deadline, self.messages()
            time.sleep(0.05)

    def run(self, script: str, *arguments: object) -> Any:
        """The value that a script returns."""
        return self.driver.execute_script(script, *arguments)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def messages(self) -> list[str]:
        """What the console got since the last call."""
        return [each["message"] for each in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call."""
        events = [
            json.loads(each["message"])["message"] for each in self.driver.get_log("performance")
        ]
        sent = [each["params"] for each in events if each["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent]

    def close(self) -> None:
        self.driver.quit()


def _found(*names: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    missing = f"needs {names[0]}: .ci/run installs it"
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)
