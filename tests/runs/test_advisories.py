import pytest

from lightning_commopt.runs import advisories


@pytest.mark.parametrize(
    ("distribution", "version", "published"),
    [
        ("lightning", "2.5.0", ["CVE-2026-58659"]),
        ("lightning", "2.6.1.dev20260201", ["CVE-2026-58659"]),
        ("lightning", "2.6.2", ["GHSA-w37p-236h-pfx3", "CVE-2026-58659"]),
        ("pytorch-lightning", "2.6.3", ["GHSA-w37p-236h-pfx3", "CVE-2026-58659"]),
        ("pytorch-lightning", "2.6.5", ["CVE-2026-58659"]),
        ("lightning", "2.6.6", []),
        ("pytorch-lightning", "2.7.0.dev0", []),
        ("hydra-core", "1.3.2", ["GHSA-2cp2-2r3c-7p7r"]),
        ("hydra-core", "1.3.8", []),
        ("hydra-core", "1.4.0rc3", []),
    ],
)
def test_warnings_name_each_fault_of_what_is_installed(monkeypatch, distribution, version, published):
    """If it fails, a user is not told that an installed release runs a stranger's code."""
    monkeypatch.setattr(advisories, "installed_version", {distribution: version}.get)
    found = advisories.warnings()
    assert len(found) == len(published)
    for line, name in zip(found, published, strict=True):
        assert line.startswith(f"{distribution} {version}: ")
        assert line.endswith(f"({name})")


def test_installed_version_knows_what_is_not_installed():
    assert advisories.installed_version("pytest") == pytest.__version__
    assert advisories.installed_version("no-such-distribution") is None
