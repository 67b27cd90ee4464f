"""Which bucket is which, whatever DDP says of them."""

import pytest
import torch

from lightning_commopt.compressors import Layout
from lightning_commopt.measure.observer import BucketSyncs
from lightning_commopt.sync.ddp.buckets import Bucket, BucketOrder, Relayout
from lightning_commopt.sync.executors import WorkerThread


def test_what_ddp_says_is_kept_where_it_says_it() -> None:
    order = BucketOrder(num_parameters=3)
    backward = [(0, False, ("c",)), (1, False, ("b",)), (2, True, ("a",))]
    assert [order.place(*bucket) for bucket in backward * 2] == [(0, False), (1, False), (2, True)] * 2
    assert BucketOrder(num_parameters=1).place(0, True, ("a",)) == (0, True)


def test_buckets_that_are_all_number_0_are_counted_until_every_parameter_came() -> None:
    order = BucketOrder(num_parameters=4)
    backward = [(0, False, ("d", "c")), (0, False, ("b",)), (0, False, ("a",))]
    assert [order.place(*bucket) for bucket in backward * 2] == [(0, False), (1, False), (2, True)] * 2


def test_a_backward_that_broke_off_does_not_count() -> None:
    order = BucketOrder(num_parameters=2)
    assert order.place(0, False, ("b",)) == (0, False)
    assert order.place(0, False, ("b",)) == (0, False)
    assert order.place(0, False, ("a",)) == (1, True)


def test_parameters_that_no_rank_uses_leave_the_count_to_ddp() -> None:
    """With the last bucket left out, the next backward begins again at 0."""
    order = BucketOrder(num_parameters=3)
    assert [order.place(0, False, ("c",)), order.place(1, False, ("b",))] == [(0, False), (1, False)]
    assert order.place(0, False, ("c",)) == (0, False)


def test_buckets_of_a_backward_that_broke_off_are_not_sent_with_the_next_ones() -> None:
    """If it fails, a resumed fit whose first backward is interrupted averages its gradients with the next ones."""
    layout, executor = Layout.of([torch.empty(3)], torch.float32), WorkerThread()
    relayout = Relayout({0: (("a",), layout)})
    buckets = [Bucket(0, torch.zeros(3), layout, ("a",), 0, BucketSyncs([])) for _ in range(2)]
    assert all(relayout.hold(bucket, executor.future(bucket.flat)) for bucket in buckets)
    held = relayout.end_backward()
    assert [id(bucket) for bucket in held.buckets] == [id(buckets[1])]
    assert len(held.futures) == len(held.saved) == 1
    executor.close()


@pytest.mark.parametrize("other", [(("b",), (3,)), (("a",), (1, 3))])
def test_saved_buckets_of_other_gradients_are_not_used(other: tuple[tuple[str, ...], tuple[int, ...]]) -> None:
    """If it fails, a resumed fit fails in its first backward if a parameter was frozen or has got another shape."""
    names, shape = other
    layout, executor = Layout.of([torch.empty(shape)], torch.float32), WorkerThread()
    relayout = Relayout({0: (("a",), Layout.of([torch.empty(3)], torch.float32))})
    bucket = Bucket(0, torch.zeros(3), layout, names, 0, BucketSyncs([]))
    assert relayout.hold(bucket, executor.future(bucket.flat))
    assert relayout.end_backward().saved == {}
    assert relayout.is_over
    executor.close()
