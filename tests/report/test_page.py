"""The page as text: one file, nothing from outside, nothing of the user's taken for markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.report.build import build_report
from lightning_commopt.report.config_lines import config_forms
from lightning_commopt.report.figures.decision import WITHOUT_LOSS
from lightning_commopt.report.model import Group, Report, Run, difference_in_words
from lightning_commopt.report.page import write_page
from support.known import known
from support.sample_runs import save_rates, save_run, write_sweep

RATES = {"none": [100.0, 101.0, 99.0], "bf16": [150.0, 152.0, 148.0]}
EVIL = "<script>alert('1')</script> & <b>bold</b> {{ 7 * 7 }}"


class _Elements(HTMLParser):
    """Collects the elements of a page, and the text outside of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        shown = "" if self._open in ("script", "style") else data
        self.text += shown.replace("\N{NO-BREAK SPACE}", " ")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    @property
    def shown(self) -> str:
        """The text as a browser breaks it anew."""
        return re.sub(r"\s+", " ", self.text)


_PAGES: list[tuple[Report, tuple[str, _Elements]]] = []


def _written(report: Report, folder: Path) -> tuple[str, _Elements]:
    """Returns the page of a report, which is written once."""
    for earlier, written in _PAGES:
        if earlier is report:
            return written
    write_page(report, folder / "report.html")
    page, elements = (folder / "report.html").read_text(encoding="utf-8"), _Elements()
    elements.feed(page)
    _PAGES.append((report, (page, elements)))
    return page, elements


def _only_failures(error: str | None = "ValueError: x") -> Report:
    run = Run(
        folder=Path("sweep/0"),
        name="0",
        setting="bf16",
        record=RunRecord(status="failed", sync_method="x", error=error),
    )
    return Report(title="Failures", groups=(), failed=(run,), problems=("it rained",), conditions={"torch": "2.15.0"})


def test_has_everything_in_it(ladder: Report, tmp_path: Path) -> None:
    """If it fails, the page is not whole without a network."""
    page, elements = _written(ladder, tmp_path)
    assert len(page) <= 300_000
    sources = [attributes.get("src") or attributes.get("href") or "" for _, attributes in elements.elements]
    assert [source for source in sources if source and not source.startswith(("#", "data:"))] == []
    policy = known(next(element["content"] for _, element in elements.elements if element.get("http-equiv")))
    assert "default-src 'none'" in policy
    assert elements.elements[0] == ("html", {"lang": "en"})


