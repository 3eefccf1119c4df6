"""The playground in a real browser: both columns stream, R is drawn, nothing complains."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from nado.serving.jobs import ServingConfig
from serving_app import ORACLE, Running, build_served, running

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no browser: install chromium and chromium-driver"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(build_served()) as made:
        yield made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = open_browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.quit()


def open_browser(profile: Path) -> Any:
    options = Options()
    options.binary_location = BROWSER or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1180,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    open_page(browser, server)
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "DEBUG"] == []


def open_page(browser: Any, server: Running) -> None:
    browser.get(server.url)
    wait(browser, lambda: browser.find_element(By.ID, "name").text == "small")


def wait(browser: Any, condition: Any) -> None:
    WebDriverWait(browser, 20, 0.02).until(lambda _: condition())


def fill(browser: Any, **values: str) -> None:
    for name, value in values.items():
        field = browser.find_element(By.ID, name)
        field.clear()
        field.send_keys(value)


def slide(browser: Any, name: str, value: float) -> None:
    script = """const slider = document.getElementById(arguments[0]);
    slider.value = arguments[1];
    slider.dispatchEvent(new Event("input"));"""
    browser.execute_script(script, name, value)


def says(browser: Any) -> str:
    return str(browser.find_element(By.ID, "says").text)


def tokens(browser: Any, column: str) -> list[Any]:
    return list(browser.find_elements(By.CSS_SELECTOR, f"#{column} .t"))


def read_text(browser: Any, column: str) -> str:
    script = """const text = document.getElementById(arguments[0]).cloneNode(true);
    text.querySelectorAll(".end").forEach((mark) => mark.remove()); return text.textContent;"""
    return str(browser.execute_script(script, column))


def test_both_columns_stream_and_r_is_drawn(page: Any) -> None:
    watch = """window.seen = [];
    for (const id of ["base", "guided"]) new MutationObserver(() => window.seen.push([id, performance.now()]))
      .observe(document.getElementById(id), { childList: true });"""
    page.execute_script(watch)
    fill(page, condition="ball, park", prompt="a man sees", seed="7")
    page.find_element(By.ID, "go").click()
    wait(page, lambda: says(page) == "Written with seed 7.")
    seen = page.execute_script("return window.seen")
    for column in ("base", "guided"):
        assert len({time for name, time in seen if name == column}) > 2, "came in one piece"
        drawn = tokens(page, column)
        assert len(drawn) > 2
        assert all("r" in each.get_attribute("class").split() for each in drawn)
        heights = [
            page.execute_script("return getComputedStyle(arguments[0]).getPropertyValue('--b')", each)
            for each in drawn
        ]
        assert all(0 <= float(height) <= 1 for height in heights)
        curve = "return getComputedStyle(arguments[0], '::after').clipPath"
        assert page.execute_script(curve, drawn[0]).startswith("polygon(")
    guided = read_text(page, "guided").strip()
    badge = page.find_element(By.CSS_SELECTOR, ".guided .badge").text
    assert badge == ("✓ satisfied" if ORACLE(["ball, park"], [guided])[0] else "✗ not satisfied")
    coloured = [
        each
        for each in tokens(page, "guided")
        if set("ud") & {word[0] for word in each.get_attribute("class").split()}
    ]
    assert coloured


def test_the_bases_alternative_is_shown_on_hover_and_by_keyboard(page: Any) -> None:
    fill(page, condition="ball", prompt="a man sees", seed="7")
    page.find_element(By.ID, "condition").send_keys(Keys.CONTROL, Keys.ENTER)
    wait(page, lambda: says(page) == "Written with seed 7.")
    text = page.find_element(By.ID, "guided")
    text.send_keys(Keys.ARROW_RIGHT)
    tip = page.find_element(By.ID, "tip")
    assert "base" in tip.text
    assert "R " in tip.text
    first = page.switch_to.active_element.get_attribute("data-tip")
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.switch_to.active_element.get_attribute("data-tip") != first
    webdriver.ActionChains(page).move_to_element(tokens(page, "base")[0]).perform()
    assert "base alone" in tip.text or "first choice" in tip.text
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()


def test_strength_and_target_rate_exclude_each_other(page: Any) -> None:
    slide(page, "strength", 2)
    assert not page.find_element(By.ID, "rate").is_enabled()
    slide(page, "strength", 1)
    slide(page, "rate", 0.5)
    assert not page.find_element(By.ID, "strength").is_enabled()
    assert page.find_element(By.ID, "rate-value").text == "50 %"
    fill(page, condition="ball", prompt="a man sees", seed="3")
    page.find_element(By.ID, "go").click()
    wait(page, lambda: says(page) == "Written with seed 3.")


@pytest.mark.parametrize("choice", ["doubt", "plausible"])
def test_doubt_and_plausible_tokens_are_asked_for_where_a_guide_pulls(page: Any, choice: str) -> None:
    slide(page, "strength", 2)
    slide(page, choice, 0.03)
    fill(page, condition="ball", prompt="a man sees", seed="5")
    page.find_element(By.ID, "copy-curl").click()
    wait(page, lambda: page.find_element(By.ID, "snippet").is_displayed())
    assert f'"{choice}":0.03' in page.find_element(By.ID, "snippet").text.replace(" ", "")
    page.find_element(By.ID, "go").click()
    wait(page, lambda: says(page) == "Written with seed 5.")
    slide(page, "strength", 0)
    assert not page.find_element(By.ID, choice).is_enabled()
    slide(page, "strength", 1)
    assert page.find_element(By.ID, choice).is_enabled()
    slide(page, "rate", 0.5)
    assert not page.find_element(By.ID, choice).is_enabled()


def test_a_verified_text_has_its_badge(page: Any) -> None:
    page.find_element(By.ID, "verified").click()
    fill(page, condition="ball, park", prompt="a man sees", seed="7")
    page.find_element(By.ID, "go").click()
    wait(page, lambda: says(page) == "Written with seed 7.")
    assert page.find_element(By.CSS_SELECTOR, ".guided .badge").text.startswith("✓ verified, ")
    assert ORACLE(["ball, park"], [read_text(page, "guided").strip()])[0]
    fill(page, condition="zebra")
    page.find_element(By.ID, "go").click()
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, ".guided .badge.no"))
    assert read_text(page, "guided") == ""


def test_the_request_as_code_is_the_request(page: Any, server: Running) -> None:
    fill(page, condition="ball, man's", prompt="a 'man' sees", seed="7")
    slide(page, "strength", 1.5)
    page.find_element(By.ID, "copy-curl").click()
    wait(page, lambda: page.find_element(By.ID, "snippet").is_displayed())
    curl = page.find_element(By.ID, "snippet").text
    assert f"curl {server.url}/v1/completions" in curl
    body = json.loads(curl.split("-d '")[1].rsplit("'", 1)[0].replace("'\\''", "'"))
    assert body == {
        "model": "small",
        "condition": "ball, man's",
        "prompt": "a 'man' sees",
        "guides": {"first": 1.5},
        "seed": 7,
    }
    page.find_element(By.ID, "copy-python").click()
    wait(page, lambda: "OpenAI" in page.find_element(By.ID, "snippet").text)
    code = page.find_element(By.ID, "snippet").text
    names: dict[str, Any] = {}
    exec(compile(code, "snippet", "exec"), names)
    slide(page, "strength", 1)
    page.find_element(By.ID, "go").click()
    assert isinstance(names["answer"].choices[0].text, str)
    wait(page, lambda: says(page) == "Written with seed 7.")


def test_errors_are_said_and_markup_is_only_text(page: Any) -> None:
    fill(page, condition=" , ", prompt="<img src=x onerror=alert(1)>")
    page.find_element(By.ID, "go").click()
    wait(page, lambda: "bad" in page.find_element(By.ID, "says").get_attribute("class"))
    assert "at least 1 keywords" in says(page)
    entries = [entry for entry in page.get_log("browser") if entry["level"] != "DEBUG"]
    assert all("400" in entry["message"] for entry in entries)  # chromium notes the refused request itself


def test_a_phone_needs_no_sideways_scrolling(page: Any, server: Running) -> None:
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        open_page(page, server)
        fill(page, condition="ball", prompt="a man sees", seed="7")
        page.find_element(By.ID, "go").click()
        wait(page, lambda: says(page) == "Written with seed 7.")
        assert page.execute_script("return document.documentElement.scrollWidth") == 360
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_asks_nobody_but_its_own_server(browser: Any, server: Running) -> None:
    browser.get_log("performance")
    open_page(browser, server)
    fill(browser, condition="ball", prompt="a man sees", seed="7")
    browser.find_element(By.ID, "go").click()
    wait(browser, lambda: says(browser) == "Written with seed 7.")
    entries = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        each["params"]["request"]["url"] for each in entries if each["method"] == "Network.requestWillBeSent"
    ]
    assert len(asked) >= 4
    assert all(url.startswith((server.url, "data:")) for url in asked)
    browser.get_log("browser")


def test_a_server_with_a_token_asks_for_it(browser: Any, tmp_path: Path) -> None:
    token = "a token that nobody knows"
    with running(build_served(), ServingConfig(batch_size=4, max_prompt_tokens=24), token) as server:
        browser.get(server.url)
        wait(browser, lambda: says(browser) == "This server asks for a token.")
        fill(browser, token=token + Keys.TAB)
        wait(browser, lambda: browser.find_element(By.ID, "name").text == "small")
        fill(browser, condition="ball", prompt="a man sees", seed="7")
        browser.find_element(By.ID, "go").click()
        wait(browser, lambda: says(browser) == "Written with seed 7.")
    browser.get_log("browser")


# --- pictures -----------------------------------------------------------------------------------------


def take_pictures(url: str, condition: str, folder: Path, seed: str = "11") -> None:
    """The page of a running server, light, dark and on a phone, to be looked at."""
    with tempfile.TemporaryDirectory() as profile:
        browser = open_browser(Path(profile))
        for name, scheme, width in (
            ("light", "light", 1180),
            ("dark", "dark", 1180),
            ("phone", "light", 375),
        ):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            metrics = {"width": width, "height": 1100, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            browser.get(url)
            wait(browser, lambda: browser.find_element(By.ID, "name").text != "…")
            fill(browser, condition=condition, seed=seed)
            browser.find_element(By.ID, "go").click()
            wait(browser, lambda: says(browser) == f"Written with seed {seed}.")
            for token in tokens(browser, "guided")[2:3]:
                webdriver.ActionChains(browser).move_to_element(token).perform()
            browser.save_screenshot(str(folder / f"playground-{name}.png"))
        browser.quit()


if __name__ == "__main__":  # python tests/test_serving_browser.py URL CONDITION FOLDER [SEED]
    take_pictures(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:5])
