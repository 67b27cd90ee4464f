"""The parts of DiLoCo that need no other rank: the outer optimizer, fragments, counts and drift."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_commopt import OptionError
from lightning_commopt.compressors import AllReduce, Compressor
from lightning_commopt.compressors.channel import AloneChannel
from lightning_commopt.plan import CommPlan, DiLoCoPlan
from lightning_commopt.sync.diloco.checkpoint import common_part, rank_part, read_saved
from lightning_commopt.sync.diloco.drift import DriftWatch
from lightning_commopt.sync.diloco.exchange import Arrived, Exchange, GlobalWeights, LocalWeights
from lightning_commopt.sync.diloco.fragments import split_model
from lightning_commopt.sync.diloco.into_model import mix
from lightning_commopt.sync.diloco.outer import OuterSGD, warn_of_few_steps
from lightning_commopt.sync.diloco.report import Report
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.sync.diloco.under_way import DiLoCoError
from lightning_commopt.text.validation import warn_once
from support.every_compressor import COMPRESSORS


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_outer_sgd_is_torchs(momentum: float, nesterov: bool) -> None:
    """If it fails, the outer optimizer is not the one of the papers."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(50, generator=generator, dtype=torch.float64)
    expected = nn.Parameter(weights.clone())
    optimizer = torch.optim.SGD([expected], lr=0.7, momentum=momentum, nesterov=nesterov)
    ours = OuterSGD(lr=0.7, momentum=momentum, nesterov=nesterov)
    buffer = ours.new_buffer(weights)
    for _ in range(5):
        expected.grad = torch.randn(50, generator=generator, dtype=torch.float64)
        weights -= ours.lr * ours.update(buffer, expected.grad.clone())
        optimizer.step()
        torch.testing.assert_close(weights, expected.detach(), rtol=1e-14, atol=1e-14)


class _Transformer(nn.Module):
    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(num_blocks))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0))


@pytest.mark.parametrize("by", ["blocks", "bytes"])
def test_every_trainable_parameter_is_in_one_fragment(by: str) -> None:
    """If it fails, a parameter or a buffer is never exchanged, or twice; blocks are dealt out in turns."""
    model = _Transformer()
    parts = split_model(model, 3, by)
    names = [name for part in parts for name in part.parameters]
    assert sorted(names) == sorted(name for name, x in model.named_parameters() if x.requires_grad)
    buffers = [name for part in parts for name in (*part.floats, *part.integers)]
    assert sorted(buffers) == sorted(name for name, _ in model.named_buffers())
    if by == "blocks":
        for index, part in enumerate(parts):
            blocks = {name.split(".")[1] for name in part.parameters if name.startswith("blocks")}
            assert blocks == {str(index), str(index + 3)}
    sizes = [part.layout.numel for part in parts]
    assert max(sizes) < 2 * min(sizes), sizes


def test_parameters_that_were_trained_stay_in_fragments() -> None:
    """If it fails, a fit that resumes after a callback has frozen a layer divides its model differently."""
    model = _Transformer()
    (part,) = split_model(model, 1, "blocks", trained=["frozen.weight"])
    assert "frozen.weight" in part.parameters
    assert "frozen.bias" not in part.parameters


@pytest.mark.parametrize(
    ("number", "by", "message"),
    [
        (
            9,
            "blocks",
            "fragments=9 is too many: the model has 8 blocks, so use at most fragments=8, or fragment_by='bytes'",
        ),
        (40, "blocks", "use at most fragments=8$"),
        (40, "bytes", "the model has 27 trainable parameters, so use at most fragments=27"),
    ],
)
def test_more_fragments_than_parts_are_refused(number: int, by: str, message: str) -> None:
    """If it fails, a fragment is empty, or the error does not name what fits."""
    with pytest.raises(OptionError, match=message):
        split_model(_Transformer(), number, by)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 4, "fragments": 5}, "so the maximum is fragments=4"),
        ({"sync_every": 4, "overlap": 4}, "so the maximum is overlap=3"),
        ({"sync_every": 0}, "sync_every must be an integer of at least 1, got 0"),
        ({"mixing": 1.0}, "mixing must be a number of at least 0 and below 1, got 1.0"),
        ({"outer_lr": 0}, "outer_lr must be a number above 0, got 0"),
        ({"outer_momentum": True}, "outer_momentum must be a number"),
        ({"fragment_by": "block"}, "fragment_by must be"),
        ({"inner": "fsdp"}, "inner must be 'ddp'"),
        ({"comm_hook": "int5"}, "comm_hook: "),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    """If it fails, a number is rounded in silence, or the error does not name the option and what is allowed."""
    with pytest.raises(OptionError, match=message):
        DiLoCoPlan(**options)


def _rounds(model: nn.Module, **options: Any) -> Rounds:
    return Rounds(DiLoCoPlan(**options), model, Exchange(None, None))


