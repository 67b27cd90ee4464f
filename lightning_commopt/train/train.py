"""The Hydra application ``commopt-train``: trains a configuration, and records speed and loss."""

from __future__ import annotations

import math
import sys
import time
import warnings
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from lightning_commopt.callbacks import RunRecorder
from lightning_commopt.compat.hydra import VERSION_BASE, allow_targets, get_args_parser, packages_of_targets
from lightning_commopt.launch.conf_path import conf_dir
from lightning_commopt.launch.environment import is_first_rank, is_lab_rank
from lightning_commopt.launch.hydra_command import config_flags
from lightning_commopt.launch.process import InterruptedRun
from lightning_commopt.measure.runs.files import CONFIG_FILE
from lightning_commopt.measure.runs.record import RunRecord, fail_rank, finish_record
from lightning_commopt.text.formatting import escape_controls, number, percent
from lightning_commopt.text.terminal import TextConsole, TextTable, print_in_any_encoding
from lightning_commopt.train.sweep.composing import continue_command
from lightning_commopt.train.sweep.config import ConfigError, check_config, link_note, spread_over_hosts, start_record
from lightning_commopt.train.sweep.display import SweepDisplay, hint
from lightning_commopt.train.sweep.lab_run import train_in_lab
from lightning_commopt.train.sweep.launcher import register_with_hydra

# Warnings that say nothing to a user of ``commopt-train``.
_NOISE = (
    # The workloads make a batch faster than another process could send it.
    ".*does not have many workers.*",
    # Lightning's own calls of torch cause it.
    ".*LeafSpec.* is deprecated.*",
    # It warns of samples that count twice in a validation: here at most one per rank.
    ".*Using `DistributedSampler` with the dataloaders.*",
)


def main() -> None:
    """Runs ``commopt-train`` with the arguments of this process."""
    print_in_any_encoding()
    sys.argv[1:] = flags_first(sys.argv[1:])
    console = TextConsole()
    status: int | str | None = 0
    was_interrupted = False
    with SweepDisplay(console) as display:
        register_with_hydra((sys.executable, "-m", "lightning_commopt.train.train", *config_flags()), display)
        try:
            with allow_targets(["lightning_commopt"]):
                hydra.main(config_path=str(conf_dir()), config_name="train", **VERSION_BASE)(_train_or_explain)()
        except InterruptedRun as interrupted:
            status, was_interrupted = 128 + interrupted.signal, True
        except SystemExit as stop:
            status = stop.code
            # Hydra prints an error and exits while it handles it, so the error is the context of the exit.
            if question := hint(stop.__context__, conf_dir()):
                print(escape_controls(question), file=sys.stderr)
    if display.results and display.sweep_dir is not None:
        # Not at the top of the module, as ranks should not wait for jinja2.
        from lightning_commopt.report.terminal import report_sweep

        report_sweep(display.sweep_dir, console)
        num_failed = sum(result.record.status != "finished" for result in display.results)
        status = status or min(num_failed, 1)
    if was_interrupted and display.sweep_dir is not None:
        command = continue_command(sys.argv[1:], display.sweep_dir)
        console.print(f"To continue:\n{command}", soft_wrap=True)
    sys.exit(status)


def _train_or_explain(config: DictConfig) -> float | None:
    """Trains. If a single run cannot begin, prints only the reason, as Hydra 1.4 would print a traceback."""
    try:
        return train(config)
    except ConfigError as error:
        if HydraConfig.get().mode != RunMode.RUN:
            raise
        print(escape_controls(str(error)), file=sys.stderr)
        sys.exit(1)


