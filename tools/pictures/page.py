"""Takes pictures of `/ui` in a real Chromium, after it was used as a person uses it."""

from __future__ import annotations

import io
import json
import time
import urllib.error
import urllib.request
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver

from tools.browser import browser, driver

QUESTION = "What is the capital of France?"
# So many requests make a chart.
_ROUNDS = 6
_DEADLINE_S = 120.0
_COLOURS = 256
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def take(url: str, directory: Path) -> None:
    """Use the service at `url`, and write playground.png, models.png, traffic.png and playground-zh.png."""
    options = webdriver.ChromeOptions()
    options.binary_location = browser() or ""
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1240,800", "lang=en-US"):
        options.add_argument(f"--{argument}")
    chrome = webdriver.Chrome(options=options, service=Service(driver()))
    try:
        _requests(url)
        _playground(chrome, url, QUESTION)
        _save(chrome, directory / "playground.png")
        for view in ("models", "traffic"):
            chrome.find_element(By.CSS_SELECTOR, f'nav a[href="#{view}"]').click()
            time.sleep(2)  # one more event of the feed
            if view == "traffic":
                chrome.find_element(By.CSS_SELECTOR, ".record summary").click()
            _save(chrome, directory / f"{view}.png")
        chrome.execute_script("localStorage.setItem('switchyard.language', 'zh')")
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
        _playground(chrome, url, QUESTION)
        _save(chrome, directory / "playground-zh.png")
    finally:
        chrome.quit()


def _playground(chrome: WebDriver, url: str, question: str) -> None:
    chrome.get("about:blank")
    chrome.get(f"{url}/ui")
    _until(chrome, "document.querySelector('.link').dataset.link === 'live'")
    chrome.find_element(By.ID, "temperature").send_keys("0")
    chrome.find_element(By.ID, "prompt").send_keys(question, Keys.ENTER)
    _until(chrome, "document.querySelector('.answer')?.dataset.state === 'done'")
    chrome.find_element(By.CSS_SELECTOR, ".why summary").click()
    _until(chrome, "document.querySelector('[data-t=\"why.steps\"]')")


def _until(chrome: WebDriver, condition: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not chrome.execute_script(f"return !!({condition})"):
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        time.sleep(0.1)


def _save(chrome: WebDriver, path: Path) -> None:
    """As a small PNG: a page has few colours."""
    picture = Image.open(io.BytesIO(chrome.get_screenshot_as_png())).convert("RGB")
    picture.quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def _requests(url: str) -> None:
    """What the charts are to show: short and long answers, both models, and some refusals."""
    models = [card["id"] for card in json.loads(_direct.open(f"{url}/v1/models").read())["data"]]
    for turn in range(_ROUNDS):
        for model in (*models, *(["none-such"] if turn % 4 == 0 else [])):
            body = {
                "model": model,
                "messages": [{"role": "user", "content": f"Say something about the number {turn}."}],
                "max_tokens": 8 * (turn % 4 + 1),
                "stream": True,
            }
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
            try:
                _direct.open(request, timeout=_DEADLINE_S).read()
            except urllib.error.HTTPError as error:
                error.close()
