"""Records the web page over the demo shop as an animated WebP: search, "More like this", filter, details.

It is next to docs/page.webp, which it writes: `make page-animation`.
"""

import argparse
import io
import os
import sys
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import Locator, Page, ViewportSize, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))  # starting a server is shared with the tests
from index._util.files import atomic_write
from tests.support.browsers import find_browser
from tests.support.processes import run_server

VIEWPORT = (1200, 840)
SIZE = (900, 630)
QUALITY = 80
MOVE_STEPS, STEP_MS = 7, 60
HOVER_MS, CLICK_MS = 300, 200
ARROW = ((0, 0), (0, 25), (6, 20), (10, 29), (14, 27), (10, 18), (18, 18))
# Images below the viewport load only when they are scrolled to.
IS_COMPLETE = """() => !document.querySelector("[aria-busy=true]") && [...document.images].every(
    (image) => image.complete || image.getBoundingClientRect().top > innerHeight)"""


class Recorder:
    """Takes screenshots and draws the pointer on them, which a headless browser does not show."""

    def __init__(self, page: Page) -> None:
        self.frames: list[Image.Image] = []
        self.durations: list[int] = []
        self._page = page
        self._pointer = (VIEWPORT[0] * 0.6, VIEWPORT[1] * 0.6)

    def show(self, milliseconds: int) -> None:
        """Adds the page as it is now, when it has loaded."""
        self._page.wait_for_function(IS_COMPLETE)
        self._page.wait_for_timeout(400)  # the counts of the filters follow the results
        self._add(self._screenshot(), milliseconds)

    def click(self, target: Locator) -> None:
        """Moves the pointer to the middle of an element and clicks it."""
        before = self._screenshot()
        target.hover()
        box = target.bounding_box()
        assert box
        (x, y), end = self._pointer, (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        for step in range(1, MOVE_STEPS):
            share = step / MOVE_STEPS
            share *= share * (3 - 2 * share)  # starts and stops slowly
            self._pointer = (x + share * (end[0] - x), y + share * (end[1] - y))
            self._add(before, STEP_MS)
        self._pointer = end
        hovered = self._screenshot()
        self._add(hovered, HOVER_MS)
        self._add(hovered, CLICK_MS, is_click=True)
        target.click()

    def _screenshot(self) -> Image.Image:
        return Image.open(io.BytesIO(self._page.screenshot(animations="disabled"))).convert("RGB")

    def _add(self, screenshot: Image.Image, milliseconds: int, *, is_click: bool = False) -> None:
        image = screenshot.copy()
        draw = ImageDraw.Draw(image, "RGBA")
        x, y = self._pointer
        if is_click:
            draw.ellipse((x - 24, y - 24, x + 24, y + 24), fill=(10, 110, 81, 90), outline=(10, 110, 81), width=3)
        draw.polygon([(x + dx, y + dy) for dx, dy in ARROW], fill="black", outline="white", width=2)
        self.frames.append(image.resize(SIZE, Image.Resampling.LANCZOS))
        self.durations.append(milliseconds)


def record(address: str, browser_path: str, example: str, choice: str) -> Recorder:
    """Plays the scenes in a browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        viewport = ViewportSize(width=VIEWPORT[0], height=VIEWPORT[1])
        page = browser.new_page(viewport=viewport, reduced_motion="reduce", color_scheme="light")
        page.goto(address)
        recorder = Recorder(page)
        target = page.locator(f'#examples button[aria-label*="{example}"]').first
        target.wait_for()
        recorder.show(1200)
        recorder.click(target)
        recorder.show(1600)
        recorder.click(page.locator("#results .similar").nth(1))
        recorder.show(1400)
        recorder.click(page.locator("#facets .chip", has_text=choice).first)
        recorder.show(1400)
        recorder.click(page.locator("#results .details").first)
        recorder.show(2000)
        browser.close()
    return recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", type=Path, default=Path("demo"), help="folder of the demo (default: demo)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("page.webp"), help="file to write")
    parser.add_argument("--example", default="teapot", help="part of the name of the photo (default: teapot)")
    parser.add_argument("--filter", default="handbag", help="value to filter by (default: handbag)")
    options = parser.parse_args()
    browser_path = find_browser()
    if browser_path is None:
        sys.exit("Chromium or Chrome is not on the PATH. Install it: apt-get install chromium")
    gallery, examples = options.demo / "gallery", options.demo / "examples"
    if not gallery.is_dir() or not examples.is_dir():
        sys.exit(f"{options.demo} has no demo. Build it: lookalike demo --no-serve --dir {options.demo}")
    os.environ["LOOKALIKE_LOG_LEVEL"] = "error"
    with run_server("serve", "--gallery", gallery, "--examples", examples) as address:
        recorder = record(address, browser_path, options.example, options.filter)
    first, *others = recorder.frames
    animation = {"save_all": True, "append_images": others, "duration": recorder.durations, "loop": 0}
    with atomic_write(options.out) as file:
        first.save(file, "WEBP", quality=QUALITY, method=6, kmin=0, kmax=0, **animation)
    print(f"{options.out}: {sum(recorder.durations) / 1000:.1f} s, {options.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
