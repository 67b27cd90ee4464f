import re
from dataclasses import replace

import pytest

from lightning_commopt.report.build import build_report
from lightning_commopt.report.terminal import print_report
from support.known import known
from support.narrow import printed
from support.sample_runs import save_run


def _printed(report, width: int) -> str:  # type: ignore[no-untyped-def]
    return printed(lambda console: print_report(report, console), width, is_terminal=False)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_nothing_is_cut_off(report, width):
    printed = _printed(report, width)
    assert "…" not in printed
    numbers = re.findall(r"[\d.]+", printed)
    for group in report.groups:
        for setting in group.settings:
            assert f"{known(setting.samples_per_s).median:.0f}" in numbers
            if setting.val_loss is not None:
                assert f"{setting.val_loss.median:.3f}" in numbers
        for sentence in group.answer:
            assert sentence in printed


def test_the_lines_to_paste_and_the_figures_of_others_are_there(ladder):
    printed = _printed(ladder, 100)
    assert "Published by others, on their hardware (write-up on ViT-L/32 on 8x L40S and 8x A100):" in printed
    assert "  bf16: +65 % on 8x L40S (PCIe); slower on 8x A100 (NVLink)" in printed
    assert "  comm_hook: bf16" in printed
    assert "99 (bf16) failed: ValueError: x" in printed


def test_a_table_fits_into_80_columns(sweep):
    lines = _printed(sweep, 80).splitlines()
    assert any(line.startswith(" setting ") for line in lines)
    assert max(len(line) for line in lines[:20]) <= 80


def test_names_are_no_markup(sweep):
    assert "warning: [red]x[/red]" in _printed(replace(sweep, problems=("[red]x[/red]",)), 80)


def test_without_throughput_none_is_the_highest(tmp_path):
    save_run(tmp_path / "0", "variant=bf16")
    save_run(tmp_path / "1", "variant=one_bucket")
    assert "highest throughput" not in _printed(build_report([tmp_path]), 80)


def test_a_link_is_said_with_the_table_and_in_the_answer(tmp_path):
    """If it fails, speeds over a link of the network lab are taken for those of the machine."""
    for number, (comm_hook, rate) in enumerate((("none", 100.0), ("bf16", 150.0))):
        overrides = (f"strategy/comm_hook={comm_hook}", "link=200mbit")
        save_run(tmp_path / str(number), *overrides, sync_method=comm_hook, samples_per_s=rate)
    report = build_report([tmp_path])
    assert "over a link of 200 Mbit/s" in report.groups[0].answer[1]
    shown = _printed(report, 100)
    assert "hosts with 200 Mbit/s between them" in shown
    assert "measured once" in shown
