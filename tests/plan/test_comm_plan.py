"""CommPlan: what it accepts, what it refuses and how, and its way through JSON."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt import CommOptDDP, CommPlan, PowerSGD
from lightning_commopt.compressors import (
    AfterSteps,
    Cast,
    Claims,
    Compressor,
    ErrorFeedback,
    Int8,
    Layout,
    Rounds,
    State,
    registry,
)
from lightning_commopt.fabric import CommOptDDP as FabricCommOptDDP
from lightning_commopt.plan import OptionError, UnknownOptionError
from lightning_commopt.plan import ddp as ddp_plan
from lightning_commopt.plan.ddp import DDP_OPTION_SINCE, ddp_options
from lightning_commopt.strategy import arguments
from lightning_commopt.text import validation
from support.refusals import Call, one_by_one, refusals

BF16 = Cast(dtype=torch.bfloat16)
_SWITCHES = [f.name for f in dataclasses.fields(CommPlan) if f.name not in ("bucket_cap_mb", "comm_hook")]


class OwnFeedback(Compressor):
    """A user's, not a dataclass, with a residual in its state."""

    claims = Claims(keeps_residual=True)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return {"residual": torch.zeros(layout.numel)}

    def rounds(self, flat: torch.Tensor, layout: Layout, state: State, channel: Any, carried: Any = None) -> Rounds:
        yield channel.all_reduce(flat)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        return layout.numel * 4

    def residual(self, layout: Layout, state: State, given: torch.Tensor | None = None) -> torch.Tensor:
        return state["residual"]

    def __repr__(self) -> str:
        return "OwnFeedback()"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True, "gradient_as_bucket_view": False, "find_unused_parameters": False},
        {"bucket_cap_mb": 0.5},
        {"comm_hook": "bf16"},
        {"comm_hook": {"name": "powersgd", "matrix_rank": 4, "start_step": 500}},
        {"comm_hook": AfterSteps(inner=ErrorFeedback(inner=BF16), start_step=3)},
        {"comm_hook": {"name": "powersgd", "matrix_rank": np.int64(4), "min_compression_rate": np.float32(1.5)}},
    ],
)
def test_json_and_back(options: dict[str, Any], tmp_path: Path) -> None:
    """If it fails, a saved plan is not the plan that ran."""
    plan = CommPlan(**options)
    plan.save(tmp_path / "plan.json")
    assert CommPlan.load(tmp_path / "plan.json") == plan
    assert CommOptDDP.from_plan(tmp_path / "plan.json", process_group_backend="gloo").plan == plan
    assert CommPlan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("content", "error", "reason"),
    [
        (b"{", OptionError, "a plan must be JSON"),
        (b"", OptionError, "a plan must be JSON"),
        (b"[1]", OptionError, "a plan must be a JSON object"),
        (b'{"bucket_cap": 5}', UnknownOptionError, "did you mean 'bucket_cap_mb'"),
        (b'{"comm_hook": "bf17"}', OptionError, "'bf17' is unknown"),
        (b"\xff\xfe", OptionError, "can't decode"),
    ],
)
def test_a_broken_file_is_named(content: bytes, error: type[OptionError], reason: str, tmp_path: Path) -> None:
    """If it fails, a sweep over files of plans ends in an error that does not name the file."""
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    for load in (CommPlan.load, CommOptDDP.from_plan, FabricCommOptDDP.from_plan):
        with pytest.raises(error, match=f"{path} holds no plan: .*{reason}"):
            load(path)


@pytest.fixture
def all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every option of DDP for one that this torch has."""
    known = frozenset({*ddp_options(), *DDP_OPTION_SINCE})
    for module in (ddp_plan, arguments):
        monkeypatch.setattr(module, "ddp_options", lambda: known)


def test_buckets_are_in_mebibytes(all_options: None) -> None:
    assert CommPlan(bucket_cap_mb=[1, 2.5]).name == "uncompressed, buckets of 1, 2.5 MiB"


@pytest.mark.parametrize(
    ("written", "compressor"),
    [("bf16", BF16), ("none", None), ({"name": "powersgd", "matrix_rank": 2}, PowerSGD(matrix_rank=2)), (BF16, BF16)],
)
def test_with_comm_hook(written: Any, compressor: Any) -> None:
    """If it fails, apply_plan("bf16") changes more than the compressor, or less."""
    plan = CommPlan(bucket_cap_mb=5, comm_hook=Int8())
    assert plan.with_comm_hook(written) == CommPlan(bucket_cap_mb=5, comm_hook=compressor)


@pytest.mark.parametrize(
    ("config", "compressor"),
    [
        (None, None),
        ("none", None),
        ({"name": "none"}, None),
        ("bf16", BF16),
        ({"name": "powersgd", "matrix_rank": 2}, PowerSGD(matrix_rank=2)),
        (OmegaConf.create({"name": "powersgd", "start_step": 7}), PowerSGD(start_step=7)),
        ({"name": "error_feedback", "inner": "bf16"}, ErrorFeedback(inner=BF16)),
        (PowerSGD(), PowerSGD()),
    ],
)
def test_comm_hook_forms(config: Any, compressor: Any) -> None:
    """If it fails, one of the ways to write a comm hook means something else."""
    assert CommPlan(comm_hook=config).comm_hook == compressor
    assert CommOptDDP(comm_hook=config).plan.comm_hook == compressor


def test_ddp_gets_only_what_is_set() -> None:
    """If it fails, DDP's own defaults are overridden: an explicit bucket_cap_mb=25 is not its default."""
    assert CommPlan().ddp_kwargs() == {}
    assert CommOptDDP()._ddp_kwargs == {}
    assert CommOptDDP(find_unused_parameters=False, comm_hook="bf16")._ddp_kwargs == {"find_unused_parameters": False}
    assert CommOptDDP(bucket_cap_mb=25, dim=0)._ddp_kwargs == {"bucket_cap_mb": 25, "dim": 0}