def test_headings_are_in_order_and_axes_have_units(report: Report, tmp_path: Path) -> None:
    page, elements = _written(report, tmp_path)
    levels = [int(tag[1]) for tag, _ in elements.elements if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    axes = re.findall(r'class="[^"]*\baxis\b[^"]*">([^<]*)<', page)
    assert len(axes) >= page.count("<figure")
    assert all("(" in axis for axis in axes)


def test_says_the_answer_first(ladder: Report, tmp_path: Path) -> None:
    page, elements = _written(ladder, tmp_path)
    group = ladder.groups[0]
    setting = group.recommended or group.fastest
    pasted = config_forms(setting.config_lines)["Python"]
    places = [elements.text.index(text) for text in (ladder.title, "Speed-up against change", *group.answer, pasted)]
    assert places == sorted(places)
    assert page.index("<svg") < page.index('class="lead"') < page.index("<table")
    assert elements.text.index("All settings") > places[-2]


def test_the_table_says_differences_in_words(ladder: Report, tmp_path: Path) -> None:
    """If it fails, who sees no colours does not see what is faster."""
    text = _written(ladder, tmp_path)[1].shown
    for setting in ladder.groups[0].settings:
        if setting.speedup is not None:
            assert f"\N{MULTIPLICATION SIGN} {difference_in_words(setting)}" in text
    assert "published by others, on their hardware" in text
    for setting in ladder.groups[0].settings:
        assert all(figure.label in text and figure.source in text for figure in setting.published)


def test_columns_without_a_value_are_left_out(sweep: Report, tmp_path: Path) -> None:
    full = _written(sweep, tmp_path)[1].shown
    assert "final validation accuracy" in full
    assert "published by others" not in full
    bare = [replace(setting, val_accuracy=None, peak_memory_bytes=None) for setting in sweep.groups[0].settings]
    text = _written(replace(sweep, groups=(_with(sweep.groups[0], bare),)), tmp_path)[1].shown
    assert "final validation loss" in text
    assert "accuracy" not in text
    assert "Peak memory" not in text


def test_a_run_that_diverged_is_named(sweep: Report, tmp_path: Path) -> None:
    changed = [
        replace(setting, val_loss=None, num_diverged=2, samples_per_s=None) for setting in sweep.groups[0].settings
    ]
    text = _written(replace(sweep, groups=(_with(sweep.groups[0], changed),)), tmp_path)[1].shown
    assert "diverged: 2 of 3 runs" in text
    assert "highest median" not in text


def test_a_range_is_not_called_an_interval(sweep: Report, ladder: Report, tmp_path: Path) -> None:
    page, elements = _written(sweep, tmp_path)
    page = page.replace("\N{NO-BREAK SPACE}", " ")
    assert "Medians over repetitions, with ranges of 3 repetitions below" in elements.shown
    assert "range of 3 repetitions: " in page
    assert "error bars are ranges of 3 repetitions" in page
    assert "95 % interval" not in page.replace("the 95 % interval of that median", "")
    assert "MB sent per step and rank" in page
    many = build_report([save_rates(tmp_path / "many", {name: rates * 2 for name, rates in RATES.items()})])
    assert "with 95 % intervals below" in _written(many, tmp_path)[1].shown


def _anchors(elements: _Elements) -> tuple[list[str | None], set[str]]:
    """Returns the ids of a page, and what its links lead to."""
    links = {(attributes["href"] or "")[1:] for tag, attributes in elements.elements if tag == "a"}
    return [attributes["id"] for _, attributes in elements.elements if "id" in attributes], links


def test_several_groups_have_contents_and_a_table_of_all(four_methods: Report, tmp_path: Path) -> None:
    elements = _written(four_methods, tmp_path)[1]
    ids, links = _anchors(elements)
    assert len(ids) == len(set(ids))
    assert {"group-1", "group-2"} <= links <= set(ids)
    assert "Speed-up at a glance" in elements.text


def test_a_single_run_has_a_page(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep", num_repetitions=1)
    text = _written(build_report([tmp_path / "sweep" / "0"]), tmp_path)[1].shown
    assert "Exposed communication" in text
    assert "One step" in text
    assert "Throughput of all settings" not in text
    assert "speed-up over" not in text


def test_without_any_result_the_failures_are_reported(tmp_path: Path) -> None:
    page, elements = _written(_only_failures(), tmp_path)
    assert "No run has finished yet" in elements.text
    assert "ValueError: x" in elements.text
    assert "it rained" in elements.text
    assert len(page) < 100_000
    assert "the process was probably killed" in _written(_only_failures(error=None), tmp_path)[1].shown


def test_texts_of_users_are_never_markup(ladder: Report, tmp_path: Path) -> None:
    """If it fails, a name or an error message can run code in the reader's browser, or break the page."""
    harmless = _written(_renamed(ladder, "name"), tmp_path)[1].elements
    page, evil = _written(_renamed(ladder, EVIL), tmp_path)
    assert [tag for tag, _ in evil.elements] == [tag for tag, _ in harmless]
    assert evil.text.count(EVIL) >= 6
    assert "<script>alert" not in page
    assert "<b>bold" not in page


def test_a_sweep_without_validation_says_so(sweep: Report, tmp_path: Path) -> None:
    """If it fails, readers take speed-ups for free, as no column tells that nobody has looked at the loss."""
    assert WITHOUT_LOSS not in _written(sweep, tmp_path)[1].text
    text = _written(build_report([save_rates(tmp_path / "rates", RATES)]), tmp_path)[1].shown
    assert WITHOUT_LOSS in text
    assert "This sweep has no validation" in text


def test_every_run_has_its_command_duration_and_load(tmp_path: Path) -> None:
    known_run = {"seconds": 95.0, "load_at_start": 0.25, "load_at_end": 2.0, "started_at": "2026-11-21T12:00:00+00:00"}
    for number, comm_hook in enumerate(("none", "bf16")):
        save_run(tmp_path / str(number), f"strategy/comm_hook={comm_hook}", samples_per_s=1.0, **known_run)
    text = _written(build_report([tmp_path]), tmp_path)[1].shown
    assert text.count("2026-11-21 12:00 2 min 0.2 to 2.0 1.00 strategy/comm_hook=") == 2


def test_numbers_stay_with_their_units_but_not_in_what_is_copied(sweep: Report, tmp_path: Path) -> None:
    """If it fails, a line ends between a number and its unit, or a pasted file has blanks that YAML does not know."""
    lines = ("strategy:", "  name: 25 MiB")
    settings = [replace(setting, config_lines=lines) for setting in sweep.groups[0].settings]
    page, _ = _written(replace(sweep, groups=(_with(sweep.groups[0], settings),)), tmp_path)
    assert "25\N{NO-BREAK SPACE}MiB buckets" in page
    assert "25 MiB buckets" not in page
    assert "  name: 25 MiB</pre>" in page
    assert "AMD EPYC, 2\N{NO-BREAK SPACE}cores" in page


def test_sections_and_settings_have_anchors(sweep: Report, tmp_path: Path) -> None:
    ids, links = _anchors(_written(sweep, tmp_path)[1])
    places = [*(f"setting-1-{row}" for row in range(1, 9)), *(f"section-1-{number}" for number in range(1, 6))]
    assert set(places) <= links <= set(ids)


def _with(group: Group, settings: Sequence[object]) -> Group:
    found = tuple(settings)
    return replace(group, settings=found, baseline=found[0], fastest=found[-1], recommended=None)  # type: ignore[arg-type]


def _renamed(report: Report, text: str) -> Report:
    """Returns a report that has a text wherever users have a say."""
    group = report.groups[0]
    settings = [
        replace(setting, name=f"{text} {number}", sync_method=text, config_lines=(text,), published=setting.published)
        for number, setting in enumerate(group.settings)
    ]
    renamed = replace(_with(group, settings), name=text, answer=(text,))
    failed = replace(
        report.failed[0], name=text, setting=text, record=RunRecord(status="failed", sync_method=text, error=text)
    )
    return replace(report, title=text, groups=(renamed,), failed=(failed,), problems=(text,), conditions={text: text})
