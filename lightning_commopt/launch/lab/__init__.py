"""Several hosts with a network of a limited rate between them, on one Linux machine."""

from lightning_commopt.launch.lab.lab import NetLab, parse_rate
from lightning_commopt.launch.lab.namespaces import LabError, why_not
from lightning_commopt.launch.process import RankError

__all__ = ["LabError", "NetLab", "RankError", "parse_rate", "why_not"]
