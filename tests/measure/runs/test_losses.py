import json

import pytest
import torch
import torch.distributed as dist

from lightning_commopt.measure.runs.files import LOSS_FILE
from lightning_commopt.measure.runs.losses import LossCurve, LossPoint, read_losses, write_losses
from support.warm_ranks import run_ranks

POINTS = [
    LossPoint(kind="train", step=1, seconds=0.5, loss=2.0),
    LossPoint(kind="val", step=1, seconds=0.5, loss=2.5),
]


def curve_of(losses, **options):
    curve = LossCurve(**options)
    for step, loss in enumerate(losses, start=1):
        curve.add(torch.tensor(float(loss)), step=step, seconds=step / 10)
    return curve, curve.points()


def test_every_batch_is_a_point_as_long_as_there_is_room():
    _, points = curve_of([3, 2, 1], max_points=4)
    assert [(point.step, point.seconds, point.loss) for point in points] == [(1, 0.1, 3), (2, 0.2, 2), (3, 0.3, 1)]
    assert {point.kind for point in points} == {"train"}


def test_a_long_curve_keeps_the_means_of_neighbours():
    _, points = curve_of(range(16), max_points=4)
    assert [(point.step, point.loss) for point in points] == [(4, 1.5), (8, 5.5), (12, 9.5), (16, 13.5)]
    _, points = curve_of(range(1, 20), max_points=4)
    assert [(point.step, point.loss) for point in points] == [(8, 4.5), (16, 12.5), (19, 18.0)]


def test_a_curve_without_a_batch_is_empty():
    assert curve_of([])[1] == []


def test_a_loss_is_only_read():
    curve, loss = LossCurve(), torch.tensor([2.0], requires_grad=True)
    curve.add(loss, step=1, seconds=0)
    curve.add(loss, step=2, seconds=0)
    assert loss.tolist() == [2.0]
    assert [point.loss for point in curve.points()] == [2.0, 2.0]


def test_a_batch_without_a_loss_is_no_point():
    curve = LossCurve()
    for step, loss in enumerate([None, 3.0, None], start=1):
        curve.add(None if loss is None else torch.tensor(loss), step=step, seconds=step)
    assert [(point.step, point.loss) for point in curve.points()] == [(2, 3.0)]


def _points_of_uneven_ranks(num_batches):
    curve, rank = LossCurve(max_points=4), dist.get_rank()
    for batch in range(num_batches[rank]):
        loss = None if batch % 3 == rank else torch.tensor(100.0 * rank + batch)
        curve.add(loss, step=batch + 1, seconds=batch / (1 + rank))

    def reduce(values, op):
        dist.all_reduce(values, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return values

    return curve.points(reduce=reduce)


def _expected(num_batches, batches_per_point):
    """Yields every point's last batch and its mean, from all losses of all ranks."""
    losses = [
        [(batch // batches_per_point, 100.0 * rank + batch) for batch in range(num) if batch % 3 != rank]
        for rank, num in enumerate(num_batches)
    ]
    for point in range(-(-max(num_batches) // batches_per_point)):
        of_point = [loss for of_rank in losses for number, loss in of_rank if number == point]
        if of_point:
            yield min((point + 1) * batches_per_point, max(num_batches)), sum(of_point) / len(of_point)


@pytest.mark.parametrize(
    ("num_batches", "batches_per_point"), [((4, 3, 0), 1), ((3, 9, 4), 4), ((0, 0, 0), 1)], ids=str
)
def test_ranks_with_different_numbers_of_losses_are_averaged_batch_by_batch(num_batches, batches_per_point):
    """If it fails, the end of a fit hangs or writes garbage where ranks have different numbers of losses."""
    expected = list(_expected(num_batches, batches_per_point))
    for points in run_ranks(_points_of_uneven_ranks, num_batches, world_size=3, group_timeout_s=20):
        assert [(point.step, point.loss) for point in points] == expected
        assert [point.seconds for point in points] == sorted(point.seconds for point in points)


def test_a_curve_comes_back_as_it_was(tmp_path):
    assert read_losses(tmp_path) == []
    write_losses(tmp_path, POINTS)
    assert read_losses(tmp_path) == POINTS


_POINT = {"kind": "train", "step": 1, "seconds": 0.0, "loss": 0.0}
_BROKEN = ["{", "[]", json.dumps({"kind": "train", "step": 1}), json.dumps({**_POINT, "step": float("inf")})]


@pytest.mark.parametrize("line", _BROKEN)
def test_a_broken_line_is_named(tmp_path, line):
    (tmp_path / LOSS_FILE).write_text(line + "\n")
    with pytest.raises(ValueError, match=LOSS_FILE):
        read_losses(tmp_path)
