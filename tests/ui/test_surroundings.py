"""The page for everybody: keys, lost servers, languages, colours, small screens, keyboards, screen readers."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.e2e.service import Service
from tests.ui.conftest import ADMIN, KEY
from tests.ui.page import Page
from tests.ui.test_playground import enter
from tests.ui.wire import Wire

pytestmark = pytest.mark.e2e

VIEWS = ("play", "models", "traffic")


def test_wrong_key_is_said_and_the_right_one_opens(page: Page) -> None:
    page.open()
    page.wait(lambda: page.find("#key-dialog").is_displayed(), "it asks for the key")
    assert not page.find("#key-wrong").is_displayed()
    enter(page, "sk-wrong")
    page.says("#key-wrong", "The key is missing or not known: This API key is not known. (invalid_api_key)")
    assert page.find("#key").get_attribute("value") == ""
    enter(page, KEY)
    page.live()
    assert not page.find("#key-dialog").is_displayed()
    # The tab keeps it, and nothing else does.
    assert page.run("return [Object.values(sessionStorage), Object.values(localStorage)]") == [[KEY], []]
    page.driver.refresh()
    page.live()
    assert page.run("return document.cookie") == ""
    page.find("#open-key").click()
    page.find("#key-forget").click()
    page.wait(lambda: page.find("#key-dialog").is_displayed(), "it asks again")
    assert page.run("return Object.values(sessionStorage)") == []


def test_orders_are_for_operators_and_a_failed_load_says_why(page: Page) -> None:
    page.open("models")
    enter(page, KEY)
    page.live()
    page.wait(lambda: page.all(".model"), "the models are shown")
    assert not [button for button in page.all("[data-order]") if button.is_displayed()]
    page.find("#open-key").click()
    enter(page, ADMIN)
    load = page.order("broken", "load")
    page.wait(lambda: page.model_state("broken") == "failed", "it has failed")
    assert "no such file" in page.card("broken").find_element("css selector", ".error").text
    # Whoever uses the keyboard is still where they were.
    assert page.driver.switch_to.active_element == load


def test_server_that_goes_is_said_to_be_gone_and_to_be_back(page: Page, wire: Wire) -> None:
    page.base_url = wire.base_url
    page.open()
    enter(page, KEY)
    page.live()
    wire.cut()
    page.says("#link", "The server does not answer. Trying again")
    page.ask("Hello")
    page.wait(lambda: page.state() == "failed", "a request says so, too")
    assert page.find(".answer .error").text.startswith("The server does not answer")
    wire.mend()
    page.says("#link", "The server is back.", 30)
    page.ask("fake[text=fine]")
    page.wait(lambda: page.state() == "done", "it answers")
    assert page.content() == "fine"
    page.says("#link", "Live", 30)


def test_service_that_was_started_again_is_shown_as_it_is_now(page: Page, scripted_service: Service) -> None:
    page.open("models")
    enter(page, ADMIN)
    page.live()
    page.order("lazy", "load")
    page.wait(lambda: page.model_state("lazy") == "awake", "it is loaded")
    assert not scripted_service.end()
    page.says("#link", "The server does not answer. Trying again", 30)
    scripted_service.start()
    page.wait(lambda: page.model_state("lazy") == "stopped", "the new service has not loaded it", 60)
    page.says("#link", "Live", 30)
    page.look_at("play")
    page.ask("fake[text=fine]")
    page.wait(lambda: page.state() == "done", "it answers")
    assert page.content() == "fine"


def test_traffic_shows_the_request_and_where_its_time_went(page: Page) -> None:
    page.open()
    enter(page, KEY)
    page.live()
    page.ask("fake[tokens=20,tpot_s=0.01]")
    page.until_answered()
    request = page.why()["request"]
    page.look_at("traffic")
    record = f'.record[data-request="{request}"]'
    page.wait(lambda: page.all(record), "the request is listed")
    page.unfold(record)
    steps = page.run(
        "return [...document.querySelectorAll(arguments[0])].map((row) => row.dataset.name)", f"{record} .timeline li"
    )
    assert steps[0] == "admit"
    assert steps[1] == "decide"
    assert steps[-2:] == ["engine", "answer"]
    page.wait(lambda: page.run("return document.querySelector('.chart .line').getAttribute('d')"), "the chart is drawn")
    page.wait(
        lambda: "the default" in page.text("#charts") or "you said so" in page.text("#charts"), "sources are counted"
    )
    assert "fake[" not in page.text("#traffic")


def test_language_follows_the_browser_and_can_be_switched_and_is_kept(page: Page) -> None:
    page.open()
    assert page.run("return [document.documentElement.lang, document.querySelector('#send').textContent]") == [
        "en",
        "Send",
    ]
    page.prefers(languages="zh-CN,zh;q=0.9,en;q=0.8")
    page.driver.refresh()
    page.wait(lambda: page.text("#send") == "发送", "it speaks Chinese")
    assert page.run("return document.documentElement.lang") == "zh-CN"
    page.says("#key-title", "API 密钥")
    enter(page, "sk-wrong")
    page.says("#key-wrong", "缺少密钥，或密钥未知")
    enter(page, KEY)
    page.live()
    # Nothing is left in the other language but what the service said.
    english = """
        return [...document.querySelectorAll('[data-t]')]
            .filter((node) => node.checkVisibility() && /[a-z]{3}/i.test(node.textContent))
            .filter((node) => !/[\u4e00-\u9fff]/.test(node.textContent))
            .map((node) => node.textContent);
    """
    for view in VIEWS:
        page.look_at(view)
        assert page.run(english) == [], view
    page.find('#language option[value="en"]').click()
    assert page.text("#send") == "Send"
    page.driver.refresh()
    page.wait(lambda: page.text("#send") == "Send", "it is kept")


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_wider_than_a_phone(page: Page, view: str) -> None:
    page.width(360)
    page.open(view)
    enter(page, ADMIN)
    page.live()
    if view == "play":
        page.ask(f"fake[text={'unbroken' * 30}]")
        page.until_answered()
        page.find(".why summary").click()
        assert page.find("#send").is_displayed()
        page.find("#settings summary").click()
    elif view == "models":
        page.wait(lambda: page.all(".model"), "the models are shown")
    else:
        page.wait(lambda: page.all(".record"), "requests are shown")
        page.unfold(".record")
    assert page.overflow() == 0
    page.width(None)


def test_keyboard_alone_is_enough(page: Page) -> None:
    page.open()
    enter(page, KEY)
    page.live()

    def press(*keys: str) -> None:
        ActionChains(page.driver).send_keys(*keys).perform()

    def focused() -> str:
        return str(page.run("return document.activeElement.id || document.activeElement.textContent"))

    def tab_to(name: str) -> None:
        for _ in range(40):
            if focused() == name:
                return
            press(Keys.TAB)
        raise AssertionError(f"{name} cannot be reached with the Tab key")

    tab_to("model")
    press("h")
    tab_to("prompt")
    press("fake[text=fine]", Keys.ENTER)
    assert page.until_answered() == "fine"
    tab_to("code")
    press(Keys.ENTER)
    assert page.find("#code-dialog").is_displayed()
    press(Keys.ESCAPE)
    assert not page.find("#code-dialog").is_displayed()
    assert focused() == "code"
    tab_to("Traffic")
    press(Keys.ENTER)
    page.wait(lambda: page.find("#traffic").is_displayed(), "the view has changed")


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing_grave(page: Page, colours: str) -> None:
    page.prefers(colours=colours)
    page.open()
    page.wait(lambda: page.find("#key-dialog").is_displayed(), "it asks for the key")
    assert not page.faults()
    enter(page, ADMIN)
    page.live()
    page.choose("hot")
    page.find("#compare").click()
    page.ask("fake[text=fine,reasoning=hm]")
    page.until_answered()
    page.find(".why summary").click()
    assert not page.faults()
    page.look_at("models")
    page.wait(lambda: page.all(".model"), "the models are shown")
    assert not page.faults()
    page.look_at("traffic")
    page.wait(lambda: page.all(".record"), "requests are shown")
    page.unfold(".record")
    assert not page.faults()
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(245, 246, 248)", "dark": "rgb(20, 22, 26)"}[colours]
