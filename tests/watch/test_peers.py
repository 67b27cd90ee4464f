"""Which ranks are waited for in vain."""

import torch.distributed as dist

from lightning_commopt.watch.peers import Lifelines, Peers


def test_ranks_that_wait_for_a_slow_one_are_told_apart() -> None:
    """If it fails, a rank is ended that waits for a slow one, while all are about to raise and catch the same."""
    store = dist.HashStore()
    raised, waits, slow = (
        Peers(store, rank, 3, range(3), Lifelines(store, rank, [0], "localhost")) for rank in range(3)
    )
    raised.leave()
    raised.fail(ValueError("caught on all ranks"))
    waits.set_waiting(True)
    waits.set_waiting(True)
    failure = waits.failure()
    assert failure is not None
    assert not failure.has_died
    assert not waits.are_all_idle()
    slow.set_waiting(True)
    assert waits.are_all_idle()
    slow.set_waiting(False)
    assert not waits.are_all_idle()
    slow.finish()
    slow.set_waiting(False)
    assert waits.are_all_idle()
