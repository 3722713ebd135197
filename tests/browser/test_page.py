"""The page in a real browser against the scripted server: what a reader does and what they then see."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.browser.conftest import Chat, scripted, until
from tests.serving import free_port

pytestmark = pytest.mark.browser
Open = Callable[..., Chat]
GONE = "ERR_CONNECTION_|WebSocket connection"
KEY = "ключ with spaces/+="


def test_answer_streams_in_when_a_question_is_entered(open_chat: Open, scripted_url: str) -> None:
    chat = open_chat(scripted_url).wait_ready()
    chat.ask("Count for long")
    lengths = [0]
    for _ in range(3):
        until(lambda: len(chat.text()) > lengths[-1], "the text grows")
        lengths.append(len(chat.text()))
        assert chat.state() == "streaming"
    assert lengths == sorted(set(lengths))
    chat.tab.locator("#stop").click()
    chat.wait_state("done")

    chat.ask("What is the capital of France?")
    chat.wait_state("done")
    assert chat.text() == "The capital of France is Paris."
    assert re.search(r"complete\s+7 tokens\s+2,000 tok/s\s+first token 4.0 ms\s+graphs 6/7\s+pad 0.50", chat.footer())
    assert chat.tab.locator(".question").all_inner_texts() == ["Count for long", "What is the capital of France?"]
    assert chat.shown("model") == "scripted"


@pytest.mark.parametrize("how", ["button", "escape"])
def test_footer_says_cancelled_when_a_long_answer_is_stopped(open_chat: Open, scripted_url: str, how: str) -> None:
    chat = open_chat(scripted_url).wait_ready()
    chat.ask("Count for long")
    until(lambda: "20 " in chat.text(), "twenty numbers")
    assert not chat.tab.locator("#send").is_visible()
    if how == "button":
        chat.tab.locator("#stop").click()
    else:
        chat.tab.keyboard.press("Escape")
    chat.wait_state("done", seconds=3)
    assert chat.footer().startswith("cancelled")
    stopped = chat.text()
    until(lambda: chat.shown("running") == "0", "nothing runs any more")
    assert chat.text() == stopped
    assert chat.tab.locator("#send").is_visible()


def test_conversation_is_sent_along_when_a_second_question_is_asked(open_chat: Open, scripted_url: str) -> None:
    chat = open_chat(scripted_url).wait_ready()
    chat.tab.locator("#settings-toggle").click()
    chat.tab.locator("[name=system]").fill("Be brief.")
    chat.ask("What is the capital of France?")
    chat.wait_state("done")
    chat.ask("recall")
    chat.wait_state("done", 1)
    assert chat.text(1) == (
        "system: Be brief. | user: What is the capital of France? | "
        "assistant: The capital of France is Paris. | user: recall"
    )
    chat.tab.locator("#new-chat").click()
    assert chat.answers() == 0
    chat.ask("recall")
    chat.wait_state("done", 0)
    assert chat.text(0) == "system: Be brief. | user: recall"


def test_settings_reach_the_server_when_they_are_filled_in(open_chat: Open, scripted_url: str) -> None:
    chat = open_chat(scripted_url).wait_ready()
    chat.ask("settings")
    chat.wait_state("done", 0)
    assert chat.text(0).startswith("t=1.0 p=1.0 m=None s=")
    chat.tab.locator("#settings-toggle").click()
    for name, value in {"temperature": "0.5", "top_p": "0.25", "max_tokens": "50", "seed": "7"}.items():
        chat.tab.locator(f"[name={name}]").fill(value)
    chat.ask("settings")
    chat.wait_state("done", 1)
    assert chat.text(1) == "t=0.5 p=0.25 m=50 s=7"
    chat.tab.reload()
    chat.wait_ready()
    chat.ask("settings")
    chat.wait_state("done", 0)
    assert chat.text(0) == "t=0.5 p=0.25 m=50 s=7"


def test_live_strip_moves_when_answers_run_side_by_side(open_chat: Open, scripted_url: str) -> None:
    chat = open_chat(scripted_url).wait_ready()
    chat.tab.locator("#settings-toggle").click()
    chat.tab.locator("[name=parallel]").fill("3")
    chat.tab.locator("[name=seed]").fill("40")
    chat.tab.locator("#prompt").fill("What is your seed?")
    chat.tab.locator("#parallel").click()
    until(lambda: chat.shown("shape") == "4 × 128", "three streams fill four rows")
    until(lambda: chat.shown("running") == "3", "three run")
    assert chat.shown("shape-kind") == "decode"
    assert chat.shown("shape-hit") == "hit"
    assert chat.shown("hit-rate") == "100 %"
    assert chat.shown("kv-text") == "36 of 512"
    cells = chat.tab.locator("#cells i")
    assert [cells.nth(index).get_attribute("class") for index in range(4)] == ["real", "real", "real", "pad"]
    assert float(chat.shown("tokens-per-second")) > 0
    for index in range(3):
        chat.wait_state("done", index)
        assert chat.text(index).startswith(f"My seed is {40 + index}.")
        assert chat.footer(index).startswith(f"seed {40 + index}")
    assert "4 × 128" in chat.tab.locator("#shapes").inner_text()
    until(lambda: chat.shown("running") == "0", "the strip shows the end")

    chat.answer(1).locator(".keep").click()
    chat.ask("recall")
    chat.wait_state("done", 3)
    assert "assistant: My seed is 41." in chat.text(3)


def test_time_line_is_drawn_when_steps_run(open_chat: Open, scripted_url: str) -> None:
    chat = open_chat(scripted_url).wait_ready()
    painted = """canvas => {
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let at = 0; at < data.length; at += 4) count += data[at + 3] > 0 && data[at + 1] - data[at] > 80;
        return count;
    }"""
    canvas = chat.tab.locator("#timeline")
    before = canvas.evaluate(painted)
    chat.ask("Count for long")
    until(lambda: canvas.evaluate(painted) > before + 50, "columns in the colour of real rows")


def test_boot_progress_is_shown_when_the_engine_loads(open_chat: Open) -> None:
    with scripted("--boot-seconds", "0.25") as server:
        chat = open_chat(server.url)
        until(lambda: chat.shown("boot-stage") == "Recording graphs", "the boot bar")
        assert re.fullmatch(r"\d+ of 12", chat.shown("boot-count"))
        assert re.fullmatch(r"about [\d.]+ m?s left", chat.shown("boot-eta"))
        bar = chat.tab.locator("#boot-bar")
        first = float(bar.evaluate("bar => bar.position"))
        assert not chat.tab.locator("#send").is_enabled()
        assert chat.shown("hint") == "Sending opens when the engine is ready: recording graphs."
        chat.ask("What is the capital of France?")
        assert chat.answers() == 0
        assert chat.tab.locator("#prompt").input_value() == "What is the capital of France?"
        until(lambda: bar.evaluate("bar => bar.position") > first, "the bar moves")
        chat.wait_ready()
        assert not chat.tab.locator("#banner").is_visible()
        assert chat.shown("link-text") == "ready"
        chat.tab.locator("#prompt").press("Enter")
        chat.wait_state("done")
        assert "Paris" in chat.text()


def test_reason_stays_when_the_boot_fails_and_the_server_is_gone(open_chat: Open) -> None:
    message = "tensor output.weight is truncated"
    with scripted("--boot-seconds", "0.15", "--boot-failure", message) as server:
        chat = open_chat(server.url)
        chat.provoked.append(GONE)
        assert server.process.wait(10) == 5
    until(lambda: "does not answer" in chat.shown("notice-text"), "a try has failed")
    assert chat.shown("notice-text").startswith(f"The engine failed: {message}. No connection:")
    assert not chat.tab.locator("#send").is_enabled()


def test_page_reconnects_when_the_server_comes_back(open_chat: Open) -> None:
    port = free_port()
    with scripted(port=port) as server:
        chat = open_chat(server.url).wait_ready()
        chat.provoked.append(GONE)
        chat.ask("Count for long")
        until(lambda: "5 " in chat.text(), "an answer under way")
        server.kill()
    chat.wait_state("failed")
    assert "connection was lost" in chat.answer().inner_text()
    assert "1 2 3 4 5 " in chat.text()
    until(lambda: re.search(r"No connection: .*Next try in \d+ s\.", chat.shown("notice-text")), "the notice")
    assert chat.shown("link-text") == "reconnecting"
    assert not chat.tab.locator("#send").is_enabled()
    with scripted(port=port):
        chat.wait_ready(15)
        assert not chat.tab.locator("#banner").is_visible()
        chat.ask("What is the capital of France?")
        chat.wait_state("done", 1)
        assert "Paris" in chat.text(1)


def test_answer_says_so_when_the_server_shuts_down(open_chat: Open) -> None:
    with scripted() as server:
        chat = open_chat(server.url).wait_ready()
        chat.provoked.append(GONE)
        chat.ask("Count for long")
        until(lambda: "5 " in chat.text(), "an answer under way")
        server.process.terminate()
        until(lambda: "shutting down" in chat.shown("hint"), "the state is said")
        chat.wait_state("done")
        assert chat.footer().startswith("server draining")
        assert server.process.wait(5) == 0


def test_model_output_is_inert_when_it_contains_markup(open_chat: Open, scripted_url: str) -> None:
    chat = open_chat(scripted_url).wait_ready()
    chat.ask("hostile")
    chat.wait_state("done")
    body = chat.answer().locator(".answer-text")
    assert "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'>" in chat.text()
    assert body.locator("script, img, a, b").count() == 0
    assert body.locator("strong").all_inner_texts() == ["bold"]
    assert body.locator("p code").all_inner_texts() == ["code"]
    assert body.locator("pre").inner_text() == '<b onclick="x()">  kept </b>'
    assert chat.tab.evaluate("() => window.broken") is None


def test_line_breaks_when_shift_enter_is_pressed(open_chat: Open, scripted_url: str) -> None:
    chat = open_chat(scripted_url).wait_ready()
    prompt = chat.tab.locator("#prompt")
    prompt.fill("What is the capital")
    one_line = prompt.bounding_box()["height"]
    prompt.press("Shift+Enter")
    prompt.press_sequentially("of France?")
    assert chat.answers() == 0
    assert prompt.input_value() == "What is the capital\nof France?"
    assert prompt.bounding_box()["height"] > one_line
    prompt.press("Enter")
    chat.wait_state("done")
    assert prompt.input_value() == ""
    assert prompt.evaluate("node => node === document.activeElement")
    prompt.fill("  \n ")
    prompt.press("Enter")
    assert chat.answers() == 1


def test_server_message_is_shown_in_place_when_a_request_is_refused(open_chat: Open, scripted_url: str) -> None:
    chat = open_chat(scripted_url).wait_ready()
    chat.tab.locator("#settings-toggle").click()
    chat.tab.locator("[name=temperature]").fill("3")
    chat.ask("What is the capital of France?")
    chat.wait_state("failed")
    assert re.search(r"temperature\b.*\b3\b.*\b2\b", chat.answer().locator(".answer-error").inner_text())
    assert "invalid_request_error" in chat.footer()
    chat.tab.locator("#settings-reset").click()
    chat.ask("recall")
    chat.wait_state("done", 1)
    assert chat.text(1) == "user: recall"


def test_partial_answer_stays_when_the_engine_fails_under_it(open_chat: Open, scripted_url: str) -> None:
    chat = open_chat(scripted_url).wait_ready()
    chat.ask("What is the capital of France? Then fail.")
    chat.wait_state("failed")
    assert chat.text() == "The capital of"
    assert "the scripted step raised" in chat.answer().locator(".answer-error").inner_text()
    assert chat.tab.locator("#send").is_enabled()


def test_key_is_asked_for_when_the_socket_is_refused(open_chat: Open) -> None:
    with scripted("--api-key", KEY) as server:
        chat = open_chat(server.url)
        chat.provoked.append("401|Authentication failed")
        until(lambda: chat.tab.locator("#key-form").is_visible(), "the key form")
        assert chat.shown("hint") == "The server wants an API key."
        chat.tab.locator("#key").fill("wrong")
        chat.tab.locator("#key").press("Enter")
        until(lambda: "refused that key" in chat.shown("key-note"), "the wrong key is refused")
        chat.tab.locator("#key").fill(KEY)
        chat.tab.locator("#key-form button").click()
        chat.wait_ready()
        assert not chat.tab.locator("#key-form").is_visible()
        chat.ask("What is the capital of France?")
        chat.wait_state("done")
        assert "Paris" in chat.text()
        chat.tab.reload()
        chat.wait_ready()
        assert "key" not in chat.tab.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_when_the_window_is_360_pixels_wide(open_chat: Open, scripted_url: str, scheme: str) -> None:
    chat = open_chat(scripted_url, viewport={"width": 360, "height": 640}, color_scheme=scheme).wait_ready()
    chat.ask("hostile")
    chat.wait_state("done")
    chat.tab.locator("#settings-toggle").click()
    chat.tab.locator("#live-toggle").click()
    assert chat.fits()
    for name in ("#send", "#prompt", "#settings-toggle", "#new-chat", "#timeline"):
        box = chat.tab.locator(name).bounding_box()
        assert box["x"] >= 0, name
        assert box["x"] + box["width"] <= 360, name
    chat.tab.locator("#live-toggle").click()
    chat.tab.locator("#settings-toggle").click()
    assert chat.tab.locator("#send").bounding_box()["y"] < 640


def test_every_control_has_a_name_when_read_aloud(open_chat: Open, scripted_url: str) -> None:
    chat = open_chat(scripted_url).wait_ready()
    chat.tab.locator("#settings-toggle").click()
    chat.ask("hostile")
    chat.wait_state("done")
    nameless = """() => [...document.querySelectorAll("button, input, textarea")].filter(node =>
        !node.textContent.trim() && !node.labels?.length && !node.getAttribute("aria-label")).map(node => node.id)"""
    assert chat.tab.evaluate(nameless) == []
    assert chat.tab.locator("#log").get_attribute("aria-live") == "polite"
    assert chat.answer().locator(".answer-text").get_attribute("aria-busy") == "false"
