"""The self-test passes here, and finds faults that are put in."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_commopt.commands.selftest import laws
from lightning_commopt.commands.selftest.checks import candidates
from lightning_commopt.commands.selftest.steps import Setup
from lightning_commopt.compressors import AfterSteps, Claims, Compressor, ErrorFeedback, Layout, Rounds, State
from lightning_commopt.compressors.channel import Channel
from support.commopt import commopt, refusal
from support.own_compressors import Averages
from support.ranks import run_ranks


@dataclass(frozen=True, kw_only=True)
class Faulty(Averages):
    """All-reduces, and then does something wrong.

    Attributes:
        fault: what.
        hidden: what should be in the state, and is not.
    """

    fault: str
    hidden: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    claims = Claims(is_lossy=False)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Averages, with the fault."""
        yield channel.all_reduce(flat.div_(channel.size))
        self.hidden.append(flat.clone())
        if self.fault == "talkative":
            yield channel.all_reduce(torch.zeros(1))
        else:
            _, damage = _FAULTS[self.fault]
            damage(flat, self.hidden)

    def reference(self, shares: Tensor, layout: Layout, state: State) -> tuple[Tensor, Tensor]:
        """Averages without a fault."""
        return shares.mean(0), shares


_FAULTS: dict[str, tuple[laws.Law, Callable[[Tensor, list[Tensor]], object]]] = {
    "inexact": (laws.averages, lambda flat, hidden: flat.mul_(1.001)),
    "inexact vectors": (laws.small_and_unused, lambda flat, hidden: flat.mul_(1.001)),
    "almost exact": (laws.as_ddp, lambda flat, hidden: flat.mul_(1 + 2e-5)),
    "unlike its reference": (laws.as_reference, lambda flat, hidden: flat.mul_(1.01)),
    "unequal": (laws.ranks_agree, lambda flat, hidden: flat.add_(dist.get_rank(), alpha=1e-7)),
    "talkative": (laws.bytes_as_declared, lambda flat, hidden: None),
    "poisoned": (laws.overflow, lambda flat, hidden: flat.add_(torch.stack(hidden).sum(0), alpha=1e-12)),
    "leaky": (laws.tiny, lambda flat, hidden: None if flat.any() else flat.add_(1e-9)),
    "forgetful": (laws.resume, lambda flat, hidden: flat.add_(len(hidden), alpha=1e-6)),
}
"""The law that finds a fault; and what the fault does to averages ``(n,)``, given those of all steps."""


@dataclass(frozen=True, kw_only=True)
class Lossy(Averages):
    """A user's, inexact by a factor, which is an error of that share.

    Attributes:
        factor: of the averages.
        error_bound: that it declares.
    """

    factor: float
    error_bound: float | None = None

    @property
    def claims(self) -> Claims:
        """Lossy."""
        return Claims(error_bound=self.error_bound)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Averages, and keeps a part of it; the residual is right only with the factor 0."""
        if residual is not None:
            flat.add_(residual)
            residual.copy_(flat)
        yield channel.all_reduce(flat.div_(channel.size))
        flat.mul_(self.factor)


_LOSSY: dict[str, tuple[Compressor, str]] = {
    "unbounded": (Lossy(factor=0.99), "is lossy and declares no error_bound"),
    "wrapped": (AfterSteps(inner=Lossy(factor=0.99), start_step=1), "is lossy and declares no error_bound"),
    "within": (Lossy(factor=0.99, error_bound=0.011), ""),
    "beyond": (
        Lossy(factor=0.99, error_bound=0.009),
        "an average is off by 0.01 in the 2-norm, its error_bound is 0.009",
    ),
    "nothing": (ErrorFeedback(inner=Lossy(factor=0.0, error_bound=1.0)), "an average is off by 1 in the 2-norm"),
    "leaking": (ErrorFeedback(inner=Lossy(factor=0.9, error_bound=0.2)), "of the gradients is neither in the averages"),
}


def _messages_about_averages() -> dict[str, str]:
    return {name: _message(laws.averages, name, compressor) for name, (compressor, _) in _LOSSY.items()}


def test_lossy_compressors_are_held_to_what_they_declare_and_must_declare_it() -> None:
    """If it fails, the self-test passes whatever a compressor of somebody else does to the gradients."""
    for messages in run_ranks(_messages_about_averages):
        for name, (_, expected) in _LOSSY.items():
            assert messages[name].startswith(f"{name}: ") == bool(expected)
            assert expected in messages[name]


def _messages_about_faults() -> dict[str, str]:
    return {fault: _message(law, fault, Faulty(fault=fault)) for fault, (law, _) in _FAULTS.items()}


def _message(law: laws.Law, name: str, compressor: Compressor) -> str:
    (place,) = candidates("cpu")
    try:
        law(Setup(place=place), name, compressor)
    except AssertionError as error:
        return str(error)
    return ""


def test_a_fault_is_found_and_named() -> None:
    """If it fails, the self-test passes on a machine where training is wrong."""
    assert {law for law, _ in _FAULTS.values()} == set(laws.LAWS.values())
    for messages in run_ranks(_messages_about_faults):
        for fault, message in messages.items():
            assert message.startswith(f"{fault}: ")


@pytest.mark.exhaustive
def test_the_command(tmp_path: Path) -> None:
    """If it fails, gradient sync is broken on this machine, or the command is."""
    commopt("selftest", "--device", "cpu", "--output", tmp_path / "selftest.json")
    written = json.loads((tmp_path / "selftest.json").read_text())
    num_of_fsdp2 = sum(outcome["name"].startswith("FSDP2") for outcome in written["outcomes"])
    assert num_of_fsdp2
    num_passed = 10 + (num_of_fsdp2 if hasattr(FSDPModule, "set_custom_reduce_scatter") else 0)
    statuses = Counter(outcome["status"] for outcome in written["outcomes"])
    assert statuses == {"passed": num_passed, "not checked": len(written["outcomes"]) - num_passed}
    assert len(written["outcomes"]) == 12 + num_of_fsdp2
    assert written["info"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(("output", "words"), [(".", "it is a folder"), ("nowhere/self.json", "there is no folder")])
def test_a_file_that_cannot_be_written_is_reported_first(output: str, words: str) -> None:
    """If it fails, minutes of checks end in an error, and nobody sees what they found."""
    line = refusal("selftest", "--device", "cpu", "--output", output)
    assert line.startswith(f"commopt: {output} cannot be written: {words}")


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_a_device_that_there_is_not(device: str) -> None:
    """If it fails, a wrong --device ends in a traceback."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    assert device in commopt("selftest", "--device", device, status=2).output
