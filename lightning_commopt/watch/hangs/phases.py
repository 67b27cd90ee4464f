"""The phases that a hang can be in, and how long each may last without progress."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

_SLOW_FACTOR = 10
_SHOWN_FACTOR = 3
_NUM_SHOWN = 50


@dataclass(frozen=True)
class Phase:
    """A part of training that a rank can be in.

    Attributes:
        name: as reports give it.
        where: as a sentence says it, behind "is still".
        is_slow: whether it may always take ``10 * after_s``, as it may hold anything: a checkpoint, a first batch.
    """

    name: str
    where: str
    is_slow: bool = False


PHASES = (
    Phase("setup", "in the setup of the fit", is_slow=True),
    Phase("data", "starting the dataloader", is_slow=True),
    Phase("data", "in the dataloader"),
    Phase("forward", "in forward"),
    Phase("backward", "in backward"),
    Phase("optimizer", "in the optimizer"),
    Phase("callbacks", "in callbacks and logging"),
    Phase("callbacks", "in the end of an epoch", is_slow=True),
    Phase("checkpoint", "writing a checkpoint", is_slow=True),
    *(
        phase
        for stage in ("validation", "test", "predict")
        for phase in (
            Phase(stage, f"in the start or end of {stage}", is_slow=True),
            Phase(stage, f"in {stage}"),
            Phase(stage, f"in the dataloader of {stage}"),
        )
    ),
)
SETUP, DATA_START, DATA, FORWARD, BACKWARD, OPTIMIZER, CALLBACKS, EPOCH_END, CHECKPOINT = range(9)
EVALUATION_START, EVALUATION_BATCH, EVALUATION_DATA = range(3)
"""To be added to `first_of_stage`."""


def first_of_stage(stage: str) -> int:
    """Returns the number of a stage's first phase.

    Args:
        stage: "validation", "test" or "predict".
    """
    return next(number for number, phase in enumerate(PHASES) if phase.name == stage)


class PhaseTimes:
    """What a rank has shown: how long its phases have lasted in this run.

    Args:
        after_s: seconds without progress that a phase is allowed at least.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._shown: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_SHOWN))

    def add(self, phase: int, seconds: float) -> None:
        """A phase has ended.

        Args:
            phase: index into `PHASES`.
            seconds: that it has lasted without any progress within.
        """
        self._shown[phase].append(seconds)

    def limit_s(self, phase: int) -> float:
        """Returns for how long a phase may show no progress.

        Three times the longest of its last 50 times, but at least ``after_s``; at least ten times ``after_s`` where it
        is slow by nature, or has not ended before: a first forward compiles.
        """
        shown = self._shown[phase]
        base = self._after_s * (_SLOW_FACTOR if PHASES[phase].is_slow or not shown else 1)
        # The first time counts for nothing later, if there are others: it is when things are made.
        later = [*shown][1:] if len(shown) < _NUM_SHOWN else shown
        return max(base, _SHOWN_FACTOR * max(later or shown, default=0.0))
