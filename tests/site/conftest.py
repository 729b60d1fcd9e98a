"""A browser of this machine, and what is noted of the pages that it opens.

Without one these tests are skipped, in a sentence: Debian's package is `chromium`.
"""

import shutil
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"


@pytest.fixture(scope="module")
def browser():
    """Closed with its module: while it lives, asyncio.run works nowhere else in this process."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("No browser is here: install chromium to test the pages in it.")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


class Noted:
    """A page of the browser; `wrong` is what a reader would not want to happen there."""

    def __init__(self, page):
        self.page, self.wrong = page, []
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", self._said)
        page.on("request", self._asked)
        page.on("requestfailed", lambda request: self.wrong.append(f"failed: {request.url}"))

    def _said(self, message):
        # The theme says so on its first page, before it has stored a choice.
        if message.type == "error" and "Resetting to auto" not in message.text:
            self.wrong.append(f"console: {message.text}")

    def _asked(self, request):
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.wrong.append(f"network: {request.url}")

    def open(self, file: Path, more: str = ""):
        self.page.goto(file.as_uri() + more)
        return self.page


@pytest.fixture
def noted(browser):
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    yield Noted(context.new_page())
    context.close()


@pytest.fixture
def shoot(noted):
    """Writes a screenshot of what is open to build/screenshots, which CI keeps."""

    def write(name):
        SHOTS.mkdir(parents=True, exist_ok=True)
        noted.page.screenshot(path=SHOTS / f"{name}.png")

    return write
