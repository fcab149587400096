"""A real Chromium, and two services: one on real engines without keys, one on scripted engines with keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service as Driver
from selenium.webdriver.remote.webdriver import WebDriver

from tests.e2e.conftest import LAZY, QWEN, RESIDENT, real_models
from tests.e2e.service import Service, running
from tests.ui.page import Page
from tests.ui.wire import Wire
from tools import browser

ON = {"enabled": True}
KEY, ADMIN = "sk-person", "sk-operator"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A second start of a service costs more than all of its tests: they come one after the other."""
    items.sort(key=lambda item: "real_service" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def chromium() -> Iterator[WebDriver]:
    binary, driver = browser.browser(), browser.driver()
    assert binary, "no Chromium here; `make test-ui` installs it where it can"
    assert driver, "no chromedriver here; `make test-ui` installs it where it can"
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "lang=en-US", "window-size=1280,900"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Driver(driver))
    chrome.set_script_timeout(60)
    yield chrome
    chrome.quit()


@pytest.fixture
def tab(chromium: WebDriver) -> Iterator[WebDriver]:
    """A tab of its own, which knows nothing yet. What the console complains of in it fails the test."""
    first = chromium.current_window_handle
    chromium.switch_to.new_window("tab")
    chromium.get_log("browser")
    yield chromium
    complaints = [entry["message"] for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]
    chromium.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})  # type: ignore[attr-defined]
    chromium.close()
    chromium.switch_to.window(first)
    # A refusal that the page itself shows is told in the console, too.
    assert not [said for said in complaints if "Failed to load resource" not in said and "net::ERR" not in said]


def key(name: str, secret: str, **may: Any) -> dict[str, Any]:
    return {"id": name, "sha256": hashlib.sha256(secret.encode()).hexdigest(), **may}


@pytest.fixture(scope="session")
def scripted_service() -> Iterator[Service]:
    models = [
        {
            "id": "hot",
            "tier": "resident",
            "context": 4096,
            "thinking": {"supported": True},
            "abilities": ["chat", "completions", "tools", "json"],
            "fake": {"ttft_s": 0.05, "tpot_s": 0.01},
        },
        {"id": "lazy", "tier": "lazy", "context": 4096, "fake": {"load_s": 1.0}},
        {"id": "broken", "tier": "lazy", "context": 4096, "fake": {"fail_load": "no such file"}},
    ]
    keys = [key("person", KEY), key("operator", ADMIN, admin=True)]
    with running(models, pool={"memory_gb": 1.5, "min_residency_s": 0.5}, security={"keys": keys}, ui=ON) as service:
        yield service


@pytest.fixture(scope="session")
def real_service() -> Iterator[Service]:
    models = [model for model in real_models() if model["id"] in (RESIDENT, LAZY, QWEN)]
    with running(models, pool={"memory_gb": 6, "min_residency_s": 1}, ui=ON) as service:
        yield service


@pytest.fixture
def wire(scripted_service: Service) -> Iterator[Wire]:
    """The way to the scripted service, which a test may cut."""
    with Wire(scripted_service.port) as way:
        yield way


@pytest.fixture
def page(scripted_service: Service, tab: WebDriver) -> Page:
    """The page of the scripted service, before any key was given."""
    return Page(tab, scripted_service.base_url)


@pytest.fixture
def real_page(real_service: Service, tab: WebDriver) -> Page:
    return Page(tab, real_service.base_url)
