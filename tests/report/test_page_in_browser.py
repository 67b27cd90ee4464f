"""The page in a real browser: what readers see, on a screen and on a phone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from lightning_commopt.report.build import build_report
from lightning_commopt.report.config_lines import config_forms
from lightning_commopt.report.model import Report
from lightning_commopt.report.page import write_page
from support.browser import CHROMIUM, NO_CHROMIUM, OpenPage, opened, started_browser
from support.sample_runs import four_methods_report, ladder_report, sample_report, save_run
from support.sample_tuning import tuned_report

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]

REPORTS = {"sweep": sample_report, "ladder": ladder_report, "four_methods": four_methods_report, "tuned": tuned_report}

FONTS = {
    "own": "",
    "wide": "font-family: DejaVu Sans, Verdana, sans-serif !important; letter-spacing: 1px !important;",
    "narrow": "font-family: DejaVu Sans Condensed, Arial Narrow, serif !important; letter-spacing: -0.4px !important;",
}

# Numbers at the axes of plots and timelines, and words beside points, as they are on the screen.
LABELS = """() => [...document.querySelectorAll(".plot, .lanes")].filter(plot => plot.checkVisibility()).map(plot => ({
    plot: plot.getBoundingClientRect().toJSON(),
    labels: [...plot.querySelectorAll(".xtick, .ytick, text")].map(
        text => ({...text.getBoundingClientRect().toJSON(), text: text.textContent}))
}))"""

# Texts of charts that are HTML, and hang out of their boxes; tables scroll in theirs.
HANGING_OUT = """() => [...document.querySelectorAll("figure *")].filter(
    element => !element.closest(".plot, .lanes, .scroll, svg") && element.textContent.trim()
        && !element.matches("script, noscript")
        && element.getBoundingClientRect().right > element.closest("figure").getBoundingClientRect().right + 1)
    .map(element => element.textContent.trim().slice(0, 60))"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in REPORTS.items()}


