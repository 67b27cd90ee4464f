"""What commands print fits the terminal: no number is cut in a narrow one, and no encoding ends a command."""

import re
from pathlib import Path

import pytest
from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from lightning_commopt.commands.info.info import collect, print_info
from lightning_commopt.commands.selftest.run import Outcome, print_outcome, progress_lines
from lightning_commopt.report.terminal import print_report
from lightning_commopt.text.terminal import TextConsole, TextTable
from support.narrow import ASCII, check_numbers_are_whole, printed, printed_in_ascii
from support.sample_runs import SampleRun, sample_report, write_run


def table() -> TextTable:
    found = TextTable("name", "value\n(ms)", "what it is", numbers=["value\n(ms)"], title="title 7", caption="below 8")
    found.add_row("first name", "12345678.25", "several words with 1234567890 in them")
    found.add_row("[red]second[/red]", "12.5 %", Text("more"), style="bold")
    return found


def test_a_table_keeps_words_whole() -> None:
    """If it fails, every table of ours cuts or breaks numbers in a narrow terminal."""
    check_numbers_are_whole(lambda console: console.print(table()), 14, 20)
    for width in (14, 20, 40):
        assert "[red]second[/red]" in printed(lambda console: console.print(table()), width).replace("\n", "")


def test_a_table_becomes_a_list_where_it_does_not_fit() -> None:
    lines = [line.rstrip() for line in printed(lambda console: console.print(table()), 30).splitlines()]
    assert lines[:4] == ["title 7, name", "first name", "  value (ms) 12345678.25, what", "  it is several words with"]


def test_a_part_of_the_row_above_is_indented_at_any_width() -> None:
    """If it fails, a narrow terminal has two rows "waiting for others" at the end of a fit that look the same."""
    parts = TextTable("name", "milliseconds", numbers=["milliseconds"], has_rules=False)
    for cells in (("collectives", "4"), ("  waiting for others", "2.5"), ("    in a word", "3"), ("exposed", "1")):
        parts.add_row(*cells)

    def first_column(width: int) -> list[str]:
        lines = printed(lambda console: console.print(parts), width).splitlines()
        return [re.sub(r" +([\d.]+|milliseconds)? *$", "", line) for line in lines]

    assert first_column(30) == ["name", "collectives", "  waiting for", "  others", "    in a word", "exposed"]
    assert [line for line in first_column(20) if line and "milliseconds" not in line] == [
        "name",
        "collectives",
        "  waiting for others",
        "    in a word",
        "exposed",
    ]


def test_no_line_ends_in_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    """If it fails, whoever copies a line of a table gets a tail of spaces, or a space within a line is lost."""
    console = TextConsole()
    console.print(Group(table(), Padding(Text("a  b"), (0, 0, 0, 2))))
    console.print("no line break ", end="")
    console.print("here")
    lines = capsys.readouterr().out.split("\n")
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[-3:] == ["  a  b", "no line break here", ""]
    assert any(re.search(r"first name +12345678.25 ", line) for line in lines)


def test_reports(tmp_path: Path) -> None:
    report = sample_report(tmp_path)
    for group in report.groups:
        object.__setattr__(group.recommended or group.fastest, "config_lines", [])  # to paste: never wrapped
    check_numbers_are_whole(lambda console: print_report(report, console))


def test_other_commands() -> None:
    """`commopt info` and `selftest`."""
    versions = collect() | {"platform": "Linux"}  # a word that is longer than 40 letters breaks
    check_numbers_are_whole(lambda console: print_info(versions, console))
    outcome = Outcome(name="a check of 16 compressors", status="passed", detail="8 steps, 1234567.5 us", seconds=1.0)
    check_numbers_are_whole(lambda console: print_outcome(outcome, console))


@pytest.mark.parametrize("is_forced", [None, True])
def test_progress_in_a_file_is_there_at_once(is_forced: bool | None, tmp_path: Path) -> None:
    """If it fails, `commopt selftest > file` shows nothing for minutes, or in Jupyter only a spinner."""
    path = tmp_path / "output"
    console = Console(file=path.open("w", encoding="utf-8"), force_terminal=is_forced)
    with console.file, progress_lines(console) as on_progress:
        for number in range(2):
            on_progress(f"check {number}")
            assert path.read_text(encoding="utf-8").splitlines()[-1] == f"running: check {number}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("variables", ASCII)
def test_commands_print_in_ascii(variables: dict[str, str], tmp_path: Path) -> None:
    """If it fails, a command dies half way where a terminal or a cron job has no UTF-8."""
    runs = tmp_path / "runs"
    sample_report(runs)
    write_run(tmp_path / "run", SampleRun())
    commands = [
        ["report", str(runs)],
        ["summary", str(tmp_path / "run"), "--num-warmup-steps=0"],
        ["trace", str(tmp_path / "run")],
        ["info"],
        ["report", "--help"],
    ]
    shown = printed_in_ascii(commands, variables)
    assert re.search(r"\d\.\d\dx faster", shown)
