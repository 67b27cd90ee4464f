"""Each law finds the faults that it is there for."""

from lightning_commopt.compressors import Compressor
from lightning_commopt.testing import laws
from lightning_commopt.testing.law import Law
from lightning_commopt.testing.places import CPU
from lightning_commopt.testing.steps import Setup
from support.faulty_compressors import FAULTS, LOSSY, Faulty
from support.warm_ranks import run_ranks


def _messages_about_averages() -> dict[str, str]:
    return {name: _message(laws.averages, name, compressor) for name, (compressor, _) in LOSSY.items()}


def test_lossy_compressors_are_held_to_what_they_declare_and_must_declare_it() -> None:
    """If it fails, a compressor of somebody else passes, whatever it does to the gradients."""
    for messages in run_ranks(_messages_about_averages):
        for name, (_, expected) in LOSSY.items():
            assert messages[name].startswith(f"{name}: ") == bool(expected)
            assert expected in messages[name]


def _messages_about_faults() -> dict[str, str]:
    return {fault: _message(law, fault, Faulty(fault=fault)) for fault, (law, _) in FAULTS.items()}


def _message(law: Law, name: str, compressor: Compressor) -> str:
    try:
        law(Setup(place=CPU), name, compressor)
    except AssertionError as error:
        return str(error)
    return ""


def test_a_fault_is_found_and_named() -> None:
    """If it fails, training may go wrong with a compressor that obeys all laws, or on a machine that has passed."""
    assert {law for law, _ in FAULTS.values()} == set(laws.LAWS.values())
    for messages in run_ranks(_messages_about_faults):
        for fault, message in messages.items():
            assert message.startswith(f"{fault}: ")