def test_bucket_list(monkeypatch: pytest.MonkeyPatch, all_options: None) -> None:
    """If it fails, one size for each bucket does not reach DDP, or reaches a torch that lacks the option."""
    plan = CommPlan(bucket_cap_mb=OmegaConf.create([1, 2.5]))
    assert plan.ddp_kwargs() == {"bucket_cap_mb_list": [1, 2.5]}
    assert CommPlan.from_json(plan.to_json()) == plan
    assert CommOptDDP(bucket_cap_mb_list=[1, 2.5]).plan == plan
    with pytest.raises(OptionError, match="exclude each other"):
        CommOptDDP(bucket_cap_mb_list=[1], bucket_cap_mb=1)
    with pytest.raises(OptionError, match=r"bucket_cap_mb_list must be a list .* got 25"):
        CommOptDDP(bucket_cap_mb_list=25)
    monkeypatch.setattr(ddp_plan, "ddp_options", lambda: ddp_options() - {"bucket_cap_mb_list"})
    with pytest.raises(OptionError, match=r"a list as bucket_cap_mb needs torch >= 2\.11"):
        CommPlan(bucket_cap_mb=[1, 2])


def _hook(name: str, **options: Any) -> dict[str, Any]:
    return {"comm_hook": {"name": name, **options}}


MAKERS: list[Callable[[dict[str, Any]], object]] = [
    CommPlan.from_dict,
    lambda options: CommOptDDP(**options),
    lambda options: FabricCommOptDDP(**options),
]
_SIZES: list[Any] = [0, -1.5, True, "25", float("nan"), []]
REFUSED: list[dict[str, Any]] = [
    *({name: "false"} for name in _SWITCHES),
    *({"bucket_cap_mb": size} for size in _SIZES),
    *({"static_graph": "yes"}, {"find_unused_parameters": 2}),
    *(_hook("powersgd", start_step=step) for step in (2.5, "5", -1)),
    *(_hook("powersgd", matrix_rank=rank) for rank in (0, 1.5)),
    *(_hook("powersgd", **{name: "no"}) for name in ("error_feedback", "warm_start")),
    *(
        _hook("powersgd", **option)
        for option in ({"min_compression_rate": 0}, {"epsilon": -1}, {"seed": -1}, {"rank": 2})
    ),
    *({"comm_hook": hook} for hook in ("zip", {"matrix_rank": 2}, 3, PowerSGD, default_hooks.bf16_compress_hook)),
    *(_hook("none", matrix_rank=2), _hook("error_feedback"), _hook("error_feedback", inner="none")),
    # The inner residual would be lost in silence when DDP lays out its buckets anew.
    *(_hook("error_feedback", inner=inner) for inner in ("powersgd", ErrorFeedback(inner=BF16), OwnFeedback())),
    _hook("error_feedback", inner={"name": "hierarchical", "inner": "int8"}),
    _hook("error_feedback", inner={"name": "by_size", "min_numel": 100, "inner": "int8"}),
]
GUESSED = [None, {"bucket_cap_mb": 5}, "my_plan.json", "intt8", PowerSGD]
"""What may mean something else than a compressor where one is given in place of a plan."""


def test_refused_options(
    golden: Callable[[str, str], None], all_options: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a user's mistake is found late, or its message does not say what is allowed."""
    # Messages list the known names, among them those that other tests of this process have registered for good.
    entries = registry._BUCKET_ENTRIES.items()
    ours = {name: entry for name, entry in entries if entry.cls.__module__.startswith("lightning_commopt.")}
    monkeypatch.setattr(registry, "_BUCKET_ENTRIES", ours)
    calls: list[Call] = [(CommPlan.from_dict, {"options": options}) for options in REFUSED]
    calls += one_by_one(CommPlan().with_comm_hook, comm_hook=GUESSED)
    golden("refused_plans", re.sub(r"(function \w+) at 0x\w+", r"\1", refusals(calls, OptionError)))
    for options in REFUSED:
        said = []
        for make in MAKERS:
            with pytest.raises(OptionError) as caught:
                make(options)
            said.append(str(caught.value))
        assert said == said[:1] * 3
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionError, MisconfigurationException)


