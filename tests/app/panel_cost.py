"""What the app costs an answer's speed: `python -m tests.app.panel_cost`, on a machine that does
nothing else.

The same message is answered by the engine alone, by the app for a program that asks for memory
every second, as the page does, and by the app with the page open in a browser here, which draws the
answer with the same cores where there is no GPU. All in turns, so that the machine's moods are
shared.
"""

import json
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

import kvlite
from tests.app.conftest import ARGS, Server, serving

MESSAGE, TOKENS, ROUNDS = "Tell me a very long story about a lighthouse.", 200, 9


def alone(runner: Any) -> float:
    """Tokens a second of the engine by itself."""
    talk = runner.conversation(max_new_tokens=TOKENS)
    pieces = list(talk.stream(MESSAGE))
    return float(pieces[-1].metrics.decode_tokens_per_s)


def last_speed(server: Server) -> float:
    """Tokens a second of the last answer, as its account has it."""
    files = (server.data / "app").glob("*/*/answers/*.json")
    newest = max(files, key=lambda each: each.stat().st_mtime)
    return float(json.loads(newest.read_text())["ledger"]["decode_tokens_per_s"])


def asked(server: Server) -> float:
    """Of an answer that a program follows, which looks at memory every second."""
    from gradio_client import Client

    client, over = Client(server.address, verbose=False, analytics_enabled=False), threading.Event()

    def look() -> None:
        while not over.wait(1):
            client.predict(api_name="/memory")

    looking = threading.Thread(target=look)
    looking.start()
    client.predict(MESSAGE, "", api_name="/say")
    over.set()
    looking.join()
    return last_speed(server)


def shown(server: Server, browser: Any) -> float:
    """Of an answer that a browser on this machine draws."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(300_000)
    page.goto(server.address)
    page.locator("#live .place").first.wait_for()
    page.wait_for_timeout(6000)  # for the settings to be priced, once, when a page is opened
    page.locator("#new").click()
    page.locator("#box textarea").fill(MESSAGE)
    page.locator("#box textarea").press("Enter")
    page.locator("#chat :has-text('first token')").first.wait_for()
    page.close()
    return last_speed(server)


def main() -> None:
    """Measure, and print medians and ratios."""
    import shutil

    from playwright.sync_api import sync_playwright

    runner = kvlite.load()
    speeds: dict[str, list[float]] = {"alone": [], "a program": [], "a browser here": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), "--max-tokens", str(TOKENS)) as server,
        sync_playwright() as playwright,
    ):
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=[*ARGS])
        for _ in range(ROUNDS):
            speeds["alone"].append(alone(runner))
            speeds["a program"].append(asked(server))
            speeds["a browser here"].append(shown(server, browser))
        browser.close()
    for name, each in speeds.items():
        shares = [speed / usual for speed, usual in zip(each, speeds["alone"], strict=True)]
        figures = ", ".join(f"{speed:.1f}" for speed in each)
        median, share = statistics.median(each), statistics.median(shares)
        print(f"{name}: {median:.1f} tokens/s, {share:.1%} of the round's alone ({figures})")


if __name__ == "__main__":
    main()
