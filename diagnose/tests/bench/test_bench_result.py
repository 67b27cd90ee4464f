"""The numbers of a result, and its files."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from rich.console import Console

from commopt_diagnose.bench.result import BenchResult, Row, bus_factor
from commopt_diagnose.bench.settings import BenchSettings, parse_size, sizes_between
from commopt_diagnose.bench.terminal import payoffs, print_bench
from diagnose_support.sample_bench import case, result_of, sample

# nccl-tests, doc/PERFORMANCE.md.
PUBLISHED = {
    "all_reduce": {2: 1.0, 4: 1.5, 8: 1.75},
    "reduce_scatter": {2: 0.5, 4: 0.75, 8: 0.875},
    "all_gather": {2: 0.5, 4: 0.75, 8: 0.875},
    "all_to_all": {2: 0.5, 4: 0.75, 8: 0.875},
    "broadcast": {2: 1.0, 8: 1.0},
    "reduce": {2: 1.0, 8: 1.0},
    "send_recv": {2: 1.0, 8: 1.0},
}


@pytest.mark.parametrize("operation", PUBLISHED)
def test_bus_bandwidth_is_as_nccl_tests_counts_it(operation: str) -> None:
    """If it fails, our busbw cannot stand beside that of nccl-tests."""
    assert {num: bus_factor(operation, num) for num in PUBLISHED[operation]} == PUBLISHED[operation]


def test_three_ways_to_reduce_have_one_factor() -> None:
    """If it fails, the faster of two equal ways can have the lower busbw."""
    assert len({bus_factor(name, 6) for name in ("all_reduce", "reduce_broadcast", "reduce_scatter_all_gather")}) == 1


def test_bandwidths_of_a_row() -> None:
    row = Row(case=case(4_000_000, num_ranks=4), times_s=[0.2, 0.1, 0.4], num_iters=1)
    assert row.time_s == (0.2, 0.1, 0.4)
    assert row.algbw == 2e7
    assert row.busbw == 3e7


@pytest.mark.parametrize(
    "text", ["", "8B", "1KB", "-1", "0", "1.3", "1e6", "1 M", "NaN", "inf", "2T", "1K K", "1024.5G"]
)
def test_bad_sizes_are_refused(text: str) -> None:
    """If it fails, a typing error measures other sizes than were meant."""
    with pytest.raises(ValueError, match=r"-b must be a number of bytes, or of K, M or G"):
        parse_size("-b", text)


def test_sizes_that_do_not_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="-e must be at least -b"):
        sizes_between(64, 8)
    with pytest.raises(ValueError, match="more than 200 sizes"):
        sizes_between(8, 2**30, step_bytes=8)
    assert sizes_between(8, 12, factor=1.1) == [8, 9, 10, 11, 12]


def test_bad_settings_name_the_option() -> None:
    with pytest.raises(ValueError, match="block_s must be"):
        BenchSettings(sizes_bytes=[8], block_s=0)
    settings = BenchSettings(collectives=["alltoall"], dtypes=["half", "float16"], sizes_bytes=[64, 8, 64])
    assert (settings.collectives, settings.dtypes, settings.sizes_bytes) == (("all_to_all",), ("float16",), (8, 64))
    assert BenchSettings(**settings.to_dict()) == settings


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    """If it fails, what was measured cannot be read again."""
    failed = Row(case=case(64, operation="reduce"), error="not here")
    hook = sample(lambda size: 1e-3, [64], operation="comm_hook", comm_hook={"name": "powersgd", "matrix_rank": 4})
    found = result_of([*sample(lambda size: 1e-3 + size / 1e8), *hook, failed])
    found.save(tmp_path / "bench.json")
    assert BenchResult.load(tmp_path / "bench.json").to_plain() == found.to_plain()
    found.write_csv(tmp_path / "bench.csv")
    rows = list(csv.DictReader((tmp_path / "bench.csv").read_text().splitlines()))
    assert len(rows) == len(found.rows)
    assert float(rows[3]["busbw"]) == found.rows[3].busbw
    assert rows[-1]["error"] == "not here"


def test_a_cut_or_damaged_file_is_refused(tmp_path: Path) -> None:
    """If it fails, half a result is taken for a whole one, or a traceback is all that a user sees."""
    path = tmp_path / "bench.json"
    result_of(sample(lambda size: 1e-3)).save(path)
    whole = path.read_text()
    damaged = (whole[: len(whole) // 2], whole.replace('"operation"', '"op"'), whole.replace("0.00", "-0.00"))
    for text in (*damaged, "[]", '{"kind": "commopt bench"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"bench\.json") as error:
            BenchResult.load(path)
        assert "\n" not in str(error.value)


def test_a_hook_pays_from_the_size_where_it_stays_faster() -> None:
    """If it fails, the sentence names a size at which the hook is slower, or calls noise a gain."""
    exact = sample(lambda size: 1e-3 + size / 1e8)
    hook = sample(lambda size: 5e-3 + size / 4e8, operation="comm_hook", comm_hook="int8", redop="mean")
    (found,) = payoffs(result_of([*exact, *hook]))
    assert found.startswith("int8 pays on this link from 1M on")  # equal at 0.53 MB
    assert re.search(r"it is 3\.[789]\d times as fast as all_reduce at 64M\.", found)
    slow = sample(lambda size: 5e-3 + size / 1e8, operation="comm_hook", comm_hook="int8", redop="mean")
    (found,) = payoffs(result_of([*exact, *slow]))
    assert "does not pay on this link up to 64M" in found
    exact = sample(lambda size: size / 1e8, noise=0.5)
    hook = sample(lambda size: size / 1.1e8, noise=0.5, operation="comm_hook", comm_hook="int8", redop="mean")
    (found,) = payoffs(result_of([*exact, *hook]))
    assert found.startswith("int8 is 1.10 times as fast as all_reduce at 64M, which may be noise")


def test_the_table_has_nccl_tests_columns() -> None:
    """If it fails, scripts and eyes that read nccl-tests' table do not find their columns."""
    rows = [*sample(lambda size: size / 1e9, [2**20]), *sample(lambda size: size / 5e8, [2**20], place="out")]
    console = Console(width=200, force_terminal=False)
    with console.capture() as printed:
        print_bench(result_of(rows), console)
    lines = printed.get().splitlines()
    heading = next(line for line in lines if " busbw " in line)
    assert heading.split() == ["#", "size", "count", "type", "redop", *["time", "±", "algbw", "busbw", "#wrong"] * 2]
    cells = next(line for line in lines if line.startswith(" ")).split()
    assert cells[:4] == ["1048576", "262144", "float32", "sum"]
    times = rows[1].time_s
    assert float(cells[4]) == pytest.approx(1e6 * times.median, abs=0.1)
    assert float(cells[5]) == pytest.approx(50 * (times.high - times.low) / times.median, abs=0.1)
    assert float(cells[6]) == pytest.approx(0.5, rel=0.02)
    assert float(cells[11]) == pytest.approx(1.0, rel=0.02)
    assert "# Out of bounds values : 0 OK" in lines
