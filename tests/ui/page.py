"""The page in a browser, in the words of a person who uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement

from tests.e2e.service import wait_until
from tools.browser import AXE

PATIENCE_S = 15.0
# What axe calls these is what keeps people out.
_GRAVE = frozenset({"serious", "critical"})


class Page:
    """One tab that shows the page of a service at `base_url`."""

    def __init__(self, driver: WebDriver, base_url: str) -> None:
        self.driver = driver
        self.base_url = base_url

    def open(self, view: str = "play") -> Page:
        self.driver.get(f"{self.base_url}/ui#{view}")
        return self

    def look_at(self, view: str) -> None:
        self.find(f'nav a[href="#{view}"]').click()
        self.wait(lambda: self.find(f"#{view}").is_displayed(), f"the view is {view}")

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Of the first such node, seen or folded away; empty where there is none."""
        script = "return document.querySelector(arguments[0])?.textContent ?? ''"
        return str(self.driver.execute_script(script, selector))

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def wait(self, condition: Any, what: str, deadline_s: float = PATIENCE_S) -> Any:
        return wait_until(condition, deadline_s, what)

    def says(self, selector: str, words: str, deadline_s: float = PATIENCE_S) -> None:
        """Wait until a node's text has these words."""
        self.wait(lambda: words in self.text(selector), f"{selector} says {words!r}", deadline_s)

    def live(self) -> None:
        self.wait(lambda: self.run("return document.querySelector('.link').dataset.link") == "live", "the page is live")

    # The playground

    def choose(self, model: str) -> None:
        self.wait(lambda: self.all(f'#model option[value="{model}"]'), f"{model} can be chosen")
        self.find(f'#model option[value="{model}"]').click()

    def think(self, how: str) -> None:
        self.find(f'input[name="thinking"][value="{how}"]').click()

    def fill(self, field: str, text: str) -> None:
        node = self.find(f"#{field}")
        node.clear()
        node.send_keys(text)

    def ask(self, text: str) -> None:
        """Type a message and press Enter."""
        self.find("#prompt").send_keys(text, Keys.ENTER)

    def answers(self) -> list[WebElement]:
        return self.all(".answer")

    def state(self) -> str:
        """Running while any answer is; else how the newest one ended: done, stopped or failed."""
        script = """
            const states = [...document.querySelectorAll('.answer')].map((answer) => answer.dataset.state);
            return states.includes('running') ? 'running' : states.at(-1) ?? '';
        """
        return str(self.run(script))

    def until_answered(self, deadline_s: float = 60) -> str:
        """Wait until no answer runs any more; the text of the newest one."""
        self.wait(lambda: self.state() not in ("", "running"), "the answer is complete", deadline_s)
        return self.content()

    def content(self) -> str:
        return str(self.run("return [...document.querySelectorAll('.answer .content')].at(-1)?.textContent ?? ''"))

    def why(self) -> dict[str, str]:
        """What stands beside the newest answer, by its English names."""
        script = """
            const rows = [...document.querySelectorAll('.answer')].at(-1).querySelectorAll('.why dt');
            const name = (dt) => dt.dataset.t.replace('why.', '');
            return Object.fromEntries([...rows].map((dt) => [name(dt), dt.nextSibling.textContent]));
        """
        return dict(self.run(script))

    # The models

    def card(self, model: str) -> WebElement:
        self.wait(lambda: self.model_state(model), f"{model} is shown")
        return next(card for card in self.all(".model") if card.find_element(By.CSS_SELECTOR, "h3").text == model)

    def order(self, model: str, what: str) -> WebElement:
        """Press the button of that order once it can be; it is returned."""
        self.wait(lambda: self.all(f'[data-order="{what}"]'), "orders may be given")
        button = self.card(model).find_element(By.CSS_SELECTOR, f'[data-order="{what}"]')
        self.wait(lambda: button.get_attribute("aria-disabled") == "false", f"{what} is possible")
        button.click()
        return button

    def model_state(self, model: str) -> str:
        script = """
            const title = [...document.querySelectorAll('.model h3')].find((h3) => h3.textContent === arguments[0]);
            return title?.parentNode.dataset.state ?? '';
        """
        return str(self.run(script, model))

    def running(self, model: str) -> str:
        script = """
            const title = [...document.querySelectorAll('.model h3')].find((h3) => h3.textContent === arguments[0]);
            return title?.parentNode.querySelector('dt[data-t="running"]')?.nextSibling.textContent ?? '';
        """
        return str(self.run(script, model))

    # The traffic

    def unfold(self, record: str) -> None:
        """Open a request that is listed, by its selector, until its details are there."""
        self.find(f"{record} summary").click()
        self.wait(lambda: self.all(f"{record}[open] .timeline li"), "its steps are shown")

    # Its surroundings

    def width(self, pixels: int | None) -> None:
        """As on a phone so wide; None: as wide as the window again."""
        if pixels is None:
            self._command("Emulation.clearDeviceMetricsOverride", {})
        else:
            size = {"width": pixels, "height": 740, "deviceScaleFactor": 2, "mobile": True}
            self._command("Emulation.setDeviceMetricsOverride", size)

    def prefers(self, *, languages: str | None = None, colours: str | None = None) -> None:
        """What the person has told their browser."""
        if languages:
            agent = self.run("return navigator.userAgent")
            self._command("Emulation.setUserAgentOverride", {"userAgent": agent, "acceptLanguage": languages})
        if colours:
            features = [{"name": "prefers-color-scheme", "value": colours}]
            self._command("Emulation.setEmulatedMedia", {"features": features})

    def _command(self, name: str, arguments: dict[str, Any]) -> None:
        self.driver.execute_cdp_cmd(name, arguments)  # type: ignore[attr-defined] # Chromium's driver has it

    def overflow(self) -> float:
        """By how many pixels the page is wider than its window."""
        return float(self.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def faults(self) -> list[str]:
        """What axe-core finds to be serious or worse, each with the nodes that it is about."""
        self.run(f"{Path(AXE).read_text()}; window.axe = axe;")
        script = """
            const done = arguments[arguments.length - 1];
            const failed = (error) => done({ violations: [], error: String(error) });
            axe.run({ resultTypes: ['violations'] }).then(done, failed);
        """
        found = self.driver.execute_async_script(script)
        assert "error" not in found, found["error"]
        assert found["testEngine"]["name"] == "axe-core"
        return [
            f"{each['id']}: {[(node['html'], node['failureSummary']) for node in each['nodes']]}"
            for each in found["violations"]
            if each["impact"] in _GRAVE
        ]
