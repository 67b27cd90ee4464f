"""The verdict: the right cause comes first, settings are named, and bounds follow from the numbers.

What it says is in ``golden/verdicts.txt``, a block for each of `CASES`, whose name says what a reader needs to hear.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightning_commopt.measure.forecasts import Forecast
from lightning_commopt.measure.operations import Operation
from lightning_commopt.measure.verdict import Verdict, verdict
from support.sample_metrics import sample_metrics

SETTING = re.compile(
    r"self.manual_backward|bucket_cap_mb=|comm_hook=|accumulate_grad_batches=|num_workers=|strategy=|rank \d|batches of"
    r"|param_hook=|accumulate_grads=|overlap=|sync_every=|sigterm_every_n_steps=|sync_dist|broadcast_buffers=|reduce-scatters"
)
BOUND = re.compile(r"at most (\d+\.\d+) times as fast")

LOSSLESS = ("none", "all_reduce", "NaiveDP", "InterleavedDP", "MyStrategy", "ModelParallelStrategy")
FORECASTS = [
    Forecast("bucket_cap_mb=5", False, 0.0, 0.68, 0.65, 0.7, present_s=0.7),
    Forecast('comm_hook="bf16"', True, 0.008, 0.56, 0.5, 0.6, present_s=0.7),
    Forecast('comm_hook="int8"', True, 0.02, 0.5, 0.4, 0.56, present_s=0.7),
    Forecast('comm_hook="int4", bucket_cap_mb=50', True, 0.2, 0.48, 0.4, 0.5, present_s=0.7),
    Forecast('comm_hook="powersgd"', True, 1.0, 0.42, 0.4, 0.45, present_s=0.7),
    Forecast("Trainer(accumulate_grad_batches=4)", False, 1.0, 0.5, 0.4, 0.6, 0.7, "a step takes more", False),
]
EXACT = Forecast('comm_hook="none"', False, 0.0, 0.5, 0.45, 0.55, present_s=0.7)
OTHER_BUCKETS = EXACT._replace(setting="bucket_cap_mb=5")
SHARDED = [
    Forecast('accumulate_grads="unsharded"', False, 0.0, 0.6, 0.55, 0.65, 0.7, "it takes memory"),
    Forecast('comm_hook="int8"', True, 0.02, 0.5, 0.4, 0.56, present_s=0.7),
    Forecast('param_hook="int8"', True, 0.02, 0.51, 0.4, 0.6, present_s=0.7),
]
NO_COMMUNICATION: dict[str, Any] = dict.fromkeys(("comm_s", "wire_s", "exposed_s", "exposed_wait_s", "wait_s"), 0.0)
RARE: dict[str, Any] = {"comm_s": 0.12, "exposed_s": 0.1, "exposed_wait_s": 0.09, "straggler_rank": 1.0}
HIDDEN: dict[str, Any] = {"exposed_s": 0.02, "exposed_wait_s": 0.0}


def judged(
    comm_hook: str = "none",
    world_size: int = 8,
    forecasts: Sequence[Forecast] = tuple(FORECASTS),
    operations: Sequence[Operation] = (),
    **metrics: float,
) -> Verdict:
    result = verdict(
        sample_metrics(**metrics),
        world_size=world_size,
        comm_hook=comm_hook,
        is_lossy=comm_hook not in LOSSLESS,
        forecasts=forecasts,
        operations=operations,
    )
    assert all(SETTING.search(text) for text in result.recommendations)
    assert not re.search(r"nan|inf\b|-\d|[{}]", " ".join((result.headline, *result.recommendations)))
    return result


def beside(operation: str, phase: str, origin: str, calls: float, num_bytes: float, seconds: float | None) -> Verdict:
    """Judges the usual step with further collectives in it, as many and as long in each step."""
    return judged(forecasts=(), operations=[Operation(operation, phase, origin, calls, num_bytes, seconds)])


def sharded(
    comm_hook: str = "ModelParallelStrategy",
    exposed_s: float | None = None,
    forecasts: Sequence[Forecast] = (),
    **metrics: float,
) -> Verdict:
    """Judges a step of FSDP2, whose collectives are no buckets of ours."""
    share_s = exposed_s and exposed_s / 2
    operations = [
        Operation("all_gather", "forward", "", 4, 4e6, 0.2, exposed_s=share_s),
        Operation("reduce_scatter", "backward", "", 4, 4e6, 0.2, exposed_s=share_s),
    ]
    return judged(comm_hook, 2, forecasts, operations, **NO_COMMUNICATION, **metrics)


def scattered(comm_hook: str, num_phases: float) -> Verdict:
    operation = Operation("reduce_scatter", "backward", "", 12.0, 8e6, 0.1, num_phases=num_phases)
    return judged(comm_hook, forecasts=(), operations=[operation], **NO_COMMUNICATION)


USUAL = "a usual step: what is exposed and could be won, other plans with their intervals, and none that saves little"
CASES: dict[str, Callable[[], Verdict]] = {
    USUAL: judged,
    "communication is hidden: nothing to do": lambda: judged(exposed_s=0.02, exposed_wait_s=0.005),
    "hidden behind a lossy compressor that is not faster": lambda: judged(
        "bf16", forecasts=[EXACT._replace(step_s=0.7, low_s=0.68, high_s=0.72)], **HIDDEN
    ),
    "hidden behind a lossy compressor that is slower": lambda: judged(
        "bf16", forecasts=[EXACT._replace(step_s=0.6, high_s=0.65)], **HIDDEN
    ),
    "hidden behind a lossy compressor that is faster": lambda: judged(
        "bf16", forecasts=[EXACT._replace(step_s=0.75, high_s=0.8)], **HIDDEN
    ),
    "hidden, and exact anyway": lambda: judged("all_reduce", forecasts=[EXACT], **HIDDEN),
    "a compressor that costs more than it saves": lambda: judged("int8", forecasts=[EXACT]),
    "perhaps such a compressor": lambda: judged("int8", forecasts=[EXACT._replace(high_s=0.72)]),
    "every prediction may be slower": lambda: judged(
        forecasts=[forecast._replace(high_s=0.71) for forecast in FORECASTS]
    ),
    "every prediction is hardly faster": lambda: judged(
        forecasts=[forecast._replace(step_s=0.69) for forecast in FORECASTS]
    ),
    "other buckets are lossless": lambda: judged(forecasts=[OTHER_BUCKETS]),
    "other buckets of a lossy plan are not": lambda: judged("int8", forecasts=[OTHER_BUCKETS]),
    "a straggler comes first": lambda: judged(
        forecasts=(), straggler_rank=3.0, straggler_slowdown=0.25, exposed_s=0.12, exposed_wait_s=0.1
    ),
    "the first rank may be the straggler": lambda: judged(forecasts=(), straggler_rank=0.0, straggler_slowdown=0.25),
    "what a straggler leaves is worth something as well": lambda: judged(
        straggler_rank=3.0, straggler_slowdown=0.25, exposed_s=0.3, exposed_wait_s=0.1
    ),
    "exposed time that is waiting is no compressor's business": lambda: judged(
        forecasts=(), exposed_s=0.1, exposed_wait_s=0.09, wait_s=0.1
    ),
    "less than half of the exposed time is waiting": lambda: judged(forecasts=(), exposed_s=0.1, exposed_wait_s=0.04),
    "single gradients want buckets": lambda: judged("NaiveDP", exposed_s=0.4, exposed_wait_s=0.0),
    "single gradients in turn want them too": lambda: judged("InterleavedDP", exposed_s=0.4, exposed_wait_s=0.0),
    "no predictions": lambda: judged(forecasts=()),
    "data dominates": lambda: judged(data_s=0.4, step_s=1.0, exposed_s=0.1, exposed_wait_s=0.0),
    "data comes last where communication takes more": lambda: judged(data_s=0.2),
    "data takes little": lambda: judged(data_s=0.1),
    "one rank": lambda: judged(world_size=1, data_s=0.01, **NO_COMMUNICATION),
    "one rank that waits for data": lambda: judged(world_size=1, data_s=0.3, **NO_COMMUNICATION),
    "no gradient sync was observed": lambda: judged(forecasts=(), data_s=0.3, **NO_COMMUNICATION),
    "no gradient sync of another strategy": lambda: judged("MyStrategy", forecasts=(), data_s=0.3, **NO_COMMUNICATION),
    "marks that do not fit together": lambda: judged(exposed_s=0.8, comm_s=0.8),
    "many checks for SIGTERM": lambda: beside("broadcast", "data", "lightning", 4.0, 32.0, 0.007),
    "one check for SIGTERM": lambda: beside("broadcast", "data", "lightning", 1.0, 8.0, 0.007),
    "data seems to dominate, but most of it is that check": lambda: judged(
        forecasts=(), operations=[Operation("broadcast", "data", "lightning", 1.0, 8.0, 0.3)], data_s=0.4, step_s=1.0
    ),
    "a rare collective of Lightning": lambda: beside("all_reduce", "data", "lightning", 0.1, 0.4, 0.007),
    "metrics are reduced in forward": lambda: beside("all_reduce", "forward", "", 12.0, 48.0, 0.07),
    "they take little": lambda: beside("all_reduce", "forward", "", 12.0, 48.0, 0.007),
    "they are large, so no metrics": lambda: beside("all_reduce", "forward", "", 12.0, 48e6, 0.07),
    "they are in backward": lambda: beside("all_reduce", "backward", "", 12.0, 48.0, 0.07),
    "their time is unknown": lambda: beside("all_reduce", "forward", "", 12.0, 48.0, None),
    "they are a compressor's": lambda: beside("send", "forward", "int8 all-gather", 12.0, 48.0, 0.07),
    "buffers are broadcast in forward": lambda: beside("broadcast", "forward", "", 2.0, 72.0, 0.07),
    "DiLoCo that waits": lambda: judged("diloco", **RARE),
    "DiLoCo with int4 that waits mostly for the last rank": lambda: judged(
        "diloco_int4", **RARE | {"straggler_rank": -1.0}
    ),
    "DiLoCo whose exchanges are hidden": lambda: judged("diloco_int4", **RARE | {"exposed_s": 0.01}),
    "DiLoCo that waits for data": lambda: judged("diloco", data_s=0.4, **RARE | {"exposed_s": 0.0}),
    "DiLoCo without an exchange": lambda: judged("diloco", **NO_COMMUNICATION),
    "FSDP2 whose exposed time is not measured": sharded,
    "FSDP2 that waits": lambda: sharded(exposed_s=0.3, step_s=2 / 3),
    "FSDP2 whose collectives are hidden": lambda: sharded(exposed_s=0.005, step_s=2 / 3),
    "FSDP2 with predictions": lambda: sharded("CommOptModelParallel", forecasts=SHARDED),
    "FSDP2 with predictions that may all be slower": lambda: sharded(
        "CommOptModelParallel", forecasts=[forecast._replace(high_s=0.71) for forecast in SHARDED]
    ),
    "FSDP2 that waits, with predictions that may all be slower": lambda: sharded(
        "CommOptModelParallel", 0.3, [forecast._replace(high_s=0.71) for forecast in SHARDED], step_s=2 / 3
    ),
    "FSDP2 whose compressor takes more time than it saves": lambda: sharded("int8", forecasts=[EXACT, *SHARDED]),
    "FSDP2 with predictions and nothing to save": lambda: sharded("CommOptModelParallel", 0.005, SHARDED, step_s=2 / 3),
    "FSDP2 that is compressed": lambda: judged(
        "CommOptModelParallel",
        2,
        (),
        [Operation("reduce_scatter", "backward", "uncompressed reduce-scatter", 2.0, 8e6, None)],
        **NO_COMMUNICATION,
    ),
    "FSDP2 that is compressed, and waits for small messages of biases": lambda: judged(
        "CommOptModelParallel",
        2,
        (),
        [
            Operation("all_gather", "forward", "", 2.0, 8e6, 0.1, exposed_s=0.01),
            Operation("send", "backward", "uncompressed reduce-scatter", 2.0, 3e3, 0.2, exposed_s=0.2),
            Operation("send", "backward", "int8 reduce-scatter", 2.0, 2e6, 0.1, exposed_s=0.1),
            Operation("recv", "backward", "int8 reduce-scatter", 2.0, 2e6, 0.1, exposed_s=0.1),
        ],
        **NO_COMMUNICATION,
    ),
    "FSDP2 reduce-scatters every accumulated batch": lambda: scattered("ModelParallelStrategy", 4.0),
    "FSDP2 with one batch in a step": lambda: scattered("ModelParallelStrategy", 1.0),
    "FSDP2 of ours with accumulated batches": lambda: scattered("CommOptModelParallel", 4.0),
}


def test_verdicts(golden: Callable[[str, str], None]) -> None:
    blocks = []
    for name, judge in CASES.items():
        result = judge()
        lines = [result.headline, *(f"- {text}" for text in result.recommendations), result.note]
        blocks.append("\n".join([f"[{name}]", *filter(None, lines)]))
    golden("verdicts", "\n\n".join(blocks))


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        (USUAL, [0.7 / 0.4]),
        ("communication is hidden: nothing to do", [0.7 / 0.68]),
        ("a straggler comes first", [0.7 / (0.7 - 0.25 * 0.58)]),
        ("exposed time that is waiting is no compressor's business", [0.7 / 0.6, 0.7 / 0.61]),
        ("data dominates", [1 / 0.6, 1 / 0.9]),
    ],
)
def test_bounds_follow_from_the_numbers(name: str, limits: list[float]) -> None:
    """If it fails, more is promised than a step has to give."""
    result = CASES[name]()
    stated = [float(found) for text in (result.headline, *result.recommendations) for found in BOUND.findall(text)]
    assert stated == pytest.approx(limits, abs=0.01)


def test_no_prediction_contradicts_the_headline() -> None:
    """If it fails, a plan is said to be faster than a step without any communication would be, or than it may be.

    Accumulation may be: it saves the optimizer's time, too.
    """
    for seed in range(50):
        drawn = random.Random(seed)
        exposed_s = drawn.uniform(0.04, 0.4)
        predicted = []
        for forecast in FORECASTS:
            step_s = drawn.uniform(0.1, 0.9)
            low_s, high_s = step_s * drawn.uniform(0.3, 1), step_s * drawn.uniform(1, 2)
            predicted.append(forecast._replace(step_s=step_s, low_s=low_s, high_s=high_s))
        result = judged(forecasts=predicted, exposed_s=exposed_s, exposed_wait_s=0.0)
        (bound,) = map(float, BOUND.findall(result.headline))
        for text in result.recommendations:
            limit = round(predicted[-1].speedups()[-1], 2) if "accumulate" in text else bound
            for expected, low, high in re.findall(r"(\d+\.\d+) \((\d+\.\d+) to (\d+\.\d+)\) times", text):
                assert 1 <= float(low) <= float(expected) <= float(high) <= limit, seed


def test_before_the_first_step() -> None:
    """All of it is NaN then; there are no recommendations, and no error."""
    nothing = {name: float("nan") for name in sample_metrics() if "straggler" not in name}
    result = verdict({**sample_metrics(), **nothing}, world_size=8, comm_hook="none", is_lossy=False)
    assert "No gradient sync" in result.headline
    assert len(result.recommendations) == 1


def test_a_missing_metric_is_an_error() -> None:
    metrics = sample_metrics()
    del metrics["exposed_s"]
    with pytest.raises(KeyError, match="exposed_s"):
        verdict(metrics, world_size=2, comm_hook="none", is_lossy=False)
