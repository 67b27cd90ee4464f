"""Whether training in rounds survives a rank that is killed or frozen at a random moment, and with which loss.

Each run trains a small model on 3 or 4 real processes, one of which is killed with SIGKILL, or frozen with SIGSTOP and
continued. Beside it runs the same training undisturbed. Survivors must end with equal weights, and so must the rank
that was frozen, unless it comes too late for the end and says so.

With --trainer each of 3 processes runs a Lightning Trainer with validation, reduced logs, a metric and a checkpoint. A
third of the runs freezes a rank for less than its patience: then nobody may be missed, and no bit may change. Rank 0
hosts the store of the process group, as where each site starts its process by hand, so it is never killed. What a
killed rank's data are worth is shown by a third training, undisturbed on two processes from the beginning.

python benchmarks/diloco_failures.py --num-runs 100 --output benchmarks/results/diloco_failures_HARDWARE_DATE.json
python benchmarks/diloco_failures.py --trainer --num-runs 20 --output FILE
"""

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from results_file import write_result

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.patient_ranks import Job, Ranks, train
from support.patient_trainers import Ended, Fit, fit, free_port

PATIENCE_S = 2.0
"""Far above the pauses between steps, so that a rank that is healthy comes in time on a busy machine."""
STEP_S = 0.01
NUM_STEPS = 600
TOO_LATE = "too late for the end of the fit"

TRAINERS_PATIENCE_S = 6.0
"""Above what a Trainer does between exchanges on a busy machine; a healthy rank is frozen for half of it at most."""
TRAINERS_STEPS = 40
"""In each of three epochs."""


def run_once(seed: int) -> dict[str, Any]:
    """Trains with and without a failure that the seed describes."""
    draw = random.Random(seed)
    world_size = draw.choice([3, 4])
    plan = {
        "sync_every": draw.choice([5, 10]),
        "fragments": draw.choice([1, 2]),
        "overlap": draw.choice([0, 2]),
        "comm_hook": draw.choice([None, "int8", {"name": "powersgd", "matrix_rank": 1}]),
    }
    kind, rank = draw.choice(["killed", "frozen"]), draw.randrange(world_size)
    # The barrier keeps processes that start late on a busy machine from being missed.
    job = Job(plan, NUM_STEPS, PATIENCE_S, barrier_step=0, pauses_s=(2 * STEP_S,) * world_size, seed=seed)
    result = {
        "seed": seed,
        "world_size": world_size,
        "plan": plan,
        "kind": kind,
        "rank": rank,
        "load": os.getloadavg()[0],
    }
    with Ranks(train, world_size, job) as calm, Ranks(train, world_size, job) as ranks:
        ranks.wait_until(lambda: ranks.store.check(["members/0/0/end"]))
        time.sleep(draw.uniform(0, 0.9 * NUM_STEPS * STEP_S))
        frozen_s = draw.uniform(0.1, 3 * PATIENCE_S) if kind == "frozen" else None
        ranks.signal(rank, signal.SIGSTOP if frozen_s else signal.SIGKILL)
        if frozen_s:
            time.sleep(frozen_s)
            ranks.signal(rank, signal.SIGCONT)
        survivors = [other for other in range(world_size) if other != rank]
        ends = [ranks.outcome(other) for other in survivors]
        own = ranks.outcome(rank)
        undisturbed = calm.wait_for(range(world_size))[0]
    trained = [end for end, _ in ends if end is not None]
    loss = trained[0].loss if trained else None
    return {
        **result,
        "frozen_s": frozen_s,
        "has_survived": len(trained) == len(survivors) and all(x.weights.equal(trained[0].weights) for x in trained),
        "is_own_end_right": _is_right(own, kind, trained),
        "steps_of_rank": own[0].num_trained if own[0] is not None else None,
        "loss": loss,
        "undisturbed_loss": undisturbed.loss,
        "log": [line for end in trained for line in end.log],
        "errors": [trace.splitlines()[-1] for _, trace in (*ends, own) if trace],
    }


def _is_right(own: Any, kind: str, trained: list[Any]) -> bool:
    end, trace = own
    if end is None:
        return kind == "killed" or TOO_LATE in (trace or "")
    return bool(trained) and end.weights.equal(trained[0].weights)


