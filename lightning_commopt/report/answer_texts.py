"""What answers say. ``{name}``, ``{than}`` are settings in quotes, ``{compared}`` is "65 % faster than ..."."""

from __future__ import annotations

from typing import Final

ANSWERS: Final = {
    "no throughput": "No run has a throughput: without the callback SpeedMonitor nothing can be compared.",
    "only one": "{name} reached {rate}{loss}; there is nothing to compare it with.",
    "baseline without rate": "{name} reached {rate}{loss}; {than} has no throughput to compare it with.",
    "lead": "{name} {what}: {compared}, {rate} against {other_rate}{of_ideal}.",
    "of ideal": ", {share:.0f} % of what {num_ranks} ranks could give",
    "beyond limit": (
        "{name} is {compared}, but hiding all communication could make it {limit} as fast at most: the machine was busy"
        " when {than} ran, or something else differs. Run both again."
    ),
    "baseline diverged": "In {num} of the {of} runs of {name}, the baseline, the loss became NaN; do not use it.",
    "one uncertain": "{names} has a higher median, up to {rate}, but the difference is uncertain.",
    "several uncertain": "{names} have higher medians, up to {rate}, but the differences are uncertain.",
    "baseline leads": "{name} {what}, at {rate}{rest}.",
    "none faster": "Nothing is faster than {than} beyond noise{rest}.",
    "none else faster": "Nothing else is faster than {than} beyond noise{rest}.",
    "rest": ": leave the rest off",
    "nearest": "{name}, the nearest, is {compared}.",
    "nearest within noise": "{name}, the nearest, is {compared}, which is within noise.",
    "single runs": "With single runs the noise is unknown: {repeat} shows which differences last.",
    "too few": "{num} repetitions are too few to tell that from noise: {repeat} would show it.",
    "use instead": "Use {name}: {compared}.",
    "use lossless": "{name} is as fast within noise, and lossless: use that.",
    "equals": "As fast within noise: {names}.",
    "fastest lossless": "The fastest lossless one is {name}: {compared}.",
    "no lossless": "No lossless one is faster than {than} beyond noise.",
    "most ranks": "On {num_ranks} ranks the fastest is {name}: {compared}.",
    "one process": "{name} alone is {compared}: more ranks do not pay off here.",
}

REPEAT: Final = {
    "commopt-train": "repeat={num}",
    "hydra": "{seed}={seeds} before the other choices",
    "elsewhere": "running each setting with {num} seeds",
}
"""How to run every setting several times, by where the sweep ran."""

LOSSES: Final = {
    "diverged": "in {num} of its {of} runs the loss became NaN; do not use it",
    "not recorded": "no final loss was recorded{why}: compare the loss before you use it",
    "one missing": "one of the losses is missing: compare the loss before you use it",
    "same": "the final loss is the same, {loss}",
    "single": "the final loss is {both}, {by}, of single runs, whose spread is unknown",
    "within": "the final loss is {both}, {by} and within the spread over repetitions",
    "beyond": "the final loss is {both}, {by} and beyond the spread over repetitions",
}
