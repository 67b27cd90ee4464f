"""The timeline of a simulated step: what waits for what, and what runs beside what."""

import pytest
from stream_timeline import MEMORY_BYTES_PER_S, NUM_RANKS, Link, Workload, buckets_of, simulated_s

from support.machine import MAIN, Clock, Launch

SECOND_OF_MEMORY = round(MEMORY_BYTES_PER_S)
LINK = Link(bytes_per_s=1e9, latency_s=0.5)
SECOND_OF_LINK = round(1e9 * NUM_RANKS / (NUM_RANKS - 1))


def launches(other_side: str) -> list[Launch]:
    """Two buckets: one second of backward, then three; each is compressed in a second and sent in one and a half."""
    found: list[Launch] = []
    clocks: dict[str, Clock] = {}
    for index, side in enumerate(("side 1", other_side)):
        for stream, name, num_bytes, after in (
            (MAIN, f"backward {index}", 0, ()),
            (side, "compress", SECOND_OF_MEMORY, (MAIN,)),
            ("nccl all", "all_reduce", SECOND_OF_LINK, (side,)),
            (side, "decompress", SECOND_OF_MEMORY, ("nccl all",)),
        ):
            clock = clocks.setdefault(stream, Clock())
            for other in after:
                clock |= clocks[other]
            clock[stream] += 1
            found.append(Launch(stream, name, num_bytes, Clock(clock)))
    return found


@pytest.mark.parametrize("has_priority", [False, True])
def test_sync_runs_beside_backward(has_priority: bool) -> None:
    """Backward is over at 6 s with priority of the side stream, at 5.5 s without; the second bucket then takes 3.5 s.

    Without priority the first bucket's decompression is still running at 5.5 s.
    """
    step = Workload(shapes=(), backward_s=4.0, batch="")
    for other_side in ("side 1", "side 2"):  # the second bucket comes too late for two streams to matter
        assert simulated_s(launches(other_side), (0.25, 0.75), step, LINK, has_priority) == pytest.approx(9.5)


@pytest.mark.parametrize(("other_side", "total_s"), [("side 1", 7.0), ("side 2", 5.0)])
def test_one_bucket_is_compressed_while_another_is_on_the_link(other_side: str, total_s: float) -> None:
    step = Workload(shapes=(), backward_s=0.0, batch="")
    assert simulated_s(launches(other_side), (0.5, 0.5), step, LINK, True) == pytest.approx(total_s)


def test_ddps_buckets() -> None:
    million = (2**10, 2**10)  # 4 MiB
    assert buckets_of([million] * 9) == [[8], [7, 6, 5, 4, 3, 2, 1], [0]]
