"""What the settings need of memory."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_commopt.report.figures.chart import Bar, Chart, Part
from lightning_commopt.report.figures.style import PlanStyle
from lightning_commopt.report.model import Group
from lightning_commopt.text.formatting import byte_unit


def peak_memory(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns a bar for each setting; None with fewer than two."""
    found = [(each, each.peak_memory_bytes) for each in group.settings if each.peak_memory_bytes is not None]
    if len(found) < 2:
        return None
    most = max(peak_bytes for _, peak_bytes in found)
    unit = byte_unit(most)
    bars = []
    for setting, peak_bytes in found:
        text = unit.text(peak_bytes)
        part = Part(0, peak_bytes / most, f"{setting.name}: {text}", color=styles[setting.sync_method].color)
        bars.append(Bar(setting.name, text, (part,)))
    return Chart(
        title="Peak memory",
        note="On a GPU what PyTorch had allocated, else what the process held. In the order of the sweep.",
        x_title=f"peak memory of the rank that needs most ({unit.name})",
        bars=tuple(bars),
    )
