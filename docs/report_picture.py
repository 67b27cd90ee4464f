"""Makes a picture of a report, for pages that cannot show the report itself.

python docs/report_picture.py docs/results/ladder.html docs/results/ladder.png
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

_ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


def picture(report: Path, path: Path, width: int, height: int | None) -> None:
    """Opens a report in headless Chromium and saves what it shows.

    Args:
        report: the page.
        path: of the PNG.
        width: of the window in pixels.
        height: of the picture in pixels, from the top; None for the whole page.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("needs chromium on PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(_ARGUMENTS))
        page = browser.new_page(viewport={"width": width, "height": height or 900})
        page.goto(report.resolve().as_uri())
        page.screenshot(path=str(path), full_page=height is None)
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1280, help="in pixels")
    parser.add_argument("--height", type=int, help="in pixels, from the top; the whole page without")
    options = parser.parse_args()
    picture(options.report, options.picture, options.width, options.height)
