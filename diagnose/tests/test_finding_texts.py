"""Tables of texts beside the findings of commands."""

import re
from pathlib import Path

import pytest

import commopt_diagnose
from lightning_commopt.text.findings import read_texts


@pytest.mark.parametrize("module", ["doctor/findings", "topology/findings"])
def test_each_finding_has_a_text(module: str) -> None:
    """If it fails, a finding ends the command with a KeyError, or a text is never printed."""
    source = Path(commopt_diagnose.__file__).parent / f"{module}.py"
    codes = re.findall(r'_finding\((?:"\w+"|severity), f?"([\w{}]+)"', source.read_text())
    texts = read_texts(source.with_suffix(".txt"))
    printed = {code: [name for name in texts if re.fullmatch(re.sub(r"{\w+}", r"\\w+", code), name)] for code in codes}
    assert all(printed.values()), printed
    assert {name for names in printed.values() for name in names} == texts.keys()
    assert all({"try"} < text.keys() <= {"what", "why", "try"} for text in texts.values())
