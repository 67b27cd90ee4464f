"""The command with which further ranks of a Hydra multirun's job start."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_commopt.launcher import _quoted


@pytest.mark.parametrize(
    "value", ["plain", "with space", "a=b,c", 'a "b"', "ends in \\", 'x\\"y', "a\\b", "12_0", "0", "", "é", 3]
)
def test_values_survive_hydras_grammar(value: object) -> None:
    """If it fails, a job whose directory or name has such characters cannot start its further ranks."""
    override = OverridesParser.create().parse_override(f"key={_quoted(value)}")
    assert override.value() == value
    assert not override.is_sweep_override()
