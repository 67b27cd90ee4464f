"""The state of gradient sync in checkpoints: resumed exactly, or by the rules of docs/how_to/resume.md."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_commopt import CommOptDDP, CommPlan, PowerSGD
from lightning_commopt.compressors import Hierarchical
from lightning_commopt.compressors.base import as_real
from lightning_commopt.sync.checkpoint import KEY, _checksum
from support.cross_section import sampled
from support.every_compressor import COMPRESSORS
from support.lightnings import Callback, LightningModule, MixedPrecision, OnExceptionCheckpoint, Trainer
from support.ranks import run_ranks_or_raise
from support.strategy_models import Params, assert_same, numbers, trainer
from support.warm_ranks import run_ranks

HALF = 8
OPTIONS: dict[str, dict[str, Any]] = {
    "many_buckets": {"bucket_cap_mb": 0.002},
    "static_view": {"bucket_cap_mb": 0.002, "static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"bucket_cap_mb": 0.002, "find_unused_parameters": True},
}
POWERSGD = PowerSGD(min_compression_rate=0.5)
_EXHAUSTIVE = pytest.mark.exhaustive
_MORE = (
    *(
        "bf16",
        "low_rank",
        "alternating_low_rank",
        "powersgd_rank_2_cold",
        "powersgd_refreshed",
        "powersgd_bf16_residual",
    ),
    *("alternating_rank_2", "int8_small_blocks", "int4_feedback", "hierarchical_powersgd", "example_topk"),
    *("feedback_around_hierarchical", "powersgd_large_only", "feedback_around_by_size"),
)
RESUMED: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "two ranks": (2, "many_buckets", ("powersgd", "alternating_powersgd", "int8", "after_steps")),
    "more": (2, "many_buckets", _MORE),
    "three ranks": (3, "static_view", ("powersgd_rank_2", "alternating_rank_2", "int8_small_blocks", "example_topk")),
}
"""Ranks, options and compressors: those that keep something from step to step, and one that does not."""
_COMPLEX_WORKS = torch.__version__ >= "2.15"
_COMPLEX = pytest.mark.skipif(not _COMPLEX_WORKS, reason="DDP itself cannot send complex parameters over gloo")


class Mixed(LightningModule):
    """Registers its layers in another order than it uses them, so that DDP lays its buckets out anew.

    Its data depend on the step and the rank only: the loader starts from the beginning when an epoch is resumed.
    """

    overflow_at = -1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(24, 1)
        self.scale = nn.Parameter(torch.ones(24))
        self.first = nn.Linear(32, 40)
        self.image = nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.middle = nn.Linear(40, 24)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.global_step + self.global_rank)
        x = torch.randn(4, 4, 2, 4, generator=generator)
        hidden = self.first(self.image(x).reshape(8, 32)).tanh()
        loss = (self.last((self.middle(hidden) * self.scale).tanh()) - x.mean()).square().mean()
        return loss * float("inf") if self.global_step == self.overflow_at and self.global_rank == 1 else loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.zeros(5, 1))  # type: ignore[arg-type]  # a tensor serves as a data set

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Overflowing(Mixed):
    """Has an infinite gradient on rank 1 in the step before the checkpoint."""

    overflow_at = HALF - 2


class Sparse(Mixed):
    """Has a table whose gradient is sparse, and so in no state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 24, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = torch.tensor([self.global_step % 16, self.global_rank])
        return super().training_step(batch, batch_idx) + self.table(rows).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class TwoTypes(Mixed):
    """Has a parameter of another dtype, and so a bucket more in the first backward of a static graph."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(16, 12, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        aim = self.global_step / 10 + self.global_rank
        return super().training_step(batch, batch_idx) + (self.wide - aim).square().mean().float()


class Phased(Mixed):
    """Has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.randn(8, 6, dtype=torch.complex64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        turned = self.phases * (1 + self.global_step + 10j * self.global_rank)
        return super().training_step(batch, batch_idx) + (turned.abs() - 1).square().mean() / 100


class Freezing(Mixed):
    """Freezes a layer when it has been wrapped, as fine-tuning callbacks do when they are resumed."""

    def on_fit_start(self) -> None:
        self.middle.requires_grad_(False)


class Look(Callback):
    """Saves at a step, perhaps after a change of plan, and looks at what is left behind when training ends."""

    def __init__(self, path: Path | None = None, plan: CommPlan | None = None) -> None:
        self.path = path
        self.plan = plan
        self.has_saved = self.in_saved_buckets = False
        self.residual: Params = {}
        self.finished = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        hook = trainer.strategy.gradient_sync.hook  # type: ignore[attr-defined]
        self.in_saved_buckets = self.in_saved_buckets or (hook is not None and hook._relayout is not None)
        if self.path is not None and trainer.global_step == HALF and not self.has_saved:
            self.has_saved = True  # the file itself may be there before another rank looks
            if self.plan is not None:
                trainer.strategy.apply_plan(self.plan)  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        hook = trainer.strategy.gradient_sync.hook  # type: ignore[attr-defined]
        self.residual = (
            {name: value.double().numpy() for name, value in hook.state().all_residuals().items()} if hook else {}
        )
        self.finished = hook is None or hook._relayout is None


def _fit(
    module: LightningModule,
    strategy: CommOptDDP,
    path: Path | None,
    num_steps: int,
    resumes: bool = False,
    last_plan: CommPlan | None = None,
    **run: Any,
) -> Look:
    look = Look(None if resumes else path, last_plan)
    run = {"max_steps": num_steps, "max_epochs": -1, "use_distributed_sampler": False, **run}
    run["callbacks"] = [look, *run.get("callbacks", ())]
    trainer(strategy, **run).fit(module, ckpt_path=path if resumes else None)
    return look


def _train(resumes: bool, folder: str, names: list[str], options: dict[str, Any], run: dict[str, Any]) -> Any:
    outcome = {}
    module_class: type[Mixed] = run.pop("module", Mixed)
    for name in names:
        module = module_class()
        if module_class is Overflowing:
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            run["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
        strategy = CommOptDDP(comm_hook=COMPRESSORS[name], **options)
        look = _fit(module, strategy, Path(folder, f"{name}.ckpt"), 2 * HALF, resumes, **run)
        outcome[name] = numbers(module), look.residual, look.in_saved_buckets, look.finished, strategy.wire_bytes
    return outcome


def _through_and_resumed(
    folder: Path, world_size: int, options: str, names: tuple[str, ...], run: tuple[tuple[str, Any], ...] = ()
) -> tuple[list[Any], list[Any]]:
    """Trains with every compressor, saves on the way, and resumes in new processes."""
    folder = folder / f"{world_size}_{options}_{len(list(folder.iterdir())) if run else names[0]}"
    folder.mkdir()
    arguments = str(folder), list(names), OPTIONS[options], dict(run)
    through = run_ranks(_train, False, *arguments, world_size=world_size)
    return through, run_ranks(_train, True, *arguments, world_size=world_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def _assert_exact(through: list[Any], resumed: list[Any], name: str, has_other_buckets_first: bool = True) -> None:
    for before, after in zip(through, resumed, strict=True):
        params, residual, _, _, _ = before[name]
        assert_same(after[name][0], params)
        assert_same(after[name][1], residual)
        assert after[name][3], "the checkpoint's buckets are still not DDP's"
    assert resumed[0][name][2] == has_other_buckets_first, "else the test shows nothing"
    assert all(np.isfinite(value).all() for value in resumed[0][name][0].values())


@pytest.mark.parametrize("case", sampled(RESUMED, by_default=["two ranks"]))
def test_resumed_training_goes_on_bit_for_bit(folder: Path, case: str) -> None:
    """If it fails, a run that was killed and resumed ends with another model, or its checkpoint cannot be read."""
    world_size, options, names = RESUMED[case]
    through, resumed = _through_and_resumed(folder, world_size, options, names)
    for name in names:
        _assert_exact(through, resumed, name)
        checkpoint = torch.load(folder / f"{world_size}_{options}_{names[0]}" / f"{name}.ckpt", weights_only=True)
        saved = checkpoint[KEY]
        assert saved["num_syncs"] == HALF
        assert len(saved["ranks"]) == world_size
        assert len(saved["ranks"][0]["states"]) >= 3
        assert all(tensor.device.type == "cpu" for tensor in _tensors(saved))


@pytest.mark.parametrize(
    ("world_size", "options", "name", "run"),
    [
        pytest.param(4, "many_buckets", "hierarchical_powersgd", {}, marks=_EXHAUSTIVE),
        pytest.param(2, "many_buckets", "powersgd_rank_2", {"accumulate_grad_batches": 2}, marks=_EXHAUSTIVE),
        (2, "many_buckets", "powersgd_rank_2", {"module": Overflowing}),
        pytest.param(3, "static_view", "error_feedback", {"module": Overflowing}, marks=_EXHAUSTIVE),
        pytest.param(2, "many_buckets", "int8", {"module": Sparse}, marks=_EXHAUSTIVE),
        pytest.param(2, "many_buckets", "powersgd_rank_2", {"module": Freezing}, marks=_EXHAUSTIVE),
        pytest.param(2, "unused", "powersgd_rank_2", {}, marks=_EXHAUSTIVE),
        pytest.param(2, "static_view", "powersgd_rank_2", {"module": TwoTypes}, marks=_EXHAUSTIVE),
        pytest.param(2, "many_buckets", "powersgd_rank_2", {"module": Phased}, marks=[_COMPLEX, _EXHAUSTIVE]),
        pytest.param(2, "many_buckets", "int8", {"module": Phased}, marks=[_COMPLEX, _EXHAUSTIVE]),
    ],
    ids=[
        *("four_ranks", "accumulation", "overflow", "overflow_static", "sparse", "frozen", "unused"),
        *("two_types_static", "complex_powersgd", "complex_int8"),
    ],
)
def test_resumed_under_other_circumstances(
    folder: Path, world_size: int, options: str, name: str, run: dict[str, Any]
) -> None:
    """If it fails, accumulation, a skipped step, kinds of gradients, or nodes make resuming inexact, or hang it."""
    through, resumed = _through_and_resumed(folder, world_size, options, (name,), tuple(run.items()))
    _assert_exact(through, resumed, name, has_other_buckets_first=options != "unused")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list):
        return [tensor for item in value for tensor in _tensors(item)]
    assert value is None or isinstance(value, Tensor | int | float | str)
    return [value] if isinstance(value, Tensor) else []


class Fed(LightningModule):
    """Has chosen gradients, and sums them up in its parameters: those are all that was ever applied."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({name: torch.zeros_like(fed) for name, fed in _fed(0, 0).items()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fed = _fed(self.global_step, self.global_rank)
        return torch.stack([(value * fed[name].conj()).real.sum() for name, value in self.parts.items()]).sum()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.zeros(5, 1))  # type: ignore[arg-type]

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Thawed(Fed):
    """Is wrapped with a part that is frozen until the first batch, as fine-tuning callbacks do."""

    def setup(self, stage: str) -> None:
        self.parts["a"].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.parts["a"].requires_grad_(True)


SHAPES = {"c": (12, 20), "a": (30, 8), "d": (7,), "b": (16, 16)}
COMPLEX_SHAPES = {"e": (12, 10)} if _COMPLEX_WORKS else {}


def _fed(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    fed = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    pairs = {name: torch.randn(*shape, 2, generator=generator) for name, shape in COMPLEX_SHAPES.items()}
    return fed | {name: torch.view_as_complex(pair) for name, pair in pairs.items()}


def _fed_in_all(steps: range, world_size: int) -> Params:
    gradients = [_fed(step, rank) for step in steps for rank in range(world_size)]
    sums = {name: torch.stack([as_real(each[name]).double() for each in gradients]).sum(0) for name in gradients[0]}
    return {f"parts.{name}": value.numpy() / world_size for name, value in sums.items()}


def _feed(
    resumes: bool,
    path: str,
    strategy: CommOptDDP,
    last_plan: CommPlan | None = None,
    module_class: type[Fed] = Fed,
) -> tuple[Params, Params, Any]:
    module = module_class()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        num_steps = 2 * HALF if resumes else HALF
        look = _fit(module, strategy, Path(path), num_steps, resumes, last_plan)
    messages = [str(warning.message) for warning in caught if "comm_hook" in str(warning.message)]
    return numbers(module), look.residual, messages


SMALL: dict[str, Any] = {"bucket_cap_mb": 0.001}
CHANGES: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {  # more are in test_resumed_schedules
    "fewer_ranks_and_compressor": (3, {"comm_hook": POWERSGD}, 2, {"comm_hook": "int8"}),
    "one_rank": (2, {"comm_hook": POWERSGD}, 1, {"comm_hook": POWERSGD}),
    "nodes": (4, {"comm_hook": Hierarchical(inner=POWERSGD, ranks_per_node=2)}, 2, {"comm_hook": POWERSGD}),
    "to_none_and_thawed": (2, {"comm_hook": POWERSGD}, 2, {}),
    "from_none": (2, {}, 2, {"comm_hook": POWERSGD}),
    "static_graph": (2, {"comm_hook": POWERSGD}, 2, {"comm_hook": POWERSGD, "static_graph": True}),
}


@pytest.mark.parametrize("change", sampled(CHANGES, by_default=["fewer_ranks_and_compressor"]))
def test_what_is_owed_outlives_a_change(change: str, tmp_path: Path) -> None:
    """If it fails, gradients that error feedback held back are lost, or doubled, at resume."""
    ranks_before, before, ranks_after, after = CHANGES[change]
    path = str(tmp_path / "fed.ckpt")
    rest = None, Thawed if change.endswith("thawed") else Fed
    first = run_ranks(_feed, False, path, CommOptDDP(**{**SMALL, **before}), *rest, world_size=ranks_before)
    second = run_ranks(_feed, True, path, CommOptDDP(**{**SMALL, **after}), *rest, world_size=ranks_after)
    fed_before, fed_after = _fed_in_all(range(HALF), ranks_before), _fed_in_all(range(HALF, 2 * HALF), ranks_after)
    for params, _, messages in second:
        assert not messages
        for name, value in params.items():
            residual = np.mean([residual.get(name, np.zeros_like(value)) for _, residual, _ in second], axis=0)
            fed = fed_before[name] + fed_after[name]
            np.testing.assert_allclose(-value + residual, fed, rtol=0, atol=1e-4, err_msg=name)
    residual_before = max((np.abs(value).max() for _, residual, _ in first for value in residual.values()), default=0)
    assert residual_before > 0.1 or change == "from_none"


def _save_in_all_ways(folder: str) -> list[bool]:
    paths = [Path(folder, name) for name in ("option_off", "weights_only", "after_fit")]
    without = CommOptDDP(comm_hook=POWERSGD, save_comm_state=False)
    run = partial(trainer, max_steps=HALF, max_epochs=-1, use_distributed_sampler=False)
    run(without, callbacks=[Look(paths[0])]).fit(Fed())
    fit = run(CommOptDDP(comm_hook=POWERSGD))
    fit.fit(Fed())
    fit.save_checkpoint(paths[1], weights_only=True)
    fit.save_checkpoint(paths[2])
    dist.barrier()
    return [KEY in torch.load(path, weights_only=True) for path in paths]


def test_checkpoints_without_the_state(tmp_path: Path) -> None:
    """If it fails, the option has no effect, files of weights grow, or a checkpoint after a fit lacks the state."""
    assert run_ranks(_save_in_all_ways, str(tmp_path)) == [[False, False, True]] * 2
    for resumed, residual_is_kept in (("option_off", False), ("after_fit", True)):
        second = run_ranks(_feed, True, str(tmp_path / resumed), CommOptDDP(comm_hook=POWERSGD))
        fed = _fed_in_all(range(2 * HALF), 2)
        for params, _, messages in second:
            assert not messages
            for name, value in params.items():
                residual = np.mean([residual[name] for _, residual, _ in second], axis=0)
                assert np.allclose(-value + residual, fed[name], atol=1e-4) == (residual_is_kept or name == "parts.d")


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", [{}, {"comm_hook": POWERSGD}], ids=["none", "powersgd"])
def test_what_is_owed_when_the_compressor_was_just_taken_off(after: dict[str, Any], tmp_path: Path) -> None:
    """If it fails, what `apply_plan` has not yet added to the gradients is missing in a checkpoint."""
    path = str(tmp_path / "fed.ckpt")
    run_ranks(_feed, False, path, CommOptDDP(comm_hook=POWERSGD), CommPlan())
    second = run_ranks(_feed, True, path, CommOptDDP(**after))
    fed = _fed_in_all(range(2 * HALF), 2)
    for params, _, _ in second:
        for name, value in params.items():
            residual = np.mean([residual.get(name, np.zeros_like(value)) for _, residual, _ in second], axis=0)
            np.testing.assert_allclose(-value + residual, fed[name], rtol=0, atol=1e-4, err_msg=name)


def _unknown_compressor(saved: dict[str, Any]) -> None:
    saved["compressor"] = '{"name": "from_the_future"}'


def _without_names(saved: dict[str, Any]) -> None:
    del saved["ranks"][1]["states"][0]["names"]


def _without_states(saved: dict[str, Any]) -> None:
    for rank in saved["ranks"]:
        for bucket in rank["states"]:
            bucket["state"] = {"something": "else"}


def _of_another_parameter(saved: dict[str, Any]) -> None:
    for rank in saved["ranks"]:
        for bucket in rank["states"]:
            bucket["names"] = [name.replace("parts.b", "parts.gone") for name in bucket["names"]]


def _of_an_older_class(saved: dict[str, Any]) -> None:
    for bucket in saved["ranks"][1]["states"]:
        bucket["state"].pop("step")


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], None], str | None]] = {
    "compressor": (_unknown_compressor, "its compressor is not registered"),
    "one_rank": (_without_names, "it is damaged (KeyError: 'names')"),
    "states": (_without_states, "it starts from zero"),
    "parameter": (_of_another_parameter, "residuals of 1 parameters in the checkpoint are dropped"),
    "state_of_one_rank": (_of_an_older_class, None),
}


def _resume_damaged(folder: str) -> dict[str, Any]:
    return {name: _feed(True, f"{folder}/{name}", CommOptDDP(comm_hook=POWERSGD, **SMALL)) for name in DAMAGES}


@pytest.mark.exhaustive
def test_damaged_state_is_told_and_left(tmp_path: Path) -> None:
    """If it fails, a checkpoint of another version ends a training in the middle, or makes ranks disagree."""
    path = tmp_path / "intact"
    run_ranks(_feed, False, str(path), CommOptDDP(comm_hook=POWERSGD, **SMALL))
    for name, (damage, _) in DAMAGES.items():
        checkpoint = torch.load(path, weights_only=True)
        damage(checkpoint[KEY])
        checkpoint[KEY]["checksum"] = _checksum(checkpoint[KEY])
        torch.save(checkpoint, tmp_path / name)
    first, second = run_ranks(_resume_damaged, str(tmp_path))
    for name, (_, message) in DAMAGES.items():
        assert_same(second[name][0], first[name][0])
        assert len(first[name][2]) == (message is not None), first[name][2]
        assert message is None or message in first[name][2][0]


def _validate_a_checkpoint(path: str) -> tuple[Params, Params]:
    """Loads for validation, then trains from the start; and trains from the start without."""
    results = []
    for validates in (True, False):
        run = trainer(CommOptDDP(comm_hook=POWERSGD), max_steps=HALF, max_epochs=-1, use_distributed_sampler=False)
        if validates:
            run.validate(Validated(), Fed().train_dataloader(), ckpt_path=path)
        module = Validated()
        run.fit(module)
        results.append(numbers(module))
    return results[0], results[1]


class GoBack(Callback):
    """Goes back to an earlier step in the middle of a fit, as Lightning's learning rate finder does."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.residual: list[Params] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        step, strategy = trainer.global_step, trainer.strategy
        if step == HALF - 3:
            trainer.save_checkpoint(self.path)
        elif step == HALF - 1:
            strategy.load_checkpoint(self.path)
        if step in (HALF - 3, HALF - 2, HALF - 1):
            residual = strategy.gradient_sync.hook.state().all_residuals()  # type: ignore[attr-defined]
            self.residual.append({name: value.double().numpy() for name, value in residual.items()})


def _go_back(path: str) -> list[Params]:
    look = GoBack(path)
    _fit(Fed(), CommOptDDP(comm_hook=POWERSGD), None, HALF, callbacks=[look])
    return look.residual


def test_loading_in_the_middle_of_a_fit_takes_effect_at_once(tmp_path: Path) -> None:
    """If it fails, the state of a checkpoint waits until the next change of plan, and then is a stale one."""
    for saved, later, loaded in run_ranks(_go_back, str(tmp_path / "back.ckpt")):
        assert_same(loaded, saved)
        assert any((later[name] != value).any() for name, value in saved.items())


class Validated(Fed):
    """Can be validated."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.exhaustive
def test_validation_does_not_take_the_state(tmp_path: Path) -> None:
    """If it fails, a fit after validating a checkpoint begins with the residuals of another run."""
    path = str(tmp_path / "fed.ckpt")
    run_ranks(_feed, False, path, CommOptDDP(comm_hook=POWERSGD))
    for after_validation, fresh in run_ranks(_validate_a_checkpoint, path):
        assert_same(after_validation, fresh)


class Breaks(Fed):
    """Raises on one rank between two batches."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank == self.rank:
            raise ArithmeticError("broken on purpose")


def _save_while_broken(folder: str, rank: int) -> None:
    strategy = CommOptDDP(comm_hook=POWERSGD)
    _fit(Breaks(rank), strategy, None, HALF, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(folder)])


@pytest.mark.parametrize("rank", sampled([0, 1], by_default=[0]))
def test_a_rank_that_breaks_does_not_hang_the_checkpoint(rank: int, tmp_path: Path) -> None:
    """If it fails, a checkpoint at an exception waits for ever for ranks that do not come, and is not written."""
    answers = run_ranks_or_raise(_save_while_broken, str(tmp_path), rank, world_size=2, limit_s=60)
    assert all(trace is not None for _, trace in answers)
    checkpoint = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2
    assert KEY not in checkpoint


def test_saving_disturbs_nothing(tmp_path: Path) -> None:
    """If it fails, saving a checkpoint changes the training or counts as traffic of gradients."""
    for (bytes_saved, params_saved), (num_bytes, params) in run_ranks(_saved_and_unsaved, tmp_path / "saved.ckpt"):
        assert bytes_saved == num_bytes
        assert_same(params_saved, params)


def _saved_and_unsaved(path: Path) -> list[tuple[int, Params]]:
    fits = []
    for saved in (path, None):
        module, strategy = Fed(), CommOptDDP(comm_hook=POWERSGD)
        _fit(module, strategy, saved, HALF + 2)
        fits.append((strategy.wire_bytes, numbers(module)))
    return fits
