"""Published faults of the packages that training stands on, and which installed versions have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """A published fault of a package.

    Attributes:
        name: under which it was published.
        distributions: that have it, as package indexes name them.
        affected: the versions that have it.
        fault: what it is, and what to do about it.
    """

    name: str
    distributions: tuple[str, ...]
    affected: str
    fault: str


ADVISORIES = (
    Advisory(
        name="GHSA-w37p-236h-pfx3",
        distributions=("lightning", "pytorch-lightning"),
        affected=">=2.6.2,<=2.6.3",
        fault="this release was malware: remove it, and renew every password and token that this machine holds",
    ),
    Advisory(
        name="CVE-2026-58659",
        distributions=("lightning", "pytorch-lightning"),
        affected="<2.6.6",
        fault="a checkpoint can run code when load_from_checkpoint reads it: upgrade to 2.6.6,"
        " or load only checkpoints whose origin you trust",
    ),
    Advisory(
        name="GHSA-2cp2-2r3c-7p7r",
        distributions=("hydra-core",),
        affected="<1.3.4",
        fault="a configuration can run code when instantiate reads it, and nothing is blocked before 1.3.4: upgrade,"
        " or read only configurations whose origin you trust",
    ),
)
"""What `warnings` looks for; the worst of a package first."""


def installed_version(distribution: str) -> str | None:
    """Returns the version of a distribution; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def warnings() -> list[str]:
    """Returns a line for each fault that an installed package has."""
    return [
        f"{distribution} {installed}: {advisory.fault} ({advisory.name})"
        for advisory in ADVISORIES
        for distribution, installed in _having(advisory)
    ]


def _having(advisory: Advisory) -> Iterator[tuple[str, str]]:
    affected = SpecifierSet(advisory.affected)
    for distribution in advisory.distributions:
        installed = installed_version(distribution)
        if installed is not None and affected.contains(installed, prereleases=True):
            yield distribution, installed
