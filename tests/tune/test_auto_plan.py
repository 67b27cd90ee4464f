"""Fits with plan="auto" on real ranks: what it chooses, and that training is what it would be without."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from lightning_commopt import CommOptDDP, CommPlan
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.gradient_times import GradientTimes
from lightning_commopt.plan.ddp import ddp_options
from lightning_commopt.tune import auto_plan
from lightning_commopt.tune import tuner as tuner_module
from lightning_commopt.tune.director import Director
from support.cross_section import sampled
from support.lightnings import Callback, DDPStrategy, LightningModule, ModelCheckpoint, Trainer, callbacks
from support.scripted_tuning import scripted
from support.strategy_models import Gan, Manual, Params, Tiny, Unused, assert_same, loader, numbers, trainer
from support.warm_ranks import run_ranks


class _Hidden(Manual):
    """Steps an optimizer itself, and not Lightning's wrapper of it."""

    def optimizers(self, use_pl_optimizer: bool = False) -> Any:
        return super().optimizers(use_pl_optimizer=use_pl_optimizer)


_SMALL = CommPlan(bucket_cap_mb=0.001)
_VIEW = CommPlan(bucket_cap_mb=100)
_MODES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "plain": (Tiny, {}, {}),
    "accumulated": (Tiny, {}, {"accumulate_grad_batches": 2}),
    "static graph": (Tiny, {"static_graph": True}, {}),
    "bucket view": (Tiny, {"gradient_as_bucket_view": True}, {}),
    "manual": (Manual, {}, {}),
    "manual, accumulated": (lambda: Manual(accumulate=2), {}, {"epochs": 120}),
    "manual, without Lightning's wrapper": (lambda: _Hidden(accumulate=2), {}, {"epochs": 120}),
    "two optimizers": (Gan, {"find_unused_parameters": True}, {}),
    "unused": (lambda: Unused(now_and_then=True), {"find_unused_parameters": True}, {}),
    "validated": (Tiny, {}, {"val_check_interval": 2}),
}


def _fit(strategy: Any, module: LightningModule, epochs: int = 40, **options: Any) -> Params:
    has_validation = "val_check_interval" in options
    trainer(strategy, max_epochs=epochs, **options).fit(module, loader(), loader() if has_validation else None)
    return numbers(module)


