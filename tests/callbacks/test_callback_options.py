"""What callbacks say of options that they refuse."""

from collections.abc import Callable

from lightning_commopt.callbacks import (
    CommTimeMonitor,
    CUDAProfilerWindow,
    HangMonitor,
    NVTXRanges,
    OuterMomentum,
    RunRecorder,
    SpeedMonitor,
)
from support.refusals import one_by_one, refusals

CALLS = [
    *one_by_one(CommTimeMonitor, every_n_steps=[0, 2.5], num_warmup_steps=[-1], log=["none"], save_records=["yes"]),
    *one_by_one(CommTimeMonitor, fit_link_model=[1], print_summary=[None]),
    *one_by_one(CUDAProfilerWindow, start_step=[-1, [3, -2], "10", 1.5, [], [20, 10, 12]], num_steps=[0, True]),
    *one_by_one(CUDAProfilerWindow, ranks=[[-1], [], 0, "0"]),
    (CUDAProfilerWindow, {"start_step": [5, 5], "num_steps": 1}),
    *one_by_one(HangMonitor, after_s=[0, float("nan"), "60"], action=["kill"], dirpath=["s3://bucket/runs", 5]),
    *one_by_one(NVTXRanges, colors=[{"foward": "red"}, {"forward": "reed"}, "red"], domain=["", None]),
    *one_by_one(NVTXRanges, colors=[{"forward": value} for value in (-1, 1 << 32, True, None)]),
    *one_by_one(OuterMomentum, sync_every=[0, 1.5], outer_lr=[0, "1"], outer_momentum=[1, -0.1], nesterov=[None]),
    *one_by_one(RunRecorder, val_loss=[3], val_accuracy=[""], ends_run=[1]),
    *one_by_one(SpeedMonitor, num_warmup_steps=[-1, "3", 1.5, None]),
]


def test_refused_options(golden: Callable[[str, str], None]) -> None:
    """If it fails, a mistake is accepted and shows itself when a run hangs or ends, or nobody learns what is meant."""
    golden("refused_options", refusals(CALLS))