def _unnamed(scale: float) -> Compressor:
    """Returns a compressor of a class that no configuration can name."""

    @dataclass(frozen=True, kw_only=True)
    class Unnamed(AllReduce):  # type: ignore[misc]
        scale: float
        choose: Callable[[], None] = lambda: None  # whose `repr` has an address

    return Unnamed(scale=scale)


def test_a_checkpoint_describes_compressors_without_a_name() -> None:
    """If it fails, a fit with such a compressor ends at its first checkpoint, or resumes with another one."""
    options: dict[str, Any] = {"comm_hook": _unnamed(1.0), "inner": CommPlan(comm_hook=_unnamed(2.0))}
    rounds = _rounds(nn.Linear(2, 1), **options)
    saved = common_part(rounds, "identity", 1)
    own = rank_part(rounds, "identity", 0, {})
    for equal in (options, {"comm_hook": _unnamed(1.0), "outer_lr": 0.5, "inner": CommPlan(comm_hook=_unnamed(2.0))}):
        assert read_saved(saved, DiLoCoPlan(**equal), 0, 1, lambda: own).own is own
    for other in ({"comm_hook": _unnamed(3.0)}, {"inner": CommPlan(comm_hook=_unnamed(3.0))}, {"sync_every": 2}):
        with pytest.warns(UserWarning, match="it was saved with another plan"):
            assert read_saved(saved, DiLoCoPlan(**{**options, **other}), 0, 1, lambda: own).common is None


def test_a_resumed_rank_has_what_it_had_not_sent() -> None:
    """If it fails, what a rank has not sent of its weights, or that it was trained, is lost with each resume."""
    model = nn.Linear(3, 2)
    rounds, resumed = _rounds(model), _rounds(model)
    rounds.fragments[0].carried = torch.arange(8.0)
    rounds.trained.update(["weight"])
    own = rank_part(rounds, "identity", 0, {})
    read_saved(common_part(rounds, "identity", 1), rounds.plan, 0, 1, lambda: own).restore(resumed)
    assert resumed.fragments[0].carried is not None
    assert torch.equal(resumed.fragments[0].carried, torch.arange(8.0))
    assert resumed.trained == {"weight"}
    assert rounds.close()
    assert resumed.close()


def test_a_model_with_other_names_does_not_resume() -> None:
    """If it fails, a model whose layers were renamed or reordered gets the momentum of other parameters."""
    rounds, resumed = _rounds(nn.Linear(3, 2)), _rounds(nn.Sequential(nn.Linear(3, 2)))
    own = rank_part(rounds, "identity", 0, {})
    saved = read_saved(common_part(rounds, "identity", 1), rounds.plan, 0, 1, lambda: own)
    with pytest.warns(UserWarning, match="because the model has other parameters"):
        saved.restore(resumed)
    assert rounds.close()
    assert resumed.close()


def test_what_a_rank_has_not_sent_is_sent_once() -> None:
    """If it fails, what is left of an earlier division of the model is lost, or moves the weights in each exchange."""
    model, outer = nn.Linear(64, 2, bias=False), OuterSGD(lr=1.0, momentum=0.0)
    (fragment,) = split_model(model, 1, "blocks")
    of, exchange = GlobalWeights.of(fragment, outer), Exchange(AloneChannel(2), COMPRESSORS["int8"])
    before, moved = of.weights.clone(), []
    for step in range(3):
        of.carried = torch.ones(128) if step == 1 else of.carried
        unsent = exchange.unsent(of)
        assert (0.0 if unsent is None else float(unsent.mean())) == pytest.approx(float(step == 1), abs=1e-5)
        of.take(exchange.run(of, LocalWeights.of(fragment), Report(1.0), step, outer))
        with torch.no_grad():
            mix(of, 0.0)
        moved.append(float((before - of.weights).mean()))
    assert moved == pytest.approx([0.0, 1.0, 1.0], abs=1e-5)


def test_parameters_that_no_rank_has_trained_get_the_mean_without_momentum() -> None:
    """If it fails, what hooks have changed of frozen parameters is dropped, or overshoots."""
    model, outer = nn.Linear(2, 2), OuterSGD()
    (fragment,) = split_model(model, 1, "blocks")
    of = GlobalWeights.of(fragment, outer)
    local, expected = LocalWeights.of(fragment), of.weights + 2.0
    local.flat.add_(2.0)
    local.trained = ()
    arrived = Exchange(None, None).run(of, local, Report(1.0), 0, outer)
    torch.testing.assert_close(arrived.weights, expected)


def test_buffers_that_are_equal_on_all_ranks_stay_as_they_are() -> None:
    """If it fails, a mean of equal buffers is rounded, and statistics drift with each exchange."""
    buffers = [torch.rand(1000, generator=torch.Generator().manual_seed(0))]
    assert torch.equal(Exchange(AloneChannel(49), None)._mean(buffers)[0], buffers[0])


