import json

import pytest
import torch

from lightning_commopt.runs.files import LOSS_FILE
from lightning_commopt.runs.loss_curve import LossCurve
from lightning_commopt.runs.losses import LossPoint, read_losses, write_losses

POINTS = [
    LossPoint(kind="train", step=1, seconds=0.5, loss=2.0),
    LossPoint(kind="val", step=1, seconds=0.5, loss=2.5),
]


def curve_of(losses, **options):
    curve = LossCurve(**options)
    for step, loss in enumerate(losses, start=1):
        curve.add(torch.tensor(float(loss)), step=step, seconds=step / 10)
    return curve, curve.points(curve.values(torch.device("cpu")))


def test_every_batch_is_a_point_as_long_as_there_is_room():
    _, points = curve_of([3, 2, 1], max_points=4)
    assert [(point.step, point.seconds, point.loss) for point in points] == [(1, 0.1, 3), (2, 0.2, 2), (3, 0.3, 1)]
    assert {point.kind for point in points} == {"train"}


def test_a_long_curve_keeps_the_means_of_neighbours():
    _, points = curve_of(range(16), max_points=4)
    assert [(point.step, point.loss) for point in points] == [(8, 3.5), (16, 11.5)]
    _, points = curve_of(range(1, 20), max_points=4)
    assert [(point.step, point.loss) for point in points] == [(8, 4.5), (16, 12.5)]  # the rest fills no point yet


def test_a_curve_without_a_batch_is_empty():
    assert curve_of([])[1] == []


def test_a_loss_is_only_read():
    curve, loss = LossCurve(), torch.tensor([2.0], requires_grad=True)
    curve.add(loss, step=1, seconds=0)
    curve.add(loss, step=2, seconds=0)
    assert loss.tolist() == [2.0]
    assert not curve.values(torch.device("cpu")).requires_grad


@pytest.mark.parametrize("max_points", [0, 3])
def test_an_odd_number_of_points_is_refused(max_points):
    with pytest.raises(ValueError, match=f"max_points must be an even number above 0, got {max_points}"):
        LossCurve(max_points)


def test_a_curve_comes_back_as_it_was(tmp_path):
    assert read_losses(tmp_path) == []
    write_losses(tmp_path, POINTS)
    assert read_losses(tmp_path) == POINTS


@pytest.mark.parametrize("line", ["{", "[]", json.dumps({"kind": "train", "step": 1})])
def test_a_broken_line_is_named(tmp_path, line):
    (tmp_path / LOSS_FILE).write_text(line + "\n")
    with pytest.raises(ValueError, match=LOSS_FILE):
        read_losses(tmp_path)
