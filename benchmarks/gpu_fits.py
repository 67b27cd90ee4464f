"""One rank of `gpu.py`'s Lightning fits: what is lossless equals Lightning's own strategies bit for bit, ranks agree
with every compressor, and training resumes as if it had not ended. `gpu_ranks.py` starts it.

With more than two ranks a sum depends on its order, and so on how gradients are cut: then only fits that hand the same
tensors to the same collectives must be equal, and how far others are apart is measured.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_models import TokenModel
from gpu_ranks import FOLDER, begin_case, emit, forget_plans
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_commopt import CommOptDDP, CommOptDiLoCo, CommOptModelParallel
from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor, NVTXRanges

CASE_LIMIT_S = 90.0
WRAPPINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "static graph and bucket view": {"static_graph": True, "gradient_as_bucket_view": True},
    "buckets of 1 MB": {"bucket_cap_mb": 1},
}
COMPRESSORS: dict[str, Any] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "bf16 summed in float32": {"name": "bf16", "accumulate": "float32"},
    "bf16 with error feedback": {"name": "error_feedback", "inner": "bf16"},
    "int8": "int8",
    "int8 without error feedback": {"name": "int8", "error_feedback": False},
    "int4": "int4",
    "int4 with error feedback": {"name": "int4", "error_feedback": True},
    "PowerSGD of rank 4": {"name": "powersgd", "matrix_rank": 4, "start_step": 2},
    "alternating PowerSGD of rank 4": {"name": "alternating_powersgd", "matrix_rank": 4, "start_step": 2},
}
SHARDED: dict[str, dict[str, Any]] = {
    "int8": {"comm_hook": "int8"},
    "int8 with error feedback": {"comm_hook": {"name": "int8", "error_feedback": True}},
    "int4": {"comm_hook": "int4"},
    "int8, parameters in int8": {"comm_hook": "int8", "param_hook": "int8"},
}
DILOCO: dict[str, dict[str, Any]] = {
    "at once": {"sync_every": 10},
    "4 fragments, int8, overlapping": {"sync_every": 8, "fragments": 4, "overlap": 2, "comm_hook": "int8"},
}


class Fitted(NamedTuple):
    """What a fit left on this rank: whole parameters in float32, the loss of every batch, and seconds."""

    parameters: Tensor
    losses: Tensor
    seconds: float
    trainer: Trainer

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.parameters.numpy().tobytes()).hexdigest()


class Fits:
    """Fits the same model on the same data again and again.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.is_tiny = arguments.device == "cpu"
        self.num_steps = arguments.num_steps
        self.accelerator = arguments.device
        self.num_ranks = int(os.environ["WORLD_SIZE"])
        self._launched = dict(os.environ)

    def model(self, **options: Any) -> TokenModel:
        return TokenModel(is_tiny=self.is_tiny, **options)

    def fit(self, strategy: Strategy, model: Mapping[str, Any] | None = None, **options: Any) -> Fitted:
        """Fits a new model; ``options`` are the Trainer's, and ``ckpt_path``."""
        os.environ.update(self._launched)  # Lightning removes its variables after a fit
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        resumed_from = options.pop("ckpt_path", None)
        quiet: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        length: dict[str, Any] = {} if "max_epochs" in options else {"max_steps": self.num_steps, "max_epochs": -1}
        places: dict[str, Any] = {"accelerator": self.accelerator, "devices": local}
        places["num_nodes"] = self.num_ranks // local
        seed_everything(0, verbose=False)
        module = self.model(**(model or {}))
        trainer = Trainer(strategy=strategy, **{**places, **quiet, **length, **options})
        start_s = time.perf_counter()
        trainer.fit(module, ckpt_path=resumed_from)
        seconds = time.perf_counter() - start_s
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in module.parameters()]
        parameters = torch.cat([one.detach().float().flatten().cpu() for one in whole])
        return Fitted(parameters, torch.stack(module.losses).float().cpu(), seconds, trainer)


def _agree(fitted: Fitted) -> tuple[bool, dict[str, Any]]:
    """Returns whether all ranks have the same finite parameters, and numbers for a row; all ranks must call it."""
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, fitted.digest)
    losses = fitted.losses
    numbers = {
        "ranks_agree": len(set(digests)) == 1,
        "is_finite": bool(fitted.parameters.isfinite().all()),
        "first_loss": losses[0].item(),
        "last_loss": losses[-5:].mean().item(),
        "num_batches": len(losses),
        "seconds": fitted.seconds,
    }
    return bool(numbers["ranks_agree"] and numbers["is_finite"]), numbers