def test_unfrozen_parameters_keep_what_others_had() -> None:
    """If it fails, a layer that is unfrozen in a fit is never exchanged, or resets the momentum of all others."""
    model = _Transformer()
    rounds = _rounds(model, sync_every=2, overlap=1, fragments=2)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    for _ in range(2):
        with torch.no_grad():
            for x in model.parameters():
                x.add_(x.requires_grad)
        rounds.step()
    assert not rounds.left_out.unfrozen()
    model.frozen.requires_grad_(True)
    rounds.expect_changes()
    model.frozen.requires_grad_(False)  # between two batches, such as modules that take turns
    assert len(rounds.left_out.unfrozen()) == 2
    rounds.divide_again(model)
    assert not rounds.left_out.unfrozen()
    assert not rounds.under_way
    known = {name: values for of in rounds.fragments for name, values in of.fragment.by_name(of.weights).items()}
    momentum = {name: x for of in rounds.fragments for name, x in of.fragment.by_name(of.momentum).items()}  # type: ignore[arg-type]
    # Fragment 1 was exchanged after the first step, fragment 0 after both; the outer step is 0.7 * 1.9.
    moved = {name: float((known[name] - before[name]).mean()) for name in before if "blocks" in name}
    assert {round(x, 4) for x in moved.values()} == {1.33, 2.66}
    for name, distance in moved.items():
        assert momentum[name].mean().item() == pytest.approx(-distance / 1.33, abs=1e-5)
    assert torch.equal(known["frozen.weight"], before["frozen.weight"])
    assert not momentum["frozen.weight"].any()
    assert rounds.close()


def test_residual_moves_to_the_new_fragments() -> None:
    """If it fails, what a compressor has not sent yet is lost when a layer is unfrozen."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)])
    model[2].requires_grad_(False)
    rounds = _rounds(model, sync_every=2, fragments=2, comm_hook=COMPRESSORS["int4_feedback"])
    rounds.fragments[0].carried = torch.arange(20.0)
    rounds.fragments[1].carried = -torch.arange(20.0)
    model[2].requires_grad_(True)
    rounds.divide_again(model)
    carried = {name: x for of in rounds.fragments for name, x in of.fragment.by_name(of.carried).items()}  # type: ignore[arg-type]
    assert torch.equal(carried["0.weight"].flatten(), torch.arange(16.0))
    assert torch.equal(carried["1.bias"], -torch.arange(16.0, 20.0))
    assert not carried["2.weight"].any()
    assert rounds.close()


def test_losses_are_those_since_the_last_exchange() -> None:
    """If it fails, a worker's loss in the log is not the mean of its steps in the round."""
    rounds = _rounds(nn.Linear(2, 2), sync_every=2)
    shown = []
    for loss in (1.0, 2.0, 5.0, 7.0):
        rounds.counts.add_loss(torch.tensor(loss, requires_grad=True))
        rounds.counts.samples += 3
        shown += [(arrived.reports[0].loss, arrived.reports[0].samples) for _, arrived in rounds.step()]
    assert shown == [(1.5, 6.0), (6.0, 6.0)]
    assert rounds.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_is_mixed_with_own_weights(dtype: torch.dtype) -> None:
    """If it fails, an exchange with overlap leaves weights of half precision, or of single, as they are."""
    model = nn.Linear(2, 2, dtype=dtype)
    rounds = _rounds(model, sync_every=2, overlap=1, outer_lr=1.0, outer_momentum=0.0)
    with torch.no_grad():
        for value in (0.0, 4.0, 8.0):
            for x in model.parameters():
                x.fill_(value)
            rounds.step()
    assert [x.tolist() for x in model.parameters()] == [[[6.0, 6.0], [6.0, 6.0]], [6.0, 6.0]]
    assert rounds.close()