@pytest.fixture(scope="module")
def paths(reports: dict[str, Report], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, report in reports.items():
        write_page(report, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in reports}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as browser:
        yield browser


LOOKS = [
    *((name, 400, "wide") for name in REPORTS),
    ("sweep", 400, "narrow"),
    *((name, 1280, "own") for name in ("ladder", "four_methods", "tuned")),
]


@pytest.fixture(scope="module", params=LOOKS, ids=str)
def page(request: pytest.FixtureRequest, browser: Browser, paths: dict[str, Path]) -> Iterator[OpenPage]:
    name, width, font = request.param
    with opened(browser, paths[name], width=width, font=FONTS[font]) as page:
        yield page


@pytest.fixture(scope="module")
def sweep(browser: Browser, paths: dict[str, Path]) -> Iterator[OpenPage]:
    with opened(browser, paths["sweep"]) as page:
        yield page


def test_neither_complains_nor_asks_for_anything(page: OpenPage) -> None:
    """If it fails, the page is broken for those who open it offline."""
    assert page.complaints == []
    assert page.requests == []


def test_all_charts_are_drawn_with_data(page: OpenPage) -> None:
    drawn = page.evaluate(
        """[...document.querySelectorAll(".plot, .lanes, .bars")].map(chart => [...chart.querySelectorAll(
            ".trace use, .trace polyline, .part")].filter(mark => mark.getBoundingClientRect().width > 0).length)"""
    )
    assert len(drawn) >= 4
    assert min(drawn) > 0


def test_never_scrolls_sideways(page: OpenPage) -> None:
    """If it fails, a phone shows a page that slides about; tables scroll in their own box."""
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(
        "[...document.querySelectorAll('.plot > svg')].every(svg => svg.getBoundingClientRect().right <= innerWidth)"
    )


def test_no_label_covers_another_or_leaves_its_chart(page: OpenPage) -> None:
    """If it fails, readers whose font is wider or narrower than ours cannot read a chart."""
    charts = page.evaluate(LABELS)
    assert len(charts) >= 4
    for chart in charts:
        labels = chart["labels"]
        assert labels
        outside = [label["text"] for label in labels if not _is_inside(label, chart["plot"])]
        assert outside == []
        covered = [(a["text"], b["text"]) for at, a in enumerate(labels) for b in labels[:at] if _do_overlap(a, b)]
        assert covered == []
    assert page.evaluate(HANGING_OUT) == []


def test_a_click_sorts_the_table_as_the_numbers_say(sweep: OpenPage, reports: dict[str, Report]) -> None:
    settings = reports["sweep"].groups[0].settings
    by_throughput = sorted(
        settings, key=lambda setting: -(setting.samples_per_s.median if setting.samples_per_s else math.nan)
    )
    header = sweep.page.locator(".group > .scroll thead th", has_text="samples/s")
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert _names(sweep) == [setting.name for setting in by_throughput]
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    assert _names(sweep) == [setting.name for setting in reversed(by_throughput)]
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "none"
    assert _names(sweep) == [setting.name for setting in settings]


def test_copies_each_form_of_the_configuration_whole(sweep: OpenPage, reports: dict[str, Report]) -> None:
    """If it fails, what is pasted lacks a line, or is for another place than its tab says."""
    group = reports["sweep"].groups[0]
    forms = config_forms((group.recommended or group.fastest).config_lines)
    assert list(forms) == ["Python", "YAML", "Command line"]
    sweep.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for place, text in forms.items():
        sweep.page.locator(".answers .tabs > label", has_text=place).click()
        button = sweep.page.locator(".answers .copy:visible")
        button.click()
        expect(button).to_have_text("Copied")
        assert sweep.evaluate("navigator.clipboard.readText()") == text


def test_markers_are_where_the_numbers_are(sweep: OpenPage, reports: dict[str, Report]) -> None:
    """If it fails, the picture of the decision shows other speed-ups than the table."""
    centers = sweep.evaluate(
        """[...document.querySelectorAll(".answers .plot use")].map(mark => {
            const box = mark.getBoundingClientRect();
            return [mark.querySelector("title").textContent.split(":")[0].replaceAll("\\u00a0", " "),
                box.left + box.width / 2];
        })"""
    )
    ticks = sweep.evaluate(
        """[...document.querySelectorAll(".answers .plot .xtick")].map(tick => {
            const box = tick.getBoundingClientRect();
            return [Number(tick.textContent), box.left + box.width / 2];
        })"""
    )
    (low, left), (high, right) = ticks[0], ticks[-1]
    shown = {name: low + (high - low) * (at - left) / (right - left) for name, at in centers}
    for setting in reports["sweep"].groups[0].settings:
        speedup = 1.0 if setting.speedup is None else setting.speedup.median
        assert shown[setting.name] == pytest.approx(speedup, abs=0.03)


def test_a_dark_page_is_dark_and_readable(browser: Browser, paths: dict[str, Path]) -> None:
    """If it fails, readers with a dark screen get a white page, or lines that cannot be told from it."""
    with opened(browser, paths["ladder"], color_scheme="dark") as dark:
        assert _contrast(dark, "p", "color") > 4.5
        assert _contrast(dark, ".note", "color") > 4.5
        for plan in range(8):
            dark.evaluate(f"document.querySelector('h1').style.color = 'var(--plan-{plan})'")
            assert _contrast(dark, "h1", "color") > 3
    with opened(browser, paths["ladder"]) as light:
        assert _contrast(light, "p", "color") > 4.5


def test_a_finger_on_a_chart_scrolls_the_page(browser: Browser, paths: dict[str, Path]) -> None:
    """If it fails, readers with a phone are caught in the first chart that fills their screen."""
    with opened(browser, paths["sweep"], width=400, has_touch=True) as phone:
        phone.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
        phone.evaluate("document.querySelector('.plot').scrollIntoView({block: 'center'})")
        before = phone.evaluate("scrollY")
        session = phone.page.context.new_cdp_session(phone.page)
        touches = [
            ("touchStart", [500.0]),
            *(("touchMove", [500.0 - 20 * move]) for move in range(1, 11)),
            ("touchEnd", []),
        ]
        for kind, heights in touches:
            points = [{"x": 200, "y": height} for height in heights]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        for _ in range(50):
            if phone.evaluate("scrollY") > before + 100:
                return
            phone.page.wait_for_timeout(100)
        pytest.fail("the page has not moved")


def _names(page: OpenPage) -> list[str]:
    return page.evaluate("""[...document.querySelector(".group table").querySelectorAll("tbody th")].map(
        name => name.dataset.value.replaceAll("\\u00a0", " "))""")


def _contrast(page: OpenPage, selector: str, prop: str) -> float:
    """Returns the contrast of an element's color with the page's background, as WCAG defines it: from 1 to 21."""
    colors = page.evaluate(
        f"""[getComputedStyle(document.querySelector("{selector}")).{prop},
            getComputedStyle(document.body).backgroundColor].map(
            text => text.match(/[\\d.]+/g).slice(0, 3).map(Number))"""
    )
    low, high = sorted(
        sum(
            weight * (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
            for weight, value in zip((0.2126, 0.7152, 0.0722), [part / 255 for part in color], strict=True)
        )
        for color in colors
    )
    return (high + 0.05) / (low + 0.05)


def _is_inside(label: dict[str, float], plot: dict[str, float]) -> bool:
    return (
        label["left"] >= plot["left"] - 1 and label["right"] <= plot["right"] + 1 and label["bottom"] <= plot["bottom"]
    )


def _do_overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    across = min(a["right"], b["right"]) - max(a["left"], b["left"])
    down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
    return across > 1 and down > 1


def test_all_columns_are_on_paper(browser: Browser, paths: dict[str, Path]) -> None:
    """If it fails, a printed page lacks columns: on A4 with its usual margins there is no box to scroll."""
    for path in paths.values():
        with opened(browser, path, width=718) as page:
            page.page.emulate_media(media="print")
            widths = page.evaluate("[...document.querySelectorAll('.scroll')].map(s => [s.scrollWidth, s.clientWidth])")
            assert [most for most, shown in widths if most > shown] == [], path.name
            assert page.evaluate("document.documentElement.scrollWidth") <= 718


def test_a_long_name_stays_in_its_column(browser: Browser, tmp_path: Path) -> None:
    """If it fails, the name of a setting, such as a path, covers the numbers beside it."""
    for number, name in enumerate(("a", "checkpoint" * 20)):
        save_run(tmp_path / str(number), f"experiment={name}", samples_per_s=100.0 + number, val_loss=2.0)
    write_page(build_report([tmp_path]), tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html") as page:
        too_long = "[...document.querySelectorAll('th, td')].filter(c => c.scrollWidth > c.clientWidth + 1).length"
        assert page.evaluate(too_long) == 0
