"""What the settings need of memory."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_commopt.report.figures.chart import Chart
from lightning_commopt.report.figures.labels import plain
from lightning_commopt.report.figures.rows import new_rows
from lightning_commopt.report.figures.style import PlanStyle
from lightning_commopt.report.figures.units import byte_unit
from lightning_commopt.report.model import Group


def peak_memory(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns a bar for each setting; None with fewer than two."""
    found = [(each, each.peak_memory_bytes) for each in group.settings if each.peak_memory_bytes is not None]
    if len(found) < 2:
        return None
    most = max(peak_bytes for _, peak_bytes in found)
    unit = byte_unit(most)
    texts = [unit.text(peak_bytes) for _, peak_bytes in found]
    rows = new_rows(
        [setting.name for setting, _ in found],
        texts,
        x_title=f"peak memory of the rank that needs most ({unit.name})",
        most=most / unit.size,
    )
    rows.figure.add_bar(
        orientation="h",
        x=[peak_bytes / unit.size for _, peak_bytes in found],
        y=rows.centers,
        width=rows.bar_height,
        marker={"color": [styles[setting.plan_name].color for setting, _ in found]},
        hovertext=[f"<b>{plain(setting.name)}</b><br>{text}" for (setting, _), text in zip(found, texts, strict=True)],
        hoverinfo="text",
    )
    return Chart(
        title="Peak memory",
        note="On a GPU what PyTorch had allocated, else what the process held. In the order of the sweep.",
        figure=rows.figure,
    )
