"""Checkpoints of CommOptDiLoCo in Fabric: resumed bit for bit, or from the global weights with a warning."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_commopt.fabric import CommOptDDP, CommOptDiLoCo
from lightning_commopt.sync.checkpoint import KEY
from lightning_commopt.sync.diloco.errors import UnequalStepsError
from support.fabric_training import Net, adam, loss_of, numbers
from support.strategy_models import Params, assert_same
from support.warm_ranks import run_ranks

_STEPS = 9
_OVERLAPPED: dict[str, Any] = {
    "sync_every": 4,
    "fragments": 2,
    "overlap": 1,
    "comm_hook": {"name": "int4", "error_feedback": True, "block_size": 32},
}
_PLAIN: dict[str, Any] = {"sync_every": 4, "outer_momentum": 0.5}


class _Training:
    """A module, its optimizer and a scheduler in Fabric, with what only this rank knows in the state."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        self.fabric.launch()
        self.net = Net()
        bare = adam(self.net)
        self.state: dict[str, Any] = {"step": 0, "seen": [], "model": self.net, "optimizer": bare}
        self.state["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(bare, 0.9)

    def set_up(self) -> "_Training":
        model, optimizer = self.fabric.setup(self.net, self.state["optimizer"])
        self.state |= {"model": model, "optimizer": optimizer}
        return self

    def load(self, path: Path, *names: str) -> dict[str, Any]:
        state = {name: value for name, value in self.state.items() if not names or name in names}
        remainder = self.fabric.load(path, state)
        self.state |= state
        return remainder

    def train(self, until: int, folder: Path | None = None) -> "_Training":
        """Trains until a step; saves after each one if there is a folder."""
        while self.state["step"] < until:
            loss = loss_of(self.state["model"], self.fabric.global_rank, self.state["step"])
            self.fabric.backward(loss)
            self.state["optimizer"].step()
            self.state["optimizer"].zero_grad()
            self.state["scheduler"].step()
            self.state["step"] += 1
            self.state["seen"] = [*self.state["seen"], loss.item()]
            if folder is not None:
                self.fabric.save(folder / str(self.state["step"]), self.state)
        return self

    def finish(self) -> "_Training":
        self.strategy.finish()
        return self


def _resume_everywhere(folder: Path, options: dict[str, Any], steps: list[int]) -> tuple[Params, list[Params]]:
    whole = _Training(CommOptDiLoCo(**options)).set_up().train(_STEPS, folder).finish()
    expected, shown = numbers(whole.net), []
    ended = _Training(CommOptDiLoCo(**options)).set_up().train(steps[0]).finish()
    ended.fabric.save(folder / "ended", ended.state)
    sources = [(str(step), False) for step in steps] + [(str(steps[-1]), True), ("ended", False)]
    for source, loads_first in sources:
        resumed = _Training(CommOptDiLoCo(**options))
        if loads_first:
            resumed.load(folder / source)
            resumed.set_up()
        else:
            resumed.set_up()
            assert KEY not in resumed.load(folder / source)
        with resumed.strategy.global_weights():
            shown.append(numbers(resumed.net))
        resumed.train(_STEPS).finish()
        assert_same(numbers(resumed.net), expected, of=source)
        assert resumed.state["seen"] == whole.state["seen"]
    return expected, shown


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        pytest.param(_OVERLAPPED, [4, 7], id="overlapped"),  # with an exchange under way, and between two
        pytest.param(_OVERLAPPED, [1, 2, 3, 5, 6, 8, 9], id="all_steps", marks=pytest.mark.exhaustive),
        pytest.param({"sync_every": 3}, [2, 3], id="plain", marks=pytest.mark.exhaustive),
    ],
)
def test_resumed_training_equals_the_uninterrupted_one(
    options: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    """If it fails, a part of the state of a round is lost in a checkpoint of Fabric, or mixed up between ranks."""
    (first, shown), (second, _) = run_ranks(_resume_everywhere, tmp_path, options, steps)
    assert_same(first, second)
    plain = Net()
    for step, global_weights in zip(steps, shown, strict=False):
        plain.load_state_dict(torch.load(tmp_path / str(step), weights_only=True)["model"])
        assert_same(numbers(plain), global_weights)


def _save(folder: Path) -> None:
    training = _Training(CommOptDiLoCo(**_PLAIN))
    training.fabric.save(folder / "early", {**training.state, "logger": None})
    training.set_up().train(6, folder)
    training.strategy._saves_comm_state = False
    training.fabric.save(folder / "without", training.state)
    _Training(CommOptDDP()).set_up().train(1, folder / "ddp")


def _resumed(path: Path, *names: str, strategy: Any = None) -> tuple[Params, int, list[str]]:
    """Returns the weights that training resumes with, the steps in its rounds, and what is warned of."""
    training = _Training(strategy or CommOptDiLoCo(**_PLAIN)).set_up()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.load(path, *names)
    weights, num_steps = numbers(training.net), _num_steps(training.strategy)
    training.train(7)
    # Trainings of other cases, which end without finish(), are deleted at any time.
    told = [str(x.message) for x in caught if "without strategy.finish()" not in str(x.message)]
    return weights, num_steps, [text for text in told if "checkpoint" in text]


def _num_steps(strategy: Any) -> int:
    rounds = getattr(strategy, "rounds", None)
    return -1 if rounds is None else rounds.num_steps


def _circumstances(folder: Path) -> dict[str, tuple[Params, int, list[str]]]:
    results = {
        "plan": _resumed(folder / "6", strategy=CommOptDiLoCo(sync_every=5)),
        "model": _resumed(folder / "6", "model"),
        "ddp": _resumed(folder / "6", strategy=CommOptDDP(comm_hook="bf16")),
        "from_ddp": _resumed(folder / "ddp" / "1"),
        "without": _resumed(folder / "without"),
    }
    training = _Training(CommOptDiLoCo(**_PLAIN)).set_up()
    raw = folder / "raw"
    if dist.get_rank() == 0:
        torch.save(torch.load(folder / "6", weights_only=True)["model"], raw)
        (folder / f"{KEY}_ranks" / "6" / "rank_1.ckpt").unlink()
    dist.barrier()
    training.fabric.load_raw(raw, training.state["model"])
    with training.strategy.global_weights():
        results["raw"] = numbers(training.net), _num_steps(training.strategy), []
    results["missing"] = _resumed(folder / "6")
    return results


def _on_other_ranks(folder: Path) -> tuple[Params, int, list[str]]:
    return _resumed(folder / "5")


def test_other_circumstances_resume_from_the_global_weights(tmp_path: Path) -> None:
    """If it fails, ranks resume from different states, or a user is not told what is lost."""
    run_ranks(_save, tmp_path)
    assert KEY not in torch.load(tmp_path / "without", weights_only=True)
    first, second = run_ranks(_circumstances, tmp_path)
    first["ranks"], second["ranks"], _ = run_ranks(_on_other_ranks, tmp_path, world_size=3)
    net = Net()
    for case, (weights, _, _) in first.items():
        assert_same(weights, second[case][0], of=case)
        if case != "from_ddp":
            name = {"ranks": "5", "without": "without"}.get(case, "6")
            net.load_state_dict(torch.load(tmp_path / name, weights_only=True)["model"])
            assert_same(weights, numbers(net), of=case)
    steps = {case: num_steps for case, (_, num_steps, _) in first.items()}
    assert steps == {"plan": 0, "model": 0, "ddp": -1, "from_ddp": 0, "without": 0, "raw": 0, "missing": 6, "ranks": 5}
    reasons = {
        "plan": "because it was saved with another plan, ",
        "ddp": "because it was saved by CommOptDiLoCo",
        "from_ddp": "because it was saved by another strategy. They lose",
        "missing": "because the file of rank 1 cannot be read (FileNotFoundError: ",
        "ranks": "because it was saved with a world size of 2, which is 3 now. They lose",
    }
    for case, (_, _, told) in first.items():
        assert len(told) == (case in reasons), case
        assert reasons.get(case, "") in "".join(told)


def _unequal(folder: Path) -> list[str]:
    training = _Training(CommOptDiLoCo(**_PLAIN)).set_up()
    training.train(1 + training.fabric.global_rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.fabric.save(folder / "unequal", training.state)
        training.finish()
        training.fabric.save(folder / "equal", {**training.state, "step": 9})
    _Training(CommOptDiLoCo(**_PLAIN)).set_up().train(1, folder)
    with warnings.catch_warnings(record=True) as parted:
        warnings.simplefilter("always")
        remainder = _Training(CommOptDiLoCo(**_PLAIN)).set_up().load(folder / "1", "optimizer")
    assert {*remainder} == {"model", "scheduler", "seen", "step"}
    return [str(x.message) for x in (*caught, *parted)]


def test_what_cannot_be_resumed_exactly(tmp_path: Path) -> None:
    """If it fails, a rank resumes in another step than the others, or with the optimizer of another without a word."""
    told, _ = run_ranks(_unequal, tmp_path)
    texts = [text for text in told if "steps (1, 2)" in text or "DiLoCo" in text]
    assert ["different numbers of steps (1, 2)" in texts[0], "rank 0's optimizers" in texts[-1]] == [True, True]
    assert KEY not in torch.load(tmp_path / "unequal", weights_only=True)


def _train_and_save(training: _Training, num_steps: int, path: Path) -> None:
    training.train(num_steps)
    training.fabric.save(path, {"model": training.state["model"]})


def _save_amid_an_exchange(folder: Path) -> str:
    training = _Training(CommOptDiLoCo(**_PLAIN)).set_up()
    with pytest.raises(UnequalStepsError) as caught:
        _train_and_save(training, 3 + training.fabric.global_rank, folder / "unequal")
    return str(caught.value)


def test_a_checkpoint_while_another_rank_waits_in_an_exchange(tmp_path: Path) -> None:
    """If it fails, a rank that has left out a step saves, and waits for the others until the timeout."""
    for told in run_ranks(_save_amid_an_exchange, tmp_path, group_timeout_s=20):
        assert "rank 0 is after step 3, rank 1 is at step 4" in told


def _change_and_resume(folder: Path) -> tuple[Params, Params, list[str]]:
    ended = _Training(CommOptDiLoCo(**_PLAIN)).set_up().train(5).finish()
    with torch.no_grad():
        for parameter in ended.net.parameters():
            parameter.add_(1.0)
    given = numbers(ended.net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ended.fabric.save(folder / "given", ended.state)
    resumed = _Training(CommOptDiLoCo(**_PLAIN)).set_up()
    resumed.load(folder / "given")
    return numbers(resumed.net), given, [str(x.message) for x in caught]


def test_weights_that_a_module_is_given_after_finish_are_those_to_resume_from(tmp_path: Path) -> None:
    """If it fails, a training resumes from other weights than those in its checkpoint."""
    ranks = run_ranks(_change_and_resume, tmp_path)
    for resumed, given, _ in ranks:
        assert_same(resumed, given)
    assert "has the weights that the model was given after strategy.finish()" in ranks[0][2][0]
