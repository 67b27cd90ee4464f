import torch

from lightning_commopt.measure.runs.machine import PeakMemory

NUM_BYTES = 300_000_000


def test_a_peak_is_that_of_its_own_time() -> None:
    before = PeakMemory(torch.device("cpu")).num_bytes
    watch = PeakMemory(torch.device("cpu"))
    held = torch.ones(NUM_BYTES // 4)
    assert watch.num_bytes >= before + 0.9 * NUM_BYTES
    del held
    assert watch.num_bytes >= before + 0.9 * NUM_BYTES
    assert PeakMemory(torch.device("cpu")).num_bytes < before + 0.5 * NUM_BYTES
