"""Rows of `gpu.py`'s result, made of what other scripts write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Row = dict[str, Any]


def row(name: str, result: str, verdict: str = "measured", **numbers: Any) -> Row:
    return {"name": name, "result": result, "verdict": verdict, "numbers": numbers}


def selftest_rows(found: dict[str, Any]) -> Iterator[Row]:
    verdicts = {"passed": "right", "failed": "wrong", "not checked": "not run", "out of time": "not run"}
    for outcome in found["outcomes"]:
        result = f"{outcome['status']}: {outcome['detail']}; {outcome['seconds']:.1f} s"
        yield row(outcome["name"], result, verdicts[outcome["status"]], place=found["place"], **outcome["numbers"])


def kernel_rows(found: dict[str, Any]) -> Iterator[Row]:
    for name, hook in found["hooks"].items():
        ms = hook["ms"]
        words = [f"{ms['median']:.3g} ms ({ms['low_95']:.3g} to {ms['high_95']:.3g})"]
        if "passes" in hook:
            words.append(f"{hook['passes']['median']:.2f} copies of the bucket")
        if hook.get("times_its_bytes") is not None:
            words.append(f"{hook['times_its_bytes']:.2f} times the time of its bytes")
        syncs = hook.get("synchronisations")
        if syncs is not None:
            words.append(f"{syncs} synchronisations")
        is_ours = "times_its_bytes" in hook and not name.startswith("torch")
        verdict = "wrong" if is_ours and syncs else "measured"
        yield row(f"{found['settings']['model']}: {name}", ", ".join(words), verdict, **hook)


def profiler_rows(found: dict[str, Any]) -> Iterator[Row]:
    name = {"ddp": "DDP", "fsdp2": "FSDP2"}[found["settings"]["strategy"]]
    for turn in found["turns"]:
        for key, what in (("total_s", "communication"), ("exposed_s", "exposed communication")):
            ours, theirs = turn["ours"].get(key), turn["profiler"].get(key)
            if ours is None or theirs is None:
                continue
            ms, ms_theirs = (1e3 * seconds / turn["num_steps"] for seconds in (ours, theirs))
            ratio = f", {ms / ms_theirs:.3f} times it" if ms_theirs else ""
            result = f"{ms:.2f} ms a step, torch.profiler {ms_theirs:.2f}{ratio}"
            yield row(f"{name}: {what}", result, ours_ms=ms, profiler_ms=ms_theirs)


def measuring_rows(found: dict[str, Any]) -> Iterator[Row]:
    for variant, cost in found["summary"]["ours"].items():
        added, step_ms = cost["added_s"], 1e3 * cost["step_s"]
        us = {key: 1e6 * value for key, value in added.items()}
        result = (
            f"{us['median']:+.0f} us ({us['low_95']:+.0f} to {us['high_95']:+.0f}) of a step of {step_ms:.2f} ms,"
            f" {100 * cost['added_share']['median']:+.2f} %"
        )
        yield row(f"measuring: {variant}", result, **cost)
    spent = ", ".join(f"{label} {1e6 * seconds:.0f} us" for label, seconds in found["host_s"].items())
    yield row("measuring: processor time of threads in our code, a step", spent, **found["host_s"])


def strategy_rows(found: dict[str, Any]) -> Iterator[Row]:
    for pair in found["settings"]["pairs"]:
        ours, noise = (found[pair][f"{name}_ratio"] for name in ("commopt", "baseline_again"))
        result = (
            f"{ours['median']:.3f} ({ours['low_95']:.3f} to {ours['high_95']:.3f}) times the step of Lightning's own;"
            f" that over itself {noise['median']:.3f} ({noise['low_95']:.3f} to {noise['high_95']:.3f});"
            f" {1e3 * found[pair]['baseline_s']:.2f} ms"
        )
        yield row(f"strategy none: {pair.replace('_', ' ')}", result, **found[pair])


def fault_rows(found: dict[str, Any]) -> Iterator[Row]:
    for result in found["results"]:
        for run in result["runs"]:
            names = [key for key in ("right_rank", "right_phase", "right_operation", "right_sentence") if not run[key]]
            wrong = [*names, *([] if run["in_time"] else ["not in time"]), *([] if run["all_ended"] else ["not ended"])]
            at = "" if run["reported_s"] is None else f" after {run['reported_s']:.1f} s"
            said = f"{run['sentence'] or 'nothing was reported'}{at}"
            problems = f"; but not {', '.join(wrong)}".replace("right_", "the right ") if wrong else ""
            verdict = "wrong" if wrong else "right"
            yield row(f"HangMonitor: {result['fault']}", said + problems, verdict, reported_s=run["reported_s"])


def known_memory(parts: Mapping[str, Any]) -> list[Row]:
    """Returns the peak of each plan at the first link of the ladder that has all of them."""
    rows = [found for found in parts.get("ladder", {}).get("rows", ()) if found["numbers"].get("turns")]
    links = dict.fromkeys(found["name"].partition(": ")[0] for found in rows)
    for link in links:
        here = [found for found in rows if found["name"].startswith(f"{link}: ")]
        peaks = {found["name"]: max(turn["peak_bytes"] for turn in found["numbers"]["turns"]) for found in here}
        if "ddp" in {found["numbers"]["plan"] for found in here}:
            model = here[0]["numbers"]["model"]
            return [
                row(f"{name.partition(': ')[2]}, {model}", f"{peak / 2**20:.0f} MiB at its peak", peak_bytes=peak)
                for name, peak in peaks.items()
            ]
    return []
