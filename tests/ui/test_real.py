"""The page before real engines, as a newcomer meets it: no key, a hot model, and models that are loaded on demand."""

from __future__ import annotations

import subprocess
import sys

import pytest
from selenium.webdriver.common.keys import Keys

from tests.e2e.conftest import LAZY, QWEN, RESIDENT
from tests.e2e.service import Service
from tests.ui.page import Page

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

QUESTION = "What is the capital of France?"


def test_first_visit_to_a_streamed_answer_and_why_it_is_so(real_page: Page) -> None:
    real_page.open()
    real_page.live()
    real_page.fill("temperature", "0")
    real_page.ask(QUESTION)
    assert real_page.until_answered() == "The capital of France is Paris."
    why = real_page.why()
    assert why["model"] == f"{RESIDENT} · the default"
    assert why["thinking"].startswith("off")
    assert why["finish"] == "stop"
    assert "ms" in why["ttft"] or "s" in why["ttft"]
    assert 0 < float(why["tps"]) < 1000
    assert "8 answer" in why["tokens"]
    # What the router's own record knows comes by the feed, a moment later.
    real_page.wait(lambda: "admit" in real_page.why().get("steps", ""), "the steps are told")
    # The next turn has the first one before it.
    real_page.ask("And of Italy?")
    real_page.wait(lambda: len(real_page.answers()) == 2, "there is a second answer")
    assert real_page.until_answered()
    assert int(real_page.why()["tokens"].split()[0]) > int(why["tokens"].split()[0]) + 8


def test_code_that_it_shows_runs_and_has_the_same_answer(real_page: Page) -> None:
    real_page.open()
    real_page.live()
    real_page.fill("temperature", "0")
    real_page.fill("max", "20")
    real_page.find("#prompt").send_keys(f'{QUESTION} Don\'t say "no".')
    shown = {}
    real_page.find("#code").click()
    for language in ("curl", "python", "javascript"):
        real_page.find(f'[data-code="{language}"]').click()
        shown[language] = real_page.text("#code-text")
    said = subprocess.run(
        [sys.executable, "-c", shown["python"]], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert said
    curled = subprocess.run(["bash", "-c", shown["curl"]], capture_output=True, text=True, timeout=60, check=True)
    assert "data: [DONE]" in curled.stdout
    checked = subprocess.run(
        ["node", "--input-type=module", "--check"],
        input=shown["javascript"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stderr
    real_page.find("#code-close").click()
    real_page.find("#send").click()
    assert real_page.until_answered() == said


def test_thinking_on_is_a_folding_panel_and_off_is_none_side_by_side(real_page: Page) -> None:
    real_page.open()
    real_page.live()
    real_page.choose(QWEN)
    real_page.fill("max", "24")
    real_page.find("#compare").click()
    real_page.ask("2+2?")
    real_page.until_answered(120)
    on, off = real_page.answers()
    titles = [answer.find_element("css selector", "h3").text for answer in (on, off)]
    assert titles == ["Thinking on", "Thinking off"]
    panels = [answer.find_element("css selector", ".reasoning") for answer in (on, off)]
    # Random weights never end a thought: all that this one said is in the panel, and all of the other is the answer.
    assert panels[0].is_displayed()
    assert panels[0].find_element("css selector", ".text").text
    assert not on.find_element("css selector", ".content").text
    assert not panels[1].is_displayed()
    assert off.find_element("css selector", ".content").text
    assert "off · you said so" in off.get_attribute("textContent")
    assert "on · you said so" in on.get_attribute("textContent")
    assert "Cut at the maximum of tokens." in on.text


def test_budget_goes_with_the_thought(real_page: Page) -> None:
    real_page.open()
    real_page.live()
    real_page.choose(QWEN)
    assert not real_page.find("#budget").is_enabled()
    real_page.think("on")
    real_page.find("#budget").send_keys(Keys.ARROW_RIGHT)  # from no limit to the least
    assert real_page.text("#budget-now") == "64"
    real_page.fill("max", "100")
    real_page.ask("2+2?")
    real_page.until_answered(120)
    assert real_page.find(".reasoning .text").text
    why = real_page.why()
    assert (why["thinking"], why["budget"]) == ("on · you said so", "64 tokens")


def test_lazy_model_is_seen_stopped_loading_awake_and_stopped_again(real_page: Page, real_service: Service) -> None:
    real_service.in_state(LAZY, "stopped")
    real_page.open("models")
    real_page.live()
    real_page.wait(lambda: real_page.model_state(LAZY) == "stopped", "it is seen to be stopped")
    real_page.run(
        """
        const title = [...document.querySelectorAll('.model h3')].find((h3) => h3.textContent === arguments[0]);
        window.seen = ['stopped'];
        const card = title.parentNode;
        const note = () => window.seen.at(-1) !== card.dataset.state && window.seen.push(card.dataset.state);
        new MutationObserver(note).observe(card, { attributes: true });
        """,
        LAZY,
    )
    real_page.look_at("play")
    real_page.choose(LAZY)
    real_page.fill("temperature", "0")
    real_page.ask(QUESTION)
    assert real_page.until_answered(120) == "The capital of France is Paris."
    assert real_page.why()["cold"].endswith("s")
    real_page.look_at("models")
    real_page.wait(lambda: real_page.model_state(LAZY) == "awake", "it is seen to be awake")
    real_page.order(LAZY, "unload")
    real_page.wait(lambda: real_page.find("#sure-dialog").is_displayed(), "it asks first")
    real_page.find("#sure-no").click()
    assert real_page.model_state(LAZY) == "awake"
    real_page.order(LAZY, "unload")
    real_page.wait(lambda: real_page.find("#sure-dialog").is_displayed(), "it asks again")
    real_page.find("#sure-yes").click()
    real_page.wait(lambda: real_page.model_state(LAZY) == "stopped", "it is seen to be stopped", 60)
    seen = [state for state in real_page.run("return window.seen") if state != "unloading"]
    assert seen == ["stopped", "loading", "awake", "stopped"]
