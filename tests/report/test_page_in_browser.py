"""The page in a real browser: what readers see, on a screen and on a phone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from lightning_commopt.report.model import Report
from lightning_commopt.report.page import write_page
from support.browser import CHROMIUM, NO_CHROMIUM, OpenPage, opened, started_browser
from support.sample_runs import four_methods_report, ladder_report, sample_report
from support.sample_tuning import tuned_report

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]

REPORTS = {"sweep": sample_report, "ladder": ladder_report, "four_methods": four_methods_report, "tuned": tuned_report}

FONTS = {
    "own": "",
    "wide": "font-family: DejaVu Sans, Verdana, sans-serif !important; letter-spacing: 1px !important;",
    "narrow": "font-family: DejaVu Sans Condensed, Arial Narrow, serif !important; letter-spacing: -0.4px !important;",
}

# Texts at the axes of plots and in their bars, as they are on the screen.
LABELS = """() => [...document.querySelectorAll(".plot")].map(plot => ({
    plot: plot.getBoundingClientRect().toJSON(),
    labels: [...plot.querySelectorAll("svg text")].filter(text => text.textContent.trim() && text.checkVisibility(
        {opacityProperty: true, visibilityProperty: true}) && text.getBoundingClientRect().width > 0).map(
        text => ({...text.getBoundingClientRect().toJSON(), text: text.textContent}))
}))"""

# Texts of charts that are HTML, and hang out of their boxes; tables scroll in theirs.
HANGING_OUT = """() => [...document.querySelectorAll("figure *")].filter(
    element => !element.closest(".plot, .scroll, svg") && element.textContent.trim()
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


LOOKS = {
    ("sweep", 400, "wide"): True,
    ("ladder", 400, "wide"): False,
    ("four_methods", 400, "wide"): False,
    ("tuned", 400, "wide"): True,
    ("sweep", 400, "narrow"): False,
    ("ladder", 1280, "own"): False,
    ("four_methods", 1280, "own"): False,
    ("tuned", 1280, "own"): False,
}
"""Each report, width and font, and whether it is looked at by default."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(look, marks=[] if LOOKS[look] else [pytest.mark.exhaustive]) for look in LOOKS],
    ids=str,
)
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
        """[...document.querySelectorAll(".plot")].map(
            plot => plot.querySelectorAll(".trace path, .trace .point path, .bars .point path").length)"""
    )
    assert len(drawn) == page.evaluate("document.querySelectorAll('script[type=\"application/json\"]').length") >= 4
    assert min(drawn) > 0


def test_never_scrolls_sideways(page: OpenPage) -> None:
    """If it fails, a phone shows a page that slides about; tables scroll in their own box."""
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(
        "[...document.querySelectorAll('.plot svg')].every(svg => svg.getBoundingClientRect().right <= innerWidth)"
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


def test_every_axis_has_a_name_and_a_unit(page: OpenPage) -> None:
    figures = page.evaluate(
        """[...document.querySelectorAll("figure")].map(figure => [
            figure.querySelector(".bars, .ytick text").textContent.match(/^-?[\\d.]/) ? 2 : 1,
            ...[...figure.querySelectorAll(".axis")].map(text => text.textContent)])"""
    )
    for num_axes, *titles in figures:
        assert len(titles) == num_axes
        assert all("(" in title for title in titles)


def test_bars_are_as_long_as_their_numbers(sweep: OpenPage, reports: dict[str, Report]) -> None:
    found = sweep.evaluate(
        """(() => {
            const bars = [...document.querySelector(".bars").querySelectorAll(".bar")];
            return bars.map(bar => bar.querySelector(".part").getBoundingClientRect().width);
        })()"""
    )
    rates = [setting.samples_per_s.median for setting in reports["sweep"].groups[0].settings if setting.samples_per_s]
    for width, rate in zip(found, rates, strict=True):
        assert width / max(found) == pytest.approx(rate / max(rates), abs=0.01)


def test_headings_are_in_order(page: OpenPage) -> None:
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(heading => +heading.tagName[1])")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_a_click_sorts_the_table_as_the_numbers_say(sweep: OpenPage, reports: dict[str, Report]) -> None:
    settings = reports["sweep"].groups[0].settings
    by_throughput = sorted(
        settings, key=lambda setting: -(setting.samples_per_s.median if setting.samples_per_s else math.nan)
    )
    header = sweep.page.locator("thead th", has_text="samples/s")
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert _names(sweep) == [setting.name for setting in by_throughput]
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    assert _names(sweep) == [setting.name for setting in reversed(by_throughput)]
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "none"
    assert _names(sweep) == [setting.name for setting in settings]


def test_the_keyboard_sorts_the_table(sweep: OpenPage, reports: dict[str, Report]) -> None:
    settings = reports["sweep"].groups[0].settings
    button = sweep.page.locator("thead th", has_text="exposed").locator("button")
    button.focus()
    sweep.page.keyboard.press("Enter")
    shares = {setting.name: setting.exposed_share.median if setting.exposed_share else math.nan for setting in settings}
    assert _names(sweep) == sorted(shares, key=lambda name: shares[name])
    assert sweep.page.locator("[aria-sort=ascending], [aria-sort=descending]").count() == 1


def test_copies_the_config_lines(sweep: OpenPage, reports: dict[str, Report]) -> None:
    group = reports["sweep"].groups[0]
    setting = group.recommended or group.fastest
    sweep.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = sweep.page.locator(".answers .copy")
    button.click()
    expect(button).to_have_text("Copied")
    assert sweep.evaluate("navigator.clipboard.readText()") == "\n".join(setting.config_lines)


def test_hovering_tells_the_values(sweep: OpenPage) -> None:
    assert "samples/s" in (sweep.page.locator(".bars .part").first.get_attribute("title") or "")
    plot = sweep.page.locator(".plot").first
    plot.scroll_into_view_if_needed()
    plot.locator(".scatterlayer .point").first.hover(force=True)
    sweep.page.wait_for_selector(".hoverlayer .hovertext")
    assert "samples/s" in (plot.locator(".hoverlayer .hovertext").first.text_content() or "")


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
    return page.page.locator(".group tbody th").all_text_contents()


def _is_inside(label: dict[str, float], plot: dict[str, float]) -> bool:
    return (
        label["left"] >= plot["left"] - 1 and label["right"] <= plot["right"] + 1 and label["bottom"] <= plot["bottom"]
    )


def _do_overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    across = min(a["right"], b["right"]) - max(a["left"], b["left"])
    down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
    return across > 1 and down > 1
