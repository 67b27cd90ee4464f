"""How near bandwidths in the lab come to the link's rate, and how well the link model predicts sizes it has not seen.

For each number of hosts and each rate one bench measures powers of two and, in turns with them, the sizes half way
between; the model is fitted to the powers of two and predicts the others. What the cores can do without a limit to the
rate is measured in the same way: where that is not well above the rate, the cores are the limit.

python benchmarks/link_model.py --output benchmarks/results/link_model_HARDWARE_DATE.json
python benchmarks/link_model.py --rates 1gbit --num-hosts 2 --collectives all_reduce    # quick
"""

import argparse
import math
import os
import statistics
from pathlib import Path
from typing import Any

from results_file import write_result

from commopt_diagnose.bench.model import Curve
from commopt_diagnose.bench.result import BenchResult, Row
from commopt_diagnose.bench.settings import BenchSettings, size_text
from commopt_diagnose.bench.start import start_bench

LARGEST_BYTES = {"100mbit": 2**22, "1gbit": 2**25, "10gbit": 2**26, "unlimited": 2**26}
TCP_SHARE = 1448 / 1514
LARGE_BYTES = 2**18


def sizes_of(rate: str, smallest_bytes: int) -> list[int]:
    """Returns powers of two and the sizes half way between two of them."""
    powers = [2**power for power in range(3, 40) if smallest_bytes <= 2**power <= LARGEST_BYTES[rate]]
    return sorted([*powers, *(3 * power // 2 for power in powers[:-1])])


def is_power(size_bytes: int) -> bool:
    """Returns whether a size is for the fit: nearest to a power of two, as whole elements let it be."""
    return abs(size_bytes / 2 ** round(math.log2(size_bytes)) - 1) < 0.1


def judge(rows: list[Row], rate_bytes_per_s: float | None) -> dict[str, Any]:
    """Fits a curve to powers of two, and compares its predictions with the other sizes."""
    curve = Curve.fit([row for row in rows if is_power(row.case.size_bytes)])
    held_out = [row for row in rows if not is_power(row.case.size_bytes)]
    predictions = [curve.predict(row.case.size_bytes) for row in held_out]
    errors = [each.time_s / row.time_s.median - 1 for each, row in zip(predictions, held_out, strict=True)]
    large = [abs(error) for error, row in zip(errors, held_out, strict=True) if row.case.size_bytes >= LARGE_BYTES]
    inside = [
        each.low_s <= time_s <= each.high_s
        for each, row in zip(predictions, held_out, strict=True)
        for time_s in row.times_s
    ]
    return {
        "curve": curve.text,
        "held_out_errors": {size_text(row.case.size_bytes): error for row, error in zip(held_out, errors, strict=True)},
        "median_error": statistics.median(map(abs, errors)),
        "median_error_large": statistics.median(large),
        "median_noise": statistics.median(
            (row.time_s.high - row.time_s.low) / 2 / row.time_s.median for row in held_out
        ),
        "share_in_interval": sum(inside) / len(inside),
        "largest_bytes": rows[-1].case.size_bytes,
        "busbw": rows[-1].busbw,
        "busbw_of_rate": None if rate_bytes_per_s is None else rows[-1].busbw / rate_bytes_per_s,
        "busbw_of_tcp": None if rate_bytes_per_s is None else rows[-1].busbw / rate_bytes_per_s / TCP_SHARE,
    }


def measure(arguments: argparse.Namespace, rate: str, num_hosts: int) -> BenchResult:
    """Measures all sizes on a link of one rate."""
    settings = BenchSettings(
        collectives=arguments.collectives,
        sizes_bytes=sizes_of(rate, arguments.smallest_bytes),
        num_repetitions=arguments.num_repetitions,
    )
    return start_bench(settings, link=rate, num_hosts=num_hosts)


def main() -> None:
    """Measures all links, prints a line for each, and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", choices=LARGEST_BYTES, default=list(LARGEST_BYTES))
    parser.add_argument("--num-hosts", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--collectives", nargs="+", default=["all_reduce", "broadcast"])
    parser.add_argument("--smallest-bytes", type=int, default=2**12)
    parser.add_argument("--num-repetitions", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    links = []
    for num_hosts in arguments.num_hosts:
        for rate in arguments.rates:
            result = measure(arguments, rate, num_hosts)
            for rows in result.by_series().values():
                found = judge(rows, result.link_bytes_per_s)
                of_rate = "" if found["busbw_of_rate"] is None else f", {found['busbw_of_rate']:.1%} of the rate"
                print(
                    f"{num_hosts} hosts, {rate}, {rows[0].case.name}: busbw {found['busbw'] / 1e9:.4f} GB/s{of_rate};"
                    f" held out {found['median_error']:.1%} median, {found['median_error_large']:.1%} from 256K on;"
                    f" noise of these medians {found['median_noise']:.1%};"
                    f" in the interval {found['share_in_interval']:.0%}; load {result.where['load_at_end']:.1f}",
                    flush=True,
                )
                links.append({"num_hosts": num_hosts, "rate": rate, "collective": rows[0].case.name, **found,
                              "where": dict(result.where)})  # fmt: skip
    if arguments.output is not None:
        write_result(arguments.output, {"links": links}, load)


if __name__ == "__main__":
    main()