def _fit_modes(modes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in modes:
        model, arguments, options = _MODES[name]
        base = CommPlan(**arguments)
        faster, slower = (CommPlan.from_dict({**base.to_dict(), **plan.to_dict()}) for plan in (_SMALL, _VIEW))
        with TemporaryDirectory() as folder, scripted({faster: 0.7, slower: 1.1}, folder=folder) as steps:
            strategy = CommOptDDP(plan="auto", **arguments)
            trained = _fit(strategy, model(), **options)
            kept = [json.loads(path.read_text())["chosen"] == faster.to_dict() for path in Path(folder).iterdir()]
        plain = _fit(DDPStrategy(**arguments), model(), **options)
        found[name] = trained, plain, strategy.plan == faster, strategy.auto_plan.describe(), len({*steps}), kept
    return found


@pytest.mark.parametrize("mode", sampled(_MODES, by_default=["plain"]))
def test_it_chooses_and_trains_the_same_bits(mode: str) -> None:
    """If it fails, tuning loses or repeats gradients, or ranks disagree about the plan."""
    ranks = run_ranks(_fit_modes, [mode])
    for rank, results in enumerate(ranks):
        trained, plain, has_chosen, found, num_plans, kept = results[mode]
        assert_same(trained, plain)
        assert has_chosen, found
        assert num_plans == 3
        assert bool(found) == (rank == 0)
        assert kept == [True] * (rank == 0)
    found = ranks[0][mode][3]
    assert found["status"] == "faster"
    assert found["num_search_steps"] <= 60
    assert "lossy=['int8'], or commopt tune --lossy int8, allows it" in found["verdict"]


@pytest.mark.parametrize(("lossy", "resumed"), [(["int8"], "int8"), ("never", "uncompressed")], ids=str)
def test_the_choice_of_a_checkpoint_is_taken_if_it_is_allowed(lossy: Any, resumed: str) -> None:
    """If it fails, a resumed fit searches anew, or compresses although that is no longer allowed."""
    saved = {"num_syncs": 3, auto_plan._KEY: CommPlan.from_dict({"comm_hook": "int8"}).to_json()}
    strategy = CommOptDDP(plan="auto", lossy=lossy)
    strategy.auto_plan._base = strategy.plan
    strategy.auto_plan.resume_choice(saved)
    assert strategy.plan.name == resumed
    assert strategy.auto_plan._resumed == (strategy.plan if resumed == "int8" else None)
    assert strategy.auto_plan.add_choice({"num_syncs": 3}) == (saved if resumed == "int8" else {"num_syncs": 3})


def test_a_choice_that_cannot_be_read_is_left_out() -> None:
    """If it fails, a damaged checkpoint ends a fit, or its plan is lost without a word."""
    strategy = CommOptDDP(plan="auto")
    strategy.auto_plan._base = strategy.plan
    with pytest.warns(UserWarning, match="the plan in the checkpoint cannot be used: unknown option 'x'"):
        strategy.auto_plan.resume_choice({auto_plan._KEY: '{"x": 1}'})
    assert strategy.plan == CommPlan()


@pytest.mark.exhaustive
def test_three_ranks_train_the_same_up_to_the_order_of_sums() -> None:
    """If it fails, a new layout of buckets changes more than the order in which ranks are added."""
    for results in run_ranks(_fit_modes, ["plain"], world_size=3):
        trained, plain, has_chosen, *_ = results["plain"]
        assert has_chosen
        assert_same(trained, plain, rtol=1e-5)


def _fit_lossy(folder: str) -> dict[str, Any]:
    int8 = CommPlan.from_dict({"comm_hook": "int8"})
    found: dict[str, Any] = {}
    with TemporaryDirectory() as plans, scripted({int8: 0.6}, folder=plans):
        strategy = CommOptDDP(plan="auto", lossy=["int8", "bf16"])
        saved = ModelCheckpoint(dirpath=folder, save_last=True)
        found["params"] = _fit(strategy, Tiny(), callbacks=[saved], enable_checkpointing=True)
        found["chosen"] = strategy.plan.name
        for resumes in ({"lossy": ["int8"]}, {"lossy": "never"}):
            again = CommOptDDP(plan="auto", **resumes)
            module = Tiny()
            trainer(again, max_epochs=41).fit(module, loader(), ckpt_path=f"{folder}/last.ckpt")
            found[f"resumed {resumes['lossy']}"] = again.plan.name, again.auto_plan.describe().get("status")
        accumulated = CommOptDDP(plan="auto", lossy=["int8"])
        _fit(accumulated, Tiny(), epochs=100, accumulate_grad_batches=2)
        found["accumulated"] = accumulated.plan.name
        with (
            patch.object(tuner_module, "error_limit", lambda compressor: 0.0),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            guarded = CommOptDDP(plan="auto", lossy=["int8"])
            _fit(guarded, Tiny(), epochs=60)
        found["guarded"] = guarded.plan.name
        found["kept"] = [json.loads(path.read_text())["chosen"] for path in Path(plans).iterdir()]
        found["tuning"] = guarded.auto_plan.describe()
        found["warnings"] = [str(one.message) for one in caught if "averages with comm_hook" in str(one.message)]
    return found


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns what each rank found in fits that may compress."""
    return run_ranks(_fit_lossy, str(tmp_path_factory.mktemp("lossy")))


@pytest.mark.exhaustive
def test_lossy_where_allowed(lossy: list[dict[str, Any]]) -> None:
    """If it fails, a compressor that was allowed is not used, or left for accumulated batches, or ranks differ."""
    first, second = lossy
    assert first["chosen"] == second["chosen"] == first["accumulated"] == "int8"
    assert_same(second["params"], first["params"])
    assert all(np.isfinite(values).all() for values in first["params"].values())


@pytest.mark.exhaustive
def test_a_checkpoint_keeps_the_plan(lossy: list[dict[str, Any]]) -> None:
    """If it fails, a resumed fit searches again, or compresses although that is no longer allowed."""
    assert lossy[0]["resumed ['int8']"] == ("int8", "resumed")
    assert lossy[1]["resumed ['int8']"] == ("int8", None)
    assert lossy[0]["resumed never"] == ("uncompressed", "measuring")


@pytest.mark.exhaustive
def test_the_guard_falls_back_to_the_users_plan(lossy: list[dict[str, Any]]) -> None:
    """If it fails, training goes on with averages that are far off, again in the next fit, or warns at every step."""
    assert [rank["guarded"] for rank in lossy] == ["uncompressed", "uncompressed"]
    assert CommPlan().to_dict() in lossy[0]["kept"]
    assert len(lossy[0]["warnings"]) == 1
    assert "comm_hook='int8'" in lossy[0]["warnings"][0]
    assert not lossy[1]["warnings"]


@pytest.mark.exhaustive
def test_the_record_has_the_step_at_which_a_plan_was_left(lossy: list[dict[str, Any]]) -> None:
    """If it fails, the report shows an event at a step at which nothing happened."""
    history = [stretch for stretch in lossy[0]["tuning"]["history"] if stretch["plan"] == "int8"]
    left_at = history[-1]["first_step"] + history[-1]["num_steps"]
    assert lossy[0]["tuning"]["events"] == [(left_at, "forbidden")]
    assert sum(stretch["num_steps"] for stretch in history) > 100
    assert lossy[1]["tuning"] == {}
    assert "the averages of a faster plan were too far off" in lossy[0]["tuning"]["verdict"]


def _fit_while_the_link_changes(is_guarded: bool) -> dict[str, Any]:
    int8, bf16 = (CommPlan.from_dict({"comm_hook": hook}) for hook in ("int8", "bf16"))
    first, later = ({int8: 0.7}, {int8: 1.5, bf16: 1.6}) if is_guarded else ({_SMALL: 0.7}, {_SMALL: 2.8, int8: 1.2})
    limits = {int8.comm_hook: 0.0 if is_guarded else 1.0, bf16.comm_hook: 1.0}
    with (
        scripted(first, change=(700, later)) as steps,
        patch.object(tuner_module, "error_limit", limits.__getitem__),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        strategy = CommOptDDP(plan="auto", lossy=["int8", "bf16"])
        _fit(strategy, Tiny(), epochs=600)
    return {"chosen": strategy.plan.name, "found": strategy.auto_plan.describe(), "used": [p.name for p in steps]}


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_link_that_has_become_slower_brings_other_candidates(is_guarded: bool) -> None:
    """If it fails, a compressor that promised nothing before is never tried, or one comes back that the guard left."""
    first, second = run_ranks(_fit_while_the_link_changes, is_guarded)
    assert first["used"] == second["used"]
    assert first["chosen"] == second["chosen"] == ("bf16" if is_guarded else "int8")
    before, after = first["used"][:700], first["used"][700:]
    events = [what for _, what in first["found"]["events"]]
    if is_guarded:
        assert "int8" in before
        assert "int8" not in after
        assert events == ["forbidden", "drift"]
        assert [one["plan"] for one in first["found"]["candidates"]] == ["uncompressed", "bf16"]
    else:
        assert "int8" not in before
        assert events == ["drift"]
        assert [one["plan"] for one in first["found"]["candidates"]] == ["uncompressed", _SMALL.name, "int8"]
    assert first["found"]["num_search_steps"] > 20
    assert "predicted were" in first["found"]["verdict"]


def _fit_lossless_while_the_link_changes() -> dict[str, Any]:
    with scripted({_SMALL: 0.7}, change=(700, {_SMALL: 2.8, _VIEW: 1.2})):
        strategy = CommOptDDP(plan="auto")
        trained = _fit(strategy, Tiny(), epochs=500)
    return {"trained": trained, "plain": _fit(DDPStrategy(), Tiny(), epochs=500), "chosen": strategy.plan}


@pytest.mark.exhaustive
def test_observing_again_within_a_fit_trains_the_same_bits() -> None:
    """If it fails, gradients are lost or added twice where the plan goes back to the user's to be observed."""
    for rank in run_ranks(_fit_lossless_while_the_link_changes):
        assert rank["chosen"] == _VIEW
        assert_same(rank["trained"], rank["plain"])


def _fit_fixed(arguments: dict[str, Any]) -> set[CommPlan]:
    fixed = {key.removesuffix("_list"): value for key, value in arguments.items()}
    others = [{**fixed, "bucket_cap_mb": 100}, {**fixed, "static_graph": True}]
    plans = [CommPlan.from_dict({**options, "comm_hook": "int8"}) for options in (*others, fixed)]
    with scripted(dict(zip(plans, (0.3, 0.4, 0.6), strict=True))) as steps:
        strategy = CommOptDDP(plan="auto", lossy=["int8"], **arguments)
        _fit(strategy, Tiny())
    assert strategy.plan == plans[-1]
    return {*steps}


@pytest.mark.exhaustive
@pytest.mark.skipif("bucket_cap_mb_list" not in ddp_options(), reason="this torch takes one bucket_cap_mb")
@pytest.mark.parametrize("name", ["bucket_cap_mb_list", "bucket_cap_mb"])
def test_what_the_user_has_fixed_stays(name: str) -> None:
    """If it fails, plan="auto" replaces buckets that the user has chosen, by either name."""
    for plans in run_ranks(_fit_fixed, {name: [0.002, 0.001]}):
        assert {plan.bucket_cap_mb for plan in plans} == {(0.002, 0.001)}
        assert {plan.static_graph for plan in plans} == {None}
        assert len(plans) == 2


def _fit_cached(folder: str) -> list[tuple[str, int, int]]:
    found = []
    for arguments in ({}, {}, {"static_graph": True}, {"lossy": ["bf16"]}):
        small = CommPlan.from_dict({**_SMALL.to_dict(), "static_graph": arguments.get("static_graph")})
        with scripted({small: 0.7}, folder=folder) as steps:
            strategy = CommOptDDP(plan="auto", **arguments)
            _fit(strategy, Tiny())
        found.append((strategy.plan.name, strategy.auto_plan.describe().get("num_search_steps", 0), steps.index(small)))
    return found


@pytest.mark.exhaustive
def test_a_choice_is_tried_first_in_the_next_fit(tmp_path: Path) -> None:
    """If it fails, every fit predicts anew what the last one has found, or takes what another kind of fit has found."""
    first, again, static, lossy = run_ranks(_fit_cached, str(tmp_path))[0]
    assert first[0] == again[0] == lossy[0] == "uncompressed, 0.001 MiB buckets"
    assert static[0] == "uncompressed, 0.001 MiB buckets, static graph"
    assert again[1] == lossy[1] < 60
    assert again[2] < first[2]
    assert len([*tmp_path.rglob("*.json")]) == 2


class StopWhileTried(Callback):
    """Saves a checkpoint and ends the fit while a candidate is tried."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tried = ""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        plan = trainer.strategy.plan  # type: ignore[attr-defined]
        if plan.comm_hook is not None and not self.tried:
            self.tried = plan.name
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def _fit_until_tried(path: str) -> dict[str, Any]:
    with scripted({CommPlan.from_dict({"comm_hook": "int8"}): 0.6}):
        strategy, stop = CommOptDDP(plan="auto", lossy=["int8"]), StopWhileTried(path)
        job = trainer(strategy, max_epochs=40, callbacks=[stop])
        job.fit(Tiny(), loader())
        found: dict[str, Any] = {
            "tried": stop.tried,
            "kept": strategy.plan.name,
            "verdict": strategy.auto_plan.describe(),
        }
        job.fit_loop.max_epochs = job.current_epoch + 1
        job.fit(Tiny(), loader())
        found["next"] = strategy.auto_plan.describe().get("status")
        again = CommOptDDP(plan="auto", lossy=["int8"])
        trainer(again, max_epochs=8).fit(Tiny(), loader(), ckpt_path=path)
        found["resumed"] = again.auto_plan.describe().get("status")
    return found


def test_a_plan_that_is_only_tried_is_not_kept(tmp_path: Path) -> None:
    """If it fails, a fit that ends within the search leaves the next one, or a resumed one, with a plan by chance."""
    first, second = run_ranks(_fit_until_tried, str(tmp_path / "last.ckpt"))
    assert first["tried"] == second["tried"] == "int8"
    assert first["kept"] == second["kept"] == "uncompressed"
    assert first["next"] == first["resumed"] == "measuring"
    assert "The fit ended within the search" in first["verdict"]["verdict"]


def _fit_beside_others() -> list[tuple[float, bool]]:
    seen: list[tuple[float, bool]] = []
    with (
        scripted({_SMALL: 1.0}),
        patch.object(GradientTimes, "slowdown", 3.0),
        patch("os.sched_getaffinity", lambda process: {0, 1}, create=True),
    ):
        inner = tuner_module.shortlist

        def shortlist(basis: Basis, *others: Any) -> Any:
            seen.append((basis.workload.num_others, basis.workload.shares_core))
            return inner(basis, *others)

        with patch.object(tuner_module, "shortlist", shortlist):
            _fit(CommOptDDP(plan="auto"), Tiny(), epochs=5)
    return seen


def test_candidates_are_predicted_for_the_core_that_other_programs_leave() -> None:
    """If it fails, where ranks share cores layouts are tried whose buckets compete for them."""
    assert run_ranks(_fit_beside_others) == [[(2.0, True)], []]


class _Rated(Tiny):
    lr = 0.1


def _lengths_with_rate_finder(folder: str) -> list[float]:
    lengths: list[float] = []

    def direct(num_steps: float, **options: Any) -> Director:
        lengths.append(num_steps)
        return Director(num_steps, **options)

    finder = callbacks.LearningRateFinder(num_training_steps=3, early_stop_threshold=None)
    with patch.object(tuner_module, "Director", direct):
        options: dict[str, Any] = {"callbacks": [finder], "default_root_dir": folder, "enable_checkpointing": True}
        trainer(CommOptDDP(plan="auto"), max_epochs=2, **options).fit(_Rated(), loader())
    return lengths


def test_the_fit_after_a_learning_rate_finder_is_tuned(tmp_path: Path) -> None:
    """If it fails, a fit with a LearningRateFinder never searches, and says that it has only the finder's steps."""
    assert run_ranks(_lengths_with_rate_finder, str(tmp_path)) == [[3, 6], []]


def _fit_alone() -> dict[str, Any]:
    strategy = CommOptDDP(plan="auto", lossy=["bf16"])
    _fit(strategy, Tiny(), epochs=1)
    return strategy.auto_plan.describe()


def test_one_rank_chooses_nothing() -> None:
    """If it fails, plan="auto" breaks a fit of one process, or times its steps."""
    assert run_ranks(_fit_alone, world_size=1) == [{}]
