"""Two threads of a backward: what blocks, what hides, and what they share."""

from __future__ import annotations

import pytest

from lightning_commopt.cost.fsdp2.simulate import Piece, Task, backward_s
from lightning_commopt.cost.shared_core import WAKE_S

COMPUTE = Task((Piece(1.0),))
GATHER = Task((Piece(0.5, cpu_share=0.0, link_share=1.0),))


def reduce_scatter(seconds: float, link_share: float = 1.0, cpu_share: float = 0.0) -> Task:
    return Task((Piece(seconds, cpu_share, link_share),), is_handed_over=True)


def test_own_collectives_block() -> None:
    """If it fails, an uncompressed step is predicted to hide what it waits for."""
    assert backward_s([COMPUTE, GATHER, COMPUTE, GATHER]) == pytest.approx(3.0)


def test_nothing_takes_no_time() -> None:
    assert backward_s([]) == backward_s([Task(()), Task((), is_handed_over=True)]) == 0.0


def test_the_second_thread_hides_behind_computation() -> None:
    assert backward_s([COMPUTE, reduce_scatter(0.8), COMPUTE]) == pytest.approx(2.0)
    assert backward_s([COMPUTE, reduce_scatter(1.5), COMPUTE, reduce_scatter(1.0)]) == pytest.approx(3.5)


def test_backward_waits_while_too_many_units_are_under_way() -> None:
    """If it fails, a slow link is predicted to be hidden by computation that cannot begin yet."""
    three = [reduce_scatter(2.0), reduce_scatter(2.0), reduce_scatter(2.0)]
    assert backward_s([*three, COMPUTE, COMPUTE, COMPUTE]) == pytest.approx(6.0)
    assert backward_s([*three, *[COMPUTE] * 5]) == pytest.approx(7.0)  # computes from second 2 on


@pytest.mark.parametrize(("gather_share", "expected_s"), [(1.0, 1.0), (0.5, 0.75)])
def test_both_threads_share_the_link(gather_share: float, expected_s: float) -> None:
    """An exchange beside a gathering that uses half of the link has the other half."""
    gather = Task((Piece(0.5, 0.0, gather_share),))
    assert backward_s([reduce_scatter(0.5), gather]) == pytest.approx(expected_s)


def test_both_threads_share_a_core() -> None:
    """If it fails, compression is predicted to cost nothing where it has no core of its own."""
    compress = Task((Piece(0.6), Piece(0.5, 0.0, 1.0)), is_handed_over=True)
    assert backward_s([compress, COMPUTE], shares_core=True) == pytest.approx(1.7)  # 1.2 together, 0.5 more
    assert backward_s([compress, COMPUTE]) == pytest.approx(1.1)


def test_messages_wait_for_a_core_that_is_busy() -> None:
    short, brief = reduce_scatter(1e-6), Task((Piece(1e-3),))
    assert backward_s([short], num_others=2.0) == pytest.approx(2 * WAKE_S)
    assert backward_s([short, brief], shares_core=True) == pytest.approx(WAKE_S)
    assert backward_s([short, brief]) == pytest.approx(1e-3)