def _about(agree: bool, numbers: Mapping[str, Any]) -> str:
    ranks = "ranks agree" if agree else "RANKS DIFFER" if numbers["is_finite"] else "NOT FINITE"
    return f"{ranks}; loss {numbers['first_loss']:.4f} to {numbers['last_loss']:.4f}"


def compare(name: str, ours: Fitted, stock: Fitted, *, is_same_sum: bool = True) -> None:
    """Emits whether two fits ended with the same bits; where sums differ in their order, how far they are apart."""
    agree, numbers = _agree(ours)
    is_equal = torch.equal(ours.parameters, stock.parameters)
    apart = (ours.parameters - stock.parameters).abs().max().item()
    must_equal = is_same_sum or dist.get_world_size() == 2
    verdict = "right" if is_equal and agree else "wrong" if must_equal or not agree else "measured"
    bits = "the same bits as" if is_equal else f"parameters up to {apart:.3g} apart from those of"
    emit(name, f"{bits} Lightning's own; {_about(agree, numbers)}", verdict, is_equal=is_equal, apart=apart, **numbers)


def judge(name: str, fitted: Fitted, stock: Fitted) -> None:
    """Emits whether the ranks of a lossy fit agree and it has learned, beside the loss without compression."""
    agree, numbers = _agree(fitted)
    uncompressed = stock.losses[-5:].mean().item()
    verdict = "right" if agree and numbers["last_loss"] < numbers["first_loss"] else "wrong"
    result = f"{_about(agree, numbers)}, uncompressed {uncompressed:.4f}"
    emit(name, result, verdict, uncompressed_loss=uncompressed, **numbers)


def ddp_parity(fits: Fits, precision: str) -> None:
    for wrapping, options in WRAPPINGS.items():
        stock = fits.fit(DDPStrategy(**options), precision=precision)
        for hook in ("none", "all_reduce"):
            ours = fits.fit(CommOptDDP(comm_hook=hook, **options), precision=precision)
            compare(f"DDP, {precision}, {wrapping}: {hook}", ours, stock, is_same_sum=hook == "none")


def variant(
    name: str, model: Mapping[str, Any] | None = None, ddp: Mapping[str, Any] | None = None, **options: Any
) -> Callable[[Fits], None]:
    """Returns a case: a way to train that DDP has to bear, without a compressor and with int8."""

    def run(fits: Fits) -> None:
        wrapping = {"bucket_cap_mb": 1} if ddp is None else ddp
        stock = fits.fit(DDPStrategy(**wrapping), model, **options)
        compare(f"DDP, {name}: none", fits.fit(CommOptDDP(**wrapping), model, **options), stock)
        judge(f"DDP, {name}: int8", fits.fit(CommOptDDP(comm_hook="int8", **wrapping), model, **options), stock)

    return run


def compiled(fits: Fits) -> None:
    compiler = "eager" if fits.is_tiny else "inductor"  # a compiler for the CPU takes minutes
    variant("torch.compile", {"compiler": compiler})(fits)


def fsdp_parity(fits: Fits, precision: str) -> None:
    sharded, size = {"is_sharded": True}, fits.num_ranks
    stock = fits.fit(ModelParallelStrategy(size, 1), sharded, precision=precision)
    compare(f"FSDP2, {precision}: none", fits.fit(CommOptModelParallel(size, 1), sharded, precision=precision), stock)
    for name, options in SHARDED.items():
        fitted = fits.fit(CommOptModelParallel(size, 1, **options), sharded, precision=precision)
        judge(f"FSDP2, {precision}: {name}", fitted, stock)


def compressors(fits: Fits, precision: str) -> None:
    wrapping: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}
    stock = fits.fit(DDPStrategy(**wrapping), precision=precision)
    for name, hook in COMPRESSORS.items():
        judge(f"DDP, {precision}: {name}", fits.fit(CommOptDDP(comm_hook=hook, **wrapping), precision=precision), stock)


def diloco(fits: Fits, precision: str) -> None:
    """The weights at the end of a fit are those of all ranks, on which each has trained on its own."""
    stock = fits.fit(DDPStrategy(), precision=precision)
    for name, options in DILOCO.items():
        judge(f"DiLoCo, {precision}: {name}", fits.fit(CommOptDiLoCo(**options), precision=precision), stock)


def resume(fits: Fits) -> None:
    """Trains two epochs, and again the second from the checkpoint at the end of the first."""
    for name in ("none", "int8", "PowerSGD of rank 4", "alternating PowerSGD of rank 4"):
        options = {"bucket_cap_mb": 1, "comm_hook": COMPRESSORS.get(name)}
        _resume(f"DDP, resumed: {name}", fits, CommOptDDP, options)
    name = "int8 with error feedback"
    options = {"data_parallel_size": fits.num_ranks, "tensor_parallel_size": 1, **SHARDED[name]}
    _resume(f"FSDP2, resumed: {name}", fits, CommOptModelParallel, options)
    for name, options in DILOCO.items():
        _resume(f"DiLoCo, resumed in a round: {name}", fits, CommOptDiLoCo, options)


