"""Metrics of fits that never were, as Steps.statistics names them."""

from lightning_commopt.measure.statistics import TIMES

NAN = float("nan")


def sample_metrics(**changed: float) -> dict[str, float]:
    """Returns those of a step of 700 ms on 8 ranks, of which 300 ms wait for one bucket of 1.2 GB.

    Args:
        changed: other values; what is derived from seconds follows them.
    """
    seconds = {
        "step_s": 0.7,
        "data_s": 0.01,
        "forward_s": 0.1,
        "backward_s": 0.5,
        "optimizer_s": 0.05,
        "comm_s": 0.32,
        "exposed_s": 0.3,
        "queue_s": 0.0,
        "compression_s": 0.0,
        "wait_s": 0.02,
        "exposed_wait_s": 0.01,
    }
    seconds |= {name: changed.pop(name) for name in TIMES if name in changed}
    seconds["wire_s"] = seconds["comm_s"] - seconds["compression_s"]
    times = {
        f"{name}{suffix}": factor * value
        for name, value in seconds.items()
        for suffix, factor in (("", 1.0), ("_p50", 0.98), ("_p95", 1.5), ("_max", 20.0))
    }
    comm_s = seconds["comm_s"]
    return {
        **times,
        "exposed_share": seconds["exposed_s"] / seconds["step_s"],
        "overlapped_share": max(0.0, 1 - seconds["exposed_s"] / comm_s) if comm_s else NAN,
        "gradient_bytes": 1.22e9 if comm_s else 0.0,
        "wire_bytes": 1.22e9 if comm_s else 0.0,
        "compression_ratio": 1.0 if comm_s else NAN,
        "algorithm_bandwidth": 4.07e9 if comm_s else NAN,
        "bus_bandwidth": 7.12e9 if comm_s else NAN,
        "steps_per_s": 1 / seconds["step_s"],
        "samples_per_s": 256 / seconds["step_s"],
        "straggler_rank": -1.0,
        "straggler_slowdown": 0.0,
        **changed,
    }