def run_trainers_once(seed: int) -> dict[str, Any]:
    """Fits with and without a failure that the seed describes."""
    draw = random.Random(seed)
    kind = ("killed", "frozen", "healthy")[seed % 3]
    rank = draw.randrange(1, 3) if kind == "killed" else draw.randrange(3)
    step = draw.randrange(1, 3 * TRAINERS_STEPS - 1)
    least, most = {"killed": (0.0, 0.0), "frozen": (1.2, 3.0), "healthy": (0.1, 0.5)}[kind]
    frozen_s = TRAINERS_PATIENCE_S * draw.uniform(least, most)
    plan = {"fragments": draw.choice([1, 2]), "overlap": draw.choice([0, 2]), "comm_hook": draw.choice([None, "int8"])}
    options: dict[str, Any] = {"options": plan, "pause_s": STEP_S, "num_steps": TRAINERS_STEPS, "batch_size": 64}
    options |= {"patience_s": TRAINERS_PATIENCE_S, "noise": 1.0, "seed": seed}
    with TemporaryDirectory() as folder:
        calm, disturbed, fewer = (Fit(Path(folder, name), **options) for name in ("calm", "disturbed", "fewer"))
        with Ranks(fit, 3, free_port(), calm) as ranks:
            undisturbed: Ended = ranks.wait_for(range(3))[0]
        with Ranks(fit, 3, free_port(), disturbed) as ranks:
            ranks.wait_until(lambda: ranks.store.check([f"step/{rank}/{step}"]))
            ranks.signal(rank, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            if kind != "killed":
                time.sleep(frozen_s)
                ranks.signal(rank, signal.SIGCONT)
            ends = [ranks.outcome(other) for other in range(3) if other != rank]
            own, trace = ranks.outcome(rank)
        loss_of_two = None
        if kind == "killed":
            with Ranks(fit, 2, free_port(), fewer) as ranks:
                loss_of_two = ranks.wait_for(range(2))[0].loss
    fitted: list[Ended] = [end for end, _ in ends if end is not None]
    has_survived = len(fitted) == 2 and _are_same(*fitted)
    if kind == "healthy":  # as if nothing had happened
        has_survived = has_survived and _are_same(fitted[0], undisturbed) and not any(end.log for end in fitted)
    # A rank that comes back after the end finds that the others have left, in one of several places.
    is_too_late = kind == "frozen" and "MembersError" in (trace or "")
    is_back = own is not None and bool(fitted) and _are_same(own, fitted[0])
    return {
        "seed": seed,
        "world_size": 3,
        "plan": plan,
        "kind": kind,
        "rank": rank,
        "step": step,
        "load": os.getloadavg()[0],
        "frozen_s": frozen_s or None,
        "has_survived": has_survived,
        "is_own_end_right": own is None if kind == "killed" else is_back or is_too_late,
        "steps_of_rank": None if own is None else own.num_trained,
        "loss": fitted[0].loss if fitted else None,
        "undisturbed_loss": undisturbed.loss,
        "undisturbed_loss_of_two_ranks": loss_of_two,
        "log": [line for end in fitted for line in end.log],
        "errors": [text.splitlines()[-1] for text in (*(trace for _, trace in ends), trace) if text],
    }


def _are_same(end: Ended, other: Ended) -> bool:
    are_equal = all((end.weights[name] == values).all() for name, values in other.weights.items())
    results = [(x.steps, x.metrics["val_loss"], x.metrics["val_metric"], x.best) for x in (end, other)]
    return are_equal and results[0] == results[1]


def run_and_show(run_once: Callable[[int], dict[str, Any]], seed: int) -> dict[str, Any]:
    """Runs once, and prints a line about it; of a failure everything."""
    run = run_once(seed)
    change = 100 * (run["loss"] / run["undisturbed_loss"] - 1) if run["loss"] else float("nan")
    survived = run["has_survived"] and run["is_own_end_right"]
    end = f"survived, loss {change:+.2f} %" if survived else f"FAILED: {run}"
    print(f"{seed}: {run['kind']} rank {run['rank']} of {run['world_size']}, {end}", flush=True)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-runs", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--num-at-once", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    load_at_start, runs = os.getloadavg()[0], []
    run_one = partial(run_and_show, run_trainers_once if args.trainer else run_once)
    patience_s, num_steps = (TRAINERS_PATIENCE_S, 3 * TRAINERS_STEPS) if args.trainer else (PATIENCE_S, NUM_STEPS)
    with ThreadPoolExecutor(args.num_at_once) as pool:
        for run in pool.map(run_one, range(args.first_seed, args.first_seed + args.num_runs)):
            runs.append(run)
            if args.output is not None:  # so that a measurement that is ended early has its first runs
                result = {"summary": summarize(runs), "patience_s": patience_s, "num_steps": num_steps, "runs": runs}
                write_result(args.output, result, load_at_start)
    print(summarize(runs))


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many runs went as they should, and how far the losses are from those of undisturbed runs."""
    changes = [abs(run["loss"] / run["undisturbed_loss"] - 1) for run in runs if run["loss"]]
    return {
        "num_runs": len(runs),
        **{f"num_{kind}": sum(run["kind"] == kind for run in runs) for kind in sorted({run["kind"] for run in runs})},
        "num_survived": sum(run["has_survived"] and run["is_own_end_right"] for run in runs),
        "largest_change_of_loss": max(changes, default=None),
    }


if __name__ == "__main__":
    main()
