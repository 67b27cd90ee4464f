"""The options plan and lossy: what is refused, and what is left to choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_commopt import CommOptDDP, CommPlan, Int8, OptionError
from lightning_commopt.tune.options import TuneOptions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plan": "autos"}, "plan must be 'auto', .* no file 'autos'; did you mean 'auto'"),
        ({"plan": 3}, "plan must be 'auto', a CommPlan, .* got 3"),
        ({"plan": "auto", "lossy": 8}, "lossy must be 'never', a compressor, or a list of compressors .* got 8"),
        ({"plan": "auto", "lossy": "int7"}, "lossy must be 'never' or compressors: 'int7' is unknown"),
        ({"plan": "auto", "lossy": ["int7"]}, "lossy must be 'never' or compressors: 'int7' is unknown"),
        (
            {"plan": "autos", "lossy": ["int8"]},
            "lossy=.'int8'. lists what plan='auto' may choose, so it needs plan='auto', got 'autos'",
        ),
        ({"plan": "auto", "bucket_cap_mb": 5}, "nothing to choose: bucket_cap_mb=5 is given, and no lossy compressor"),
        ({"plan": "auto", "bucket_cap_mb": 5, "comm_hook": "bf16"}, "nothing to choose.*comm_hook is too"),
        ({"plan": "auto", "comm_hook": "bf16", "lossy": ["int8"]}, "no effect together with comm_hook='bf16'"),
        ({"plan": "auto", "ddp_comm_hook": print}, "plan='auto' and ddp_comm_hook exclude each other"),
        ({"plan": "auto", "mixed_precision": object()}, "plan='auto' and DDP's mixed_precision exclude each other"),
        (
            {"plan": "auto", "lossy": ["int8"], "skip_all_reduce_unused_params": True},
            "lossy=.'int8'. and skip_all_reduce_unused_params=True exclude each other",
        ),
        ({"plan": "auto", "uneven_batches": "allow"}, "plan='auto' and uneven_batches='allow' exclude each other"),
        ({"plan": CommPlan(), "static_graph": True}, "whole plan, so static_graph cannot be passed as well"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    """If it fails, a mistake is found within a fit, or trains something else than was meant."""
    with pytest.raises(OptionError, match=message):
        CommOptDDP(**arguments)


def test_a_whole_plan(tmp_path: Path) -> None:
    """If it fails, a plan that was found cannot be used in another job."""
    plan = CommPlan.from_dict({"comm_hook": "int8", "bucket_cap_mb": 5, "static_graph": True})
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        strategy = CommOptDDP(plan=given)
        assert strategy.plan == plan
        assert strategy._ddp_kwargs["static_graph"] is True
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(OptionError, match=r"other.json holds no plan"):
        CommOptDDP(plan=tmp_path / "other.json")


def test_what_is_left_to_choose() -> None:
    """If it fails, plan="auto" changes what the user has chosen, or does not use what is allowed."""
    base = CommPlan(static_graph=True, bucket_cap_mb=5)
    options = TuneOptions.of("auto", ["int8"], {"bucket_cap_mb": 5})
    assert options is not None
    assert options.lossy == (Int8(),)
    assert TuneOptions.of("auto", "int8", {"bucket_cap_mb": 5}) == options
    assert options.fits(CommPlan.from_dict({"static_graph": True, "bucket_cap_mb": 5, "comm_hook": "int8"}), base)
    assert not options.fits(CommPlan.from_dict({"static_graph": True, "bucket_cap_mb": 9, "comm_hook": "int8"}), base)
    assert not options.fits(CommPlan.from_dict({"static_graph": True, "bucket_cap_mb": 5, "comm_hook": "bf16"}), base)
    assert not options.fits(CommPlan(bucket_cap_mb=5), base)
    fixed = TuneOptions.of("auto", "never", {"comm_hook": "bf16"})
    assert fixed is not None
    assert fixed.fits(
        CommPlan.from_dict({"comm_hook": "bf16", "bucket_cap_mb": 1}), CommPlan.from_dict({"comm_hook": "bf16"})
    )
    assert not fixed.fits(CommPlan(bucket_cap_mb=1), CommPlan.from_dict({"comm_hook": "bf16"}))
    assert TuneOptions.of(None, "never", {}) is None
