"""What threads that share a core pay; a machine with a core for each thread pays nothing of it."""

from __future__ import annotations

import pytest

from lightning_commopt.cost import shared_core
from lightning_commopt.cost.shared_core import (
    GLOO_CPU_S,
    NO_INTERRUPTS,
    WAKE_S,
    Interrupts,
    competing_threads,
    core_rates,
    interrupts_in,
    message_cpu_s,
    undisturbed_share,
    wake_s,
)
from lightning_commopt.measure.link.link import num_wakes

STAT = """cpu  9 0 9 9 0 0 60 0 0 0
cpu0 9 0 9 9 0 0 10 0 0 0
cpu1 9 0 9 9 0 0 20 0 0 0
cpu10 9 0 9 9 0 0 30 0 0 0
intr 4711
"""


def test_a_core_for_each_thread_costs_nothing() -> None:
    """If it fails, what was chosen for two busy cores of a lab changes predictions for every machine."""
    assert competing_threads(1.0) == 0
    assert wake_s(competing_threads(1.0), beside_backward=False) == 0
    assert core_rates((1.0, 0.0)) == core_rates((0.5, 0.5)) == [1, 1]
    assert message_cpu_s(0.0, num_wakes("all_reduce", 2)) == 0
    assert undisturbed_share(NO_INTERRUPTS.seconds, 1.0, 0.1) == 1


def test_a_message_waits_once_for_each_thread_before_it() -> None:
    assert wake_s(competing_threads(3.0), beside_backward=True) == pytest.approx(3 * WAKE_S)


@pytest.mark.parametrize(
    ("needs", "rates"),
    [
        ((1.0, 1.0), (0.5, 0.5)),
        ((1.0, 1.0, 1.0), (1 / 3, 1 / 3, 1 / 3)),
        ((1.0, 0.2, 0.0), (0.8, 1.0, 1.0)),
        ((0.8, 0.6), (0.625, 0.5 / 0.6)),
    ],
)
def test_threads_take_turns_on_a_busy_core(needs: tuple[float, ...], rates: tuple[float, ...]) -> None:
    assert core_rates(needs) == pytest.approx(rates)


def test_more_ranks_wake_threads_more_often() -> None:
    assert [num_wakes("all_reduce", ranks) for ranks in (1, 2, 4, 8)] == [1, 1, 3, 5]
    assert [num_wakes("all_to_all", ranks) for ranks in (1, 2, 4, 8)] == [1, 1, 2, 3]
    assert message_cpu_s(2 * GLOO_CPU_S, 4) == pytest.approx(GLOO_CPU_S / 2)
    assert message_cpu_s(9 * GLOO_CPU_S, 4) == GLOO_CPU_S


def test_interrupts_of_some_cores() -> None:
    """Without ``CONFIG_IRQ_TIME_ACCOUNTING``; `test_gradient_times` has a kernel with it."""
    assert interrupts_in(STAT, {0, 10}, 100) == pytest.approx(Interrupts(0.4, True))


def test_interrupts_take_half_of_backward_at_most() -> None:
    assert undisturbed_share(0.2, 0.5, 1.0) == pytest.approx(0.9)
    assert undisturbed_share(9.0, 0.5, 1.0) == 1 - shared_core._MAX_INTERRUPTED_SHARE
