"""A reader in JupyterLab runs a panel, moves a slider, saves, restarts and opens it again."""

import re

import nbformat
import pytest
from nbformat.sign import NotebookNotary

from tests.site.conftest import SHOTS
from tests.site.lab import TOKEN, copied, started

LAB = "notebooks/labs/00_start_here_lab.ipynb"
BEFORE = "rows 16, length 256, model deberta, gpu T4"
AFTER = "rows 32, length 256, model deberta, gpu T4"
# Each thing that a reader could see while the page changes: the settings, the picture, and whether
# it is grey. A picture is told by its bytes, as every change of its widget gives it a new address.
WATCH = """cell => {
    window.told = [];
    window.reading = [];
    const look = () => {
        const [text] = [...cell.querySelectorAll(".widget-html-content")]
            .map(each => each.textContent).filter(each => each.includes("gpu T4"));
        const image = cell.querySelector("img.widget-image");
        const seen = [text, "", image.classList.contains("tight-fit-planning")];
        told.push(seen);
        reading.push(fetch(image.src).then(answer => answer.arrayBuffer())
            .then(bytes => crypto.subtle.digest("SHA-256", bytes))
            .then(digest => { seen[1] = new Uint8Array(digest).join(); }));
    };
    look();
    new MutationObserver(look).observe(
        cell, {subtree: true, childList: true, attributes: true, characterData: true});
}"""
PATIENCE = 120_000  # milliseconds that a page may take on a busy machine


class Reader:
    """A page with one notebook; `wrong` is what a reader would not want to happen there."""

    def __init__(self, context, address, notebook):
        self.wrong, self.address, self.notebook = [], address, notebook
        book = nbformat.read(notebook, 4)
        self.size, self.text = len(book.cells), "\n".join(cell.source for cell in book.cells)
        self.place = next(n for n, c in enumerate(book.cells) if "def will_it_fit(" in c.source)
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("console", self._said)
        self.page.on("request", self._asked)

    def _said(self, message):
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.wrong.append(f"console: {message.text}")

    def _asked(self, request):
        inside = request.url.startswith((self.address, "data:", "blob:"))
        if not inside and request.url not in self.text:  # the badges are in the notebook
            self.wrong.append(f"network: {request.url}")

    def open(self):
        """The notebook with its kernel ready; returns the cell of the panel."""
        self.page.goto(f"{self.address}/lab/tree/labs/{self.notebook.name}?reset&token={TOKEN}")
        self.expect(self.cells).to_have_count(self.size)
        self.expect(self.page.get_by_role("button", name="| Idle")).to_be_visible()
        self.panel.locator(".jp-OutputArea").scroll_into_view_if_needed()
        return self.panel

    @property
    def cells(self):
        return self.page.locator(".jp-NotebookPanel .jp-Cell")

    @property
    def panel(self):
        return self.cells.nth(self.place)

    def expect(self, locator):
        from playwright.sync_api import expect

        expect.set_options(timeout=PATIENCE)
        return expect(locator)

    def run(self, cell):
        """Run a cell whose outputs are not from this kernel, and wait for the kernel."""
        cell.locator(".jp-InputPrompt").first.click()
        self.page.keyboard.press("Control+Enter")
        self.expect(self.page.get_by_role("button", name="| Idle")).to_be_visible()

    def save(self):
        self.page.keyboard.press("Control+s")
        self.expect(self.page.locator(".jp-mod-dirty")).to_have_count(0)
        return nbformat.read(self.notebook, 4)

    def shoot(self, name):
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"jupyterlab-{name}.png")


@pytest.fixture
def lab(browser, tmp_path):
    """Opens notebooks of a copy of the course, which counts as run by its reader: it is trusted."""
    course, home = copied(tmp_path / "course"), tmp_path / "home"
    notebook = course / LAB
    home.mkdir()
    (home / "data_dir").mkdir()
    notary = NotebookNotary(data_dir=str(home / "data_dir"))
    notary.sign(nbformat.read(notebook, 4))
    notary.store.close()
    with started(course, home) as address:
        context = browser.new_context(viewport={"width": 1400, "height": 1000})
        yield lambda: Reader(context, address, notebook)
        context.close()


@pytest.mark.night
def test_a_panel_answers_and_is_never_lost(lab):
    reader = lab()
    panel = reader.open()
    picture, settings = panel.locator("img.widget-image"), panel.locator(".widget-html-content")
    ended = panel.get_by_text("The kernel that drew this picture has ended")
    answered = settings.filter(has_text=re.compile(f"^{AFTER}$"))

    # The cells that every section needs, and the section with the panel.
    reader.cells.nth(0).get_by_role("heading").click()
    for _ in range(6):
        reader.page.keyboard.press("Shift+Enter")
    reader.expect(reader.cells.nth(5).locator(".jp-InputPrompt").first).to_have_text("[3]:")
    reader.run(panel)
    reader.expect(settings.filter(has_text=re.compile(f"^{BEFORE}$"))).to_be_visible()
    reader.expect(picture).to_be_visible()
    reader.expect(ended).to_be_hidden()

    # A slider is moved: never does the old picture stand below the new settings.
    panel.evaluate(WATCH)
    panel.get_by_role("slider").first.press("ArrowRight")
    reader.expect(answered).to_be_visible()
    reader.expect(panel.locator(".tight-fit-planning")).to_have_count(0)
    told = reader.page.evaluate("Promise.all(reading).then(() => told)")
    old, new = told[0][1], told[-1][1]
    assert told[0] == [BEFORE, old, False] and told[-1] == [AFTER, new, False] and old != new
    assert [f"planning ... {AFTER}", old, True] in told
    assert [AFTER, old, False] not in told and [AFTER, old, True] not in told
    reader.shoot("moved")

    # Saved: the widget with its state. Saved again without its kernel: the picture.
    output = reader.save().cells[reader.place].outputs[0].data
    assert {"application/vnd.jupyter.widget-view+json", "image/png"} < set(output)
    reader.page.get_by_role("button", name="Restart the kernel", exact=True).click()
    reader.page.get_by_role("button", name="Confirm Kernel Restart").click()
    reader.expect(ended).to_be_visible()
    reader.expect(picture).to_be_visible()
    output = reader.save().cells[reader.place].outputs[0].data
    assert set(output) == {"image/png", "text/plain"}
    assert reader.wrong == []
    reader.page.close()

    # Opened again: the picture, and no error.
    reader = lab()
    panel = reader.open()
    reader.expect(panel.locator(".jp-RenderedImage img")).to_be_visible()
    reader.expect(panel.get_by_text("Error displaying widget")).to_have_count(0)
    reader.shoot("reopened")
    assert reader.wrong == []
