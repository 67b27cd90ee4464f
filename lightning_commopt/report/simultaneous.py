"""Which differences from a baseline hold up among several, some of which are large by chance.

numpy and scipy are imported only when needed, as importing them takes time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lightning_commopt.report.baseline import rates_of, samples_of
from lightning_commopt.report.intervals import ERROR_RATE, ROUNDING, t_test_p
from lightning_commopt.report.model import Setting


def differences_that_hold(settings: Sequence[Setting], baseline: Setting) -> frozenset[str]:
    """Returns the names of settings whose throughput differs from the baseline's, by t-tests of the logarithms.

    The probability that settings without a difference are among them is 5 % at most, however many there are. There are
    two tests of each setting. One takes noise from its own repetitions and the baseline's; of three repetitions it
    finds little among many settings. The other takes it from those of all settings, which one noisy setting spoils.
    Each is made at half the error rate, with Holm's correction for the number of settings.

    Settings of a single run have no test and do not count. A single comparison needs no correction, and holds as it is.

    Source: Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    own = {}
    for setting in settings:
        samples = None if setting.name == baseline.name else samples_of(setting, baseline)
        if samples is not None and min(len(samples.ours), len(samples.theirs)) > 1:
            own[setting.name] = t_test_p(samples.ours, samples.theirs, is_paired=samples.is_paired)
    if len(own) < 2:
        return frozenset(own)
    pooled = _pooled_p([*(setting for setting in settings if setting.name in own), baseline])
    return _holm({name: 2 * min(p, pooled.get(name, 1.0)) for name, p in own.items()})


def _holm(p_values: Mapping[str, float]) -> frozenset[str]:
    """Returns the names whose hypotheses Holm's procedure rejects."""
    ordered = sorted(p_values, key=p_values.__getitem__)
    for index, name in enumerate(ordered):
        if not p_values[name] * (len(ordered) - index) < ERROR_RATE:
            return frozenset(ordered[:index])
    return frozenset(ordered)


def _pooled_p(settings: Sequence[Setting]) -> dict[str, float]:
    """Returns p-values of settings against the last one, by name, with noise that is the same for all settings.

    The model of a run's logarithm is that of its setting, plus that of its repetition where several settings share it,
    plus noise. Settings that the runs do not allow to compare so are left out.
    """
    import numpy as np
    import scipy.stats

    runs = [(index, key, math.log(rate)) for index, setting in enumerate(settings) for key, rate in rates_of(setting)]
    counts = Counter(key for setting in settings for key in dict(rates_of(setting)))
    shared = [key for key, num_settings in counts.items() if num_settings > 1]
    repetitions = {key: len(settings) + index for index, key in enumerate(shared)}
    design = np.zeros((len(runs), len(settings) + len(repetitions)))
    for row, (index, key, _) in zip(design, runs, strict=True):
        row[index] = 1
        if key in repetitions:
            row[repetitions[key]] = 1
    logs = np.array([log for _, _, log in runs])
    inverse = np.linalg.pinv(design)
    freedom = len(runs) - int(np.linalg.matrix_rank(design))
    if not freedom:
        return {}
    effects = inverse @ logs
    sigma = math.sqrt(float(np.sum((logs - design @ effects) ** 2)) / freedom)
    p_values = {}
    for index, setting in enumerate(settings[:-1]):
        contrast = np.zeros(design.shape[1])
        contrast[[index, len(settings) - 1]] = 1, -1
        if np.allclose(contrast @ inverse @ design, contrast):
            error = max(sigma * float(np.linalg.norm(contrast @ inverse)), ROUNDING)
            p_values[setting.name] = 2 * float(scipy.stats.t.sf(abs(float(contrast @ effects)) / error, freedom))
    return p_values