def test_an_exchange_is_applied_before_its_fragment_is_exchanged_again() -> None:
    """If it fails, with several steps in a batch and a long overlap what a fragment has learned is lost."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    rounds = _rounds(model, sync_every=6, fragments=3, overlap=5)
    for _ in range(12):
        rounds.step(num_steps=4)
        under_way = [(x.due, x.index) for x in rounds.under_way]
        assert under_way == sorted(under_way)
        assert len({index for _, index in under_way}) == len(under_way)
    assert rounds.close()


class _Missing(Exchange):
    """Misses its first exchange, and joins in the second one, with weights of which all are 1."""

    num_runs = 0

    def begin(self, fragments: Sequence[GlobalWeights], arrived: Mapping[int, Arrived]) -> None:
        self.fragments = fragments

    def run(self, of: GlobalWeights, *args: Any) -> Arrived:
        self.num_runs += 1
        if self.num_runs == 1:
            return Arrived(of.weights, of.floats, of.integers, [], is_complete=False, has_missed=True)
        arrived = super().run(of, *args)
        if self.num_runs == 2:
            arrived.joined = [Arrived(torch.ones_like(x.weights), x.floats, x.integers, []) for x in self.fragments]
            arrived.weights = torch.ones_like(of.weights)
        return arrived


def test_a_fit_ends_with_what_has_joined_after_a_missed_exchange() -> None:
    """If it fails, weights from before an exchange that this rank has missed come back at the end of a fit."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    rounds = Rounds(DiLoCoPlan(sync_every=4, fragments=2, overlap=3), model, _Missing(None, None))
    for _ in range(4):
        rounds.step()
    assert [x.index for x in rounds.under_way] == [1, 0]
    rounds.finish()
    assert all((x == 1).all() for x in model.parameters())
    assert rounds.close()


@torch.no_grad()
def test_a_rank_that_joins_again_keeps_nothing_of_its_own_weights() -> None:
    """If it fails, a rank mixes weights that it had trained without the others into those that arrive."""
    model = nn.Linear(2, 2)
    rounds = _rounds(model, overlap=1)  # which mixes otherwise
    of = rounds.fragments[0]
    joined = [Arrived(torch.ones_like(of.weights), [], [], [])]
    rounds._take(of, Arrived(torch.full_like(of.weights, 3.0), [], [], [], joined=joined))
    assert all((x == 3).all() for x in model.parameters())
    assert rounds.close()


def test_failed_exchange_names_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a user cannot tell which exchange has failed, or training goes on without it."""
    rounds = _rounds(nn.Linear(2, 2), sync_every=1)
    monkeypatch.setattr(OuterSGD, "update", lambda *_: 1 / 0)
    with pytest.raises(
        DiLoCoError,
        match=r"exchange of fragment 0 failed \(ZeroDivisionError: division by zero\); its parameters: weight, bias",
    ):
        rounds.step()
    assert not rounds.close()


def test_drift_that_grows_is_warned_of_once() -> None:
    """If it fails, a training that diverges says nothing, or one that is stable warns."""
    watch = DriftWatch(ranks_per_worker=2)
    steady = [1.0, 1.2, 1.1, 1.3, 1.4, 1.5]
    for drift in steady:
        watch.metrics(0, [Report(1, drift=drift)])
    losses = {0: 1.0, 1: 3.0, 2: math.nan, 3: math.nan, 6: 4.0, 7: 6.0}  # the worker of ranks 4 and 5 was missed
    reports = [Report(1, loss=loss, drift=2.0, rank=rank) for rank, loss in losses.items()]
    assert watch.metrics(1, reports) == {
        "diloco/drift/fragment_1": 2.0,
        "diloco/loss/worker_0": 2.0,
        "diloco/loss/worker_3": 5.0,
    }
    for drift in (2.0, 2.5):
        watch.metrics(0, [Report(1, drift=drift)])
    with pytest.warns(UserWarning, match=r"fragment 0 has grown in 3 rounds in a row \(1.5, 2, 2.5, 4\)"):
        watch.metrics(0, [Report(1, drift=4.0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for drift in (6.0, 9.0):
            watch.metrics(0, [Report(1, drift=drift)])


def test_a_fit_that_resumes_has_not_received_the_signal_that_ended_the_one_before() -> None:
    """If it fails, a fit that SIGTERM has ended with an exchange under way ends again as soon as it is resumed."""
    report = Report(3.0, loss=2.0, drift=1.5, rank=1.0)
    assert Report(*replace(report, has_signal=1.0).to_plain()) == report


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (DiLoCoPlan(), "too large for sync_every=30 and 100 exchanges: compare the loss with outer_momentum=0.8 and"),
        (DiLoCoPlan(overlap=5), None),  # mixing holds back half of each move
        (DiLoCoPlan(outer_momentum=0.8), None),
        (DiLoCoPlan(outer_momentum=0.7, sync_every=100), None),
        (DiLoCoPlan(outer_momentum=0.8, sync_every=100), "and 30 exchanges: compare the loss with outer_momentum=0.7"),
        (DiLoCoPlan(outer_momentum=0.8, sync_every=10), "exchanges: compare the loss with outer_momentum=0.7 and"),
        (DiLoCoPlan(outer_momentum=0.0, sync_every=1000), None),
    ],
    ids=str,
)
def test_a_momentum_that_is_too_large_is_told(plan: DiLoCoPlan, words: str | None) -> None:
    """If it fails, a fit loses quality to its outer momentum without a word, or is warned of one that suits it."""
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_few_steps(3000, plan, "without")
    assert len(caught) == (words is not None)
    assert words is None or words in str(caught[0].message)