def test_an_unknown_option() -> None:
    for make in MAKERS:
        with pytest.raises(UnknownOptionError, match=r"unknown option 'bucket_cap'; known options: .*bucket_cap_mb"):
            make({"bucket_cap": 25})


def test_an_option_of_a_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a user of an old torch gets a TypeError out of DDP in the middle of fit."""
    monkeypatch.setattr(ddp_plan, "ddp_options", lambda: frozenset({"bucket_cap_mb"}))
    for name, since in DDP_OPTION_SINCE.items():
        options = {name: [1]} if name == "bucket_cap_mb_list" else {name: True}
        with pytest.raises(OptionError, match=f"needs torch >= {since}, but torch .* is installed"):
            CommOptDDP(**options)


def test_a_hook_where_ddp_leaves_out_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, the hook waits for the last bucket of a backward, which may never come."""
    monkeypatch.setattr(ddp_plan, "ddp_options", lambda: frozenset({"skip_all_reduce_unused_params"}))
    with pytest.raises(OptionError, match="comm_hook and skip_all_reduce_unused_params=True exclude each other"):
        CommPlan.from_dict({"comm_hook": "bf16", "skip_all_reduce_unused_params": True})
    CommPlan.from_dict({"skip_all_reduce_unused_params": True})


def test_settings_of_powersgd_without_effect() -> None:
    """If it fails, a setting has no effect and nobody says so."""
    validation.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="epsilon=0.1 has no effect with matrix_rank=2"):
        PowerSGD(matrix_rank=2, epsilon=0.1)
    with pytest.warns(UserWarning, match="refresh_steps=5 has no effect with warm_start=False"):
        PowerSGD(warm_start=False, refresh_steps=5)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "int8", "error_feedback": False, "residual_dtype": "bfloat16"},
        {"name": "int4", "residual_dtype": "bfloat16"},
        {"name": "powersgd", "error_feedback": False, "residual_dtype": "bfloat16"},
    ],
)
def test_dtype_of_a_residual_that_is_not_kept(options: dict[str, Any]) -> None:
    """If it fails, who saves memory by it never learns that there was none to save."""
    validation.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="residual_dtype='bfloat16' has no effect with error_feedback=False"):
        plan = CommPlan.from_dict({"comm_hook": options})
    assert CommPlan.from_json(plan.to_json()) == plan  # without a second warning


NAMES: dict[str, dict[str, Any]] = {
    "uncompressed": {},
    "all_reduce": {"comm_hook": "all_reduce"},
    "bf16": {"comm_hook": "BF16"},
    "bf16 accumulate float32": {"comm_hook": {"name": "bf16", "accumulate": "float32"}},
    "fp16, 2.5 MiB buckets": {"comm_hook": "fp16", "bucket_cap_mb": 2.5},
    "powersgd rank 1": {"comm_hook": "powersgd"},
    "powersgd rank 4, start 500, 25 MiB buckets, static graph": {
        "comm_hook": {"name": "powersgd", "matrix_rank": 4, "start_step": 500},
        "bucket_cap_mb": 25,
        "static_graph": True,
    },
    "int8 no error feedback": {"comm_hook": {"name": "int8", "error_feedback": False}},
    "hierarchical (powersgd rank 2, start 5)": {
        "comm_hook": {"name": "hierarchical", "inner": {"name": "powersgd", "matrix_rank": 2, "start_step": 5}}
    },
    "after_steps (error_feedback (bf16)) start 3": {
        "comm_hook": AfterSteps(inner=ErrorFeedback(inner=BF16), start_step=3)
    },
    "uncompressed, bucket view, find unused parameters": {
        "gradient_as_bucket_view": True,
        "find_unused_parameters": True,
    },
    "uncompressed, no broadcast buffers": {"broadcast_buffers": False},
}


@pytest.mark.parametrize("name", NAMES)
def test_name(name: str) -> None:
    """If it fails, tables and figures call a plan something else, or two plans the same."""
    assert CommPlan(**NAMES[name]).name == name
    assert CommPlan.from_json(CommPlan(**NAMES[name]).to_json()).name == name


def test_name_of_options_at_their_defaults() -> None:
    """If it fails, runs that trained alike look like two plans."""
    assert CommPlan(static_graph=False, find_unused_parameters=False).name == "uncompressed"


def test_every_option_is_in_the_name(all_options: None) -> None:
    """If it fails, two plans that differ in one option cannot be told apart."""
    for switch in _SWITCHES:
        names = [CommPlan.from_dict({switch: value}).name for value in (True, False)]
        assert len(set(names)) == 2
        if "uncompressed" in names:
            parameters = inspect.signature(DistributedDataParallel.__init__).parameters
            default = parameters[switch].default if switch in parameters else None
            assert default == (names[0] == "uncompressed")