def train(config: DictConfig) -> float | None:
    """Runs a configuration: fits, validates, and writes ``config.yaml`` and ``run.json`` into the run's directory.

    Returns:
        The final validation loss, if the model logs a ``val_loss``.

    Raises:
        ConfigError: the configuration cannot be run; nothing was trained.
    """
    check_config(config)
    folder = Path(HydraConfig.get().runtime.output_dir)
    is_first = is_first_rank()
    is_in_sweep = not OmegaConf.is_missing(HydraConfig.get().job, "num")
    if is_first and not is_in_sweep and (note := link_note(config)) is not None:
        TextConsole().print(note, soft_wrap=True)
    if config.link is not None and not is_lab_rank():
        return train_in_lab(config, folder).val_loss
    config = spread_over_hosts(config)
    started = time.perf_counter()
    if is_first:
        OmegaConf.save(config, folder / CONFIG_FILE, resolve=True)
        start_record(config, folder).save(folder)
    try:
        with allow_targets(packages_of_targets(OmegaConf.to_container(config, resolve=True))):
            metrics = _fit(config, folder)
    except BaseException as error:
        if is_first:
            fail_rank(folder, error, rank=0, seconds=time.perf_counter() - started)
        raise
    if not is_first:
        return metrics.get("val_loss")
    record = finish_record(folder, metrics, seconds=time.perf_counter() - started)
    if not is_in_sweep:  # a sweep prints one table of all jobs instead
        TextConsole().print(run_table(record))
    return record.val_loss


def flags_first(arguments: list[str]) -> list[str]:
    """Returns command-line arguments, without the program's name, with Hydra's flags before the overrides.

    Lightning appends overrides when it starts further ranks, and argparse accepts none after a flag that follows
    others.

    >>> flags_first(["seed=1", "--config-name", "train", "seed=2"])
    ['--config-name', 'train', 'seed=1', 'seed=2']
    """
    overrides = get_args_parser().parse_intermixed_args(arguments).overrides
    flags = list(arguments)
    for override in reversed(overrides):
        del flags[len(flags) - 1 - flags[::-1].index(override)]
    return [*flags, *overrides]


def _fit(config: DictConfig, folder: Path) -> dict[str, float]:
    """Trains, records the run, and returns the metrics of a final validation."""
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    seed_everything(config.seed + config.repetition, workers=True, verbose=False)
    data: LightningDataModule = instantiate(config.data, _convert_="all")
    model: LightningModule = instantiate(config.model, _convert_="all")
    callbacks = [instantiate(callback, _convert_="all") for callback in config.callbacks.values() if callback]
    if not config.trainer.get("enable_progress_bar", True):  # a Trainer without one refuses those that are given
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    loggers = [instantiate(logger, _convert_="all") for logger in config.logger.values() if logger]
    strategy = instantiate(config.strategy, _convert_="all")
    try:
        trainer: Trainer = instantiate(config.trainer, _partial_=True, _convert_="all")(
            strategy=strategy,
            callbacks=[*callbacks, RunRecorder(dirpath=folder, ends_run=False)],
            logger=loggers or False,
            default_root_dir=str(folder),
        )
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise ConfigError(f"trainer: {error}") from error
    trainer.fit(model, datamodule=data)
    if trainer.limit_val_batches == 0 or not is_overridden("validation_step", model):
        return {}
    by_loader = trainer.validate(model, datamodule=data, verbose=False)
    return {name: float(value) for metrics in by_loader for name, value in metrics.items()}


def run_table(record: RunRecord) -> TextTable:
    """Returns a table of one row, with a dash for what was not measured."""

    def known(value: float | None) -> float:
        return math.nan if value is None else value

    cells = {
        "plan": record.plan_name or record.sync_method,
        "ranks": str(record.world_size or "-"),
        "steps/s": number(known(record.steps_per_s)),
        "samples/s": number(known(record.samples_per_s)),
        "MB on the wire\nper step": number(known(record.wire_bytes_per_step) / 1e6),
        "exposed": percent(known(record.exposed_share)),
        "final\nvalidation loss": number(known(record.val_loss), digits=4),
    }
    table = TextTable(*cells, numbers=list(cells)[1:])
    table.add_row(*cells.values())
    return table


if __name__ == "__main__":
    main()
