"""Makes the pictures in the README from the real app: `python -m tests.app.readme_pictures`."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from kvlite_app.layout import EXAMPLES
from tests.app.conftest import ACCOUNT, ARGS, SLOW, serving

DOCS = Path(__file__).parents[2] / "docs"
# Few enough that a picture is small, with what the page has of the middle range.
COLORS = 128


def picture(page: Any, name: str) -> None:
    """Save what the page shows."""
    path = DOCS / f"{name}.png"
    page.screenshot(path=path)
    with Image.open(path) as shot:
        shot.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


def main() -> None:
    """The sample document being read, an answer with its sources, and that on a phone."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with (
        TemporaryDirectory() as folder,
        serving(Path(folder), "--budget", "10%") as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=found, args=[*ARGS])
        page = browser.new_page(viewport={"width": 1280, "height": 760}, reduced_motion="reduce")
        page.set_default_timeout(10 * SLOW)
        page.goto(server.address)
        page.get_by_text(EXAMPLES[0]["display_text"]).click()
        page.locator("#live tr[data-part='hidden states']").wait_for()
        page.wait_for_function("document.querySelector('#status progress')?.position > 0.4")
        picture(page, "app-reading")
        page.locator(ACCOUNT).wait_for()
        page.get_by_role("tab", name="Answer").click()
        page.locator("#answer figure").wait_for()
        picture(page, "app")
        page.set_viewport_size({"width": 400, "height": 760})
        page.reload()
        page.locator(ACCOUNT).wait_for()
        page.locator("#side:not(.open)").wait_for()
        picture(page, "app-phone")
        browser.close()


if __name__ == "__main__":
    main()