def _resume(name: str, fits: Fits, strategy: type[Strategy], options: Mapping[str, Any]) -> None:
    folder = Path(os.environ[FOLDER], name)
    model = {"is_sharded": strategy is CommOptModelParallel}
    length = {"max_epochs": 2, "limit_train_batches": max(2, fits.num_steps // 3)}
    # At an epoch's end, as Lightning repeats a batch after a checkpoint from behind a fit, with its own strategies too
    keep: Callback = ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    whole = fits.fit(strategy(**options), model, callbacks=[keep], enable_checkpointing=True, **length)
    resumed = fits.fit(strategy(**options), model, ckpt_path=str(folder / "epoch=0.ckpt"), **length)
    agree, numbers = _agree(resumed)
    is_equal = torch.equal(whole.parameters, resumed.parameters)
    bits = "the same bits as without an end" if is_equal else "OTHER BITS than without an end"
    is_half = len(resumed.losses) == len(whole.losses) // 2
    result = f"{bits}, {len(resumed.losses)} of {len(whole.losses)} batches again; {_about(agree, numbers)}"
    emit(name, result, "right" if is_equal and agree and is_half else "wrong", is_equal=is_equal, **numbers)


def callbacks(fits: Fits) -> None:
    """All callbacks at once change no bit, with Lightning's own strategy and with ours."""
    stock = fits.fit(DDPStrategy(bucket_cap_mb=1))
    for name, strategy in (("DDPStrategy", DDPStrategy(bucket_cap_mb=1)), ("CommOptDDP", CommOptDDP(bucket_cap_mb=1))):
        folder = Path(os.environ[FOLDER], name)
        watching: list[Callback] = [CommTimeMonitor(every_n_steps=5, dirpath=folder, print_summary=False)]
        watching += [HangMonitor(dirpath=folder), NVTXRanges()]
        ours = fits.fit(strategy, callbacks=watching)
        compare(f"{name} with CommTimeMonitor, HangMonitor and NVTXRanges", ours, stock)


def auto(fits: Fits) -> None:
    """A lossless plan that is found in the fit changes no bit."""
    length = {"max_steps": 4 * fits.num_steps, "max_epochs": -1}
    stock = fits.fit(DDPStrategy(), **length)
    forget_plans()
    strategy = CommOptDDP(plan="auto")
    compare('plan="auto", lossless', fits.fit(strategy, **length), stock, is_same_sum=False)


CASES: dict[str, Callable[[Fits], None]] = {
    "ddp_32": lambda fits: ddp_parity(fits, "32-true"),
    "ddp_bf16": lambda fits: ddp_parity(fits, "bf16-mixed"),
    "accumulation": variant("4 batches a step", accumulate_grad_batches=4),
    "clipping": variant("gradients clipped", gradient_clip_val=0.1),
    "unused": variant("unused parameters", {"has_unused": True}, {"find_unused_parameters": True}),
    "fp16": variant("16-mixed", precision="16-mixed"),
    "fsdp_32": lambda fits: fsdp_parity(fits, "32-true"),
    "compressors_32": lambda fits: compressors(fits, "32-true"),
    "resume": resume,
    "fsdp_bf16": lambda fits: fsdp_parity(fits, "bf16-mixed"),
    "compile": compiled,
    "diloco_32": lambda fits: diloco(fits, "32-true"),
    "diloco_fp16": lambda fits: diloco(fits, "16-mixed"),
    "callbacks": callbacks,
    "compressors_bf16": lambda fits: compressors(fits, "bf16-true"),
    "fsdp_bf16_true": lambda fits: fsdp_parity(fits, "bf16-true"),
    "auto": auto,
}
"""The first ones are worth most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--share-gpu", action="store_true", help="known from the environment of the rank")
    parser.add_argument("--num-steps", type=int, default=30)
    parser.add_argument("--cases", required=True, help=f"with commas between them, of {', '.join(CASES)}")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.cases.split(",") if name not in CASES]:
        parser.error(f"--cases must be of {', '.join(CASES)}, got {unknown[0]!r}")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    fits, num_cores = Fits(arguments), len(os.sched_getaffinity(0))
    torch.set_num_threads(1 if arguments.device == "cpu" else max(1, num_cores // fits.num_ranks))
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in arguments.cases.split(","):
        begin_case(name, CASE_LIMIT_S)
        CASES[name](fits)


if __name__ == "__main__":
    main()
