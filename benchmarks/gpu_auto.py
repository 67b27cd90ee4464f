"""One rank of `gpu.py`'s search: what ``plan="auto"`` chooses, and its step over the best of a grid of plans.

`gpu_ranks.py` starts it, and `tuning_job.py` has the search and the grid.
"""

import argparse
import os
import warnings

import torch
from command_line import positive
from gpu_models import SIZES
from gpu_ranks import begin_case, emit, forget_plans
from tuning import compare
from tuning_job import search

CASE = "search"
_CASE_LIMIT_S = 150.0
_CAPS_MB = (None, 2, 10, 100)
_LOSSY = ("bf16", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--share-gpu", action="store_true", help="known from the environment of the rank")
    parser.add_argument("--model", choices=SIZES, default="plain_vit_small")
    parser.add_argument("--link", default="without a limit", help="what rows call the link between ranks")
    parser.add_argument("--num-fit-steps", type=positive, default=100)
    parser.add_argument("--num-rounds", type=positive, default=2, help="turns of the grid")
    parser.add_argument("--num-caps", type=positive, default=len(_CAPS_MB), help="bucket sizes in the grid")
    parser.add_argument("--cases", required=True, choices=(CASE,))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    forget_plans()
    num_ranks, is_first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    torch.set_num_threads(1 if arguments.device == "cpu" else max(1, len(os.sched_getaffinity(0)) // num_ranks))
    settings = {
        "accelerator": arguments.device,
        "model": arguments.model,
        "lossy": list(_LOSSY),
        "caps_mb": _CAPS_MB[: arguments.num_caps],
        "change_at_step": None,
        "num_planned_steps": 5000,
        "num_fit_steps": arguments.num_fit_steps,
        "num_grid_steps": 6,
        "num_rounds": arguments.num_rounds,
    }
    begin_case(CASE, _CASE_LIMIT_S)
    found = search(settings)
    if not is_first:
        return
    compared = compare(found | {"num_hosts": num_ranks, "rate": arguments.link, "settings": settings})
    chosen_ms, best_ms, own_ms = (1e3 * compared[key] for key in ("chosen_s", "best_s", "own_s"))
    result = (
        f"chose {compared['chosen']}: {chosen_ms:.1f} ms a step, {100 * compared['over_best']:+.1f} % over the best of"
        f" {len(found['grid'])} plans ({compared['best']}, {best_ms:.1f} ms); DDP's own {own_ms:.1f} ms, its noise"
        f" {100 * compared['noise']:.1f} %; {compared['status']} after {compared['num_search_steps']} steps of search"
    )
    emit(f'plan="auto", {", ".join(_LOSSY)} allowed: {arguments.model}, {arguments.link}', result, **compared)


if __name__ == "__main__":
    main()
