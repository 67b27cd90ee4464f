import pytest

from lightning_commopt.train.sweep.job import LineReader, cause_in_another_rank, final_lines, last_exception


def lines(*pieces: bytes) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    reader = LineReader(lambda text, is_final: found.append((text, is_final)))
    for piece in pieces:
        reader.feed(piece)
    reader.close()
    return found


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], [("one", True), ("two", True)]),
        ([b"one\r\ntwo\r\n"], [("one", True), ("two", True)]),
        ([b"on", b"e\n"], [("on", False), ("one", True)]),
        ([b"no end"], [("no end", False), ("no end", True)]),
        ([b"\n \n\n"], []),
        ([b"\r 10%", b"\r 20%", b"\n"], [(" 10%", False), (" 20%", False), (" 20%", True)]),
        ([b"\x1b[A\x1b[31mred\x1b[0m\n"], [("red", True)]),
        (["é".encode()[:1], "é\n".encode()[1:]], [("é", True)]),
        ([b"\xff\n"], [("\ufffd", True)]),
    ],
)
def test_lines(pieces, expected):
    assert lines(*pieces) == expected


def test_what_was_written_over_does_not_stay():
    assert final_lines("\r 10%\r 20%\n\none\ntwo") == [" 20%", "one", "two"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["ValueError: this", "later"], "ValueError: this"),
        (["KeyError: 1", "[rank1]: torch.foo.DistError: lost"], "[rank1]: torch.foo.DistError: lost"),
        (["AssertionError"], "AssertionError"),
        (["no Error here: x", "Error rates fell"], None),
        ([], None),
    ],
)
def test_the_last_exception(lines, expected):
    assert last_exception(lines) == expected


LOST = "RuntimeError: [/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:32444"


@pytest.mark.parametrize(
    ("error", "lines", "expected"),
    [
        (LOST, ["KeyError: 'a'", "during", "ValueError: x", LOST], "another rank: KeyError: 'a'"),
        (LOST, ["torch.distributed.DistBackendError: NCCL error", "[rank3]: OSError: disk"], "rank 3: OSError: disk"),
        (LOST, [LOST, "[rank1]: " + LOST], None),
        ("ValueError: x; killed by SIGTERM", ["ValueError: x"], None),
        ("killed by SIGTERM", ["[rank2]: MemoryError"], "rank 2: MemoryError"),
        ("ValueError: x", ["KeyError: 'a'"], None),
    ],
)
def test_the_cause_in_another_rank(error, lines, expected):
    assert cause_in_another_rank(error, lines) == expected
