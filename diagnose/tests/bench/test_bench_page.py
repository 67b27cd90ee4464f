"""The page of a bench: all that was measured, drawn and in numbers, without a server."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from commopt_diagnose.bench.model import LinkModel
from commopt_diagnose.bench.page import bench_charts, write_bench_page
from commopt_diagnose.bench.result import BenchResult, Row
from diagnose_support.sample_bench import case, result_of, sample
from lightning_commopt.text.formatting import number
from support.browser import CHROMIUM, NO_CHROMIUM, opened, started_browser
from support.known import known


def _everything() -> BenchResult:
    return result_of(
        [
            *sample(lambda size: 1e-3 + size / 1.1e8),
            *sample(lambda size: 1e-3 + size / 0.9e8, load="compute"),
            *sample(lambda size: 1e-3 + size / 1e8, operation="broadcast", redop="none"),
            *sample(lambda size: 3e-3 + size / 0.5e8, operation="reduce_broadcast"),
            *sample(lambda size: 5e-3 + size / 4e8, operation="comm_hook", comm_hook="int8", redop="mean"),
            *sample(lambda size: 1e-3 + size / 1e8, scope="across"),
            Row(case=case(64, operation="reduce", dtype="<b>"), error="not </script> here"),
        ]
    )


def test_each_question_has_a_chart_with_the_links_rate() -> None:
    """If it fails, something that was measured is nowhere to be seen, or the rate is not drawn where it is."""
    result = _everything()
    charts = {chart.title: chart for chart in bench_charts(result, LinkModel.fit(result))}
    assert list(charts) == [
        "Bus bandwidth",
        "Time, and the link model",
        "Three equal ways to reduce",
        "Comm hooks: effective bandwidth",
        "all_reduce: alone, and while the device computes",
        "Within and across nodes",
    ]
    plot = known(charts["Bus bandwidth"].plot)
    assert [point.y for point in plot.traces[-1].points] == [0.125, 0.125]
    assert plot.traces[0].points[-1].y == pytest.approx(0.11, rel=0.03)
    times = known(charts["Time, and the link model"].plot).traces
    time_ms = 1e3 * (1e-3 + 2**26 / 1.1e8)
    assert [trace.points[-1].y for trace in (times[0], times[2])] == pytest.approx([time_ms] * 2, rel=0.03)
    shown = [number(trace.points[-1].y) for trace in (times[0], plot.traces[0])]
    assert times[0].points[-1].hover == f"all_reduce, 64M: {shown[0]} ms, {shown[1]} GB/s"
    assert [line.name for line in charts["Comm hooks: effective bandwidth"].lines][:2] == ["all_reduce", "int8"]


def test_the_page_says_what_the_numbers_say(tmp_path: Path) -> None:
    """If it fails, the page lacks numbers, or shows a text of a result as markup."""
    write_bench_page(_everything(), tmp_path / "bench.html")
    page = (tmp_path / "bench.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "int8 pays on this link from 1M on" in page
    assert "not &lt;/script&gt; here" in page
    assert "<b>" not in page.partition("<script>")[0]
    assert page.count("<tr>") == 1 + len(_everything().rows)
    assert "all_reduce (2 ranks): " in page
    write_bench_page(result_of([Row(case=case(2**20), times_s=[1e-3, 2e-3, 3e-3], num_wrong=5)]), tmp_path / "row.html")
    page = (tmp_path / "row.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    cells = re.findall(r"<td[^>]*>([^<]*)", page.partition("<tbody>")[2])
    assert [cell.strip() for cell in cells[-9:]] == [
        *("1 048 576", "262144", "float32", "sum", "2000", "1000 to 3000", "0.524", "0.524", "5")
    ]


@pytest.mark.exhaustive
@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_the_page_draws_itself_and_asks_nobody(tmp_path: Path) -> None:
    """If it fails, a reader without a network sees no charts, or has to scroll sideways on a phone."""
    write_bench_page(_everything(), tmp_path / "bench.html")
    with started_browser() as browser:
        for width in (400, 1280):
            with opened(browser, tmp_path / "bench.html", width=width) as page:
                assert (page.complaints, page.requests) == ([], [])
                assert page.page.locator(".plot > svg").count() >= 6
                assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("known_conditions", [(), ("world_size", "num_nodes", "backend")])
def test_a_result_without_its_conditions_is_shown(known_conditions: tuple[str, ...], tmp_path: Path) -> None:
    """If it fails, a file that a program has shortened ends in a traceback."""
    result = _everything()
    where = {name: result.where[name] for name in known_conditions}
    result = dataclasses.replace(result, where=where, settings={})
    write_bench_page(result, tmp_path / "bench.html")
    text = (tmp_path / "bench.html").read_text(encoding="utf-8")
    assert "measured under conditions that the file does not contain" in text
    assert ("Collectives on 2\N{NO-BREAK SPACE}ranks" in text) == bool(known_conditions)
