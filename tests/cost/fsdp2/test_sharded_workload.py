"""Bytes of a unit: only matrices are compressed, and each shard is padded to whole blocks."""

from lightning_commopt.cost.fsdp2.workload import AS_INT8, Payload


def test_vectors_travel_uncompressed() -> None:
    """If it fails, a unit with large biases or norms is predicted to shrink with its matrices."""
    payload = Payload(2 * 1000, 50, 4)
    assert payload.sent_bytes(None, 2) == payload.num_bytes == 8200
    blocks = 8 * (128 + 4)  # a shard of 1,000 elements has 8 blocks, each with a scale
    assert payload.sent_bytes(AS_INT8, 2) == 2 * blocks + 200
    assert payload.sent_bytes(AS_INT8, 4) == 4 * 4 * (128 + 4) + 200
    assert Payload(0, 50, 4).sent_bytes(AS_INT8, 2) == 200
