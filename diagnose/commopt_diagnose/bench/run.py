"""Runs a bench in the ranks that a launcher has started or, without a launcher, in ranks that it starts."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from commopt_diagnose.bench.job import bench_launched, device_type_of
from commopt_diagnose.bench.operations import compressor_of
from commopt_diagnose.bench.result import BenchResult
from commopt_diagnose.bench.settings import BenchSettings
from commopt_diagnose.bench.start import OnProgress, start_bench
from commopt_diagnose.doctor.meeting import MeetingError
from commopt_diagnose.rank_identity import find_rank_identity
from lightning_commopt.commands.errors import echo
from lightning_commopt.launch.lab import RankError, parse_rate
from lightning_commopt.launch.process import InterruptedRun, raise_signals
from lightning_commopt.text.formatting import count
from lightning_commopt.text.terminal import TextConsole


def run_bench(
    settings: BenchSettings,
    *,
    device: str,
    ranks_per_host: int | None = None,
    link: str | None = None,
    num_hosts: int | None = None,
) -> BenchResult | None:
    """Returns the result; None on ranks that do not print.

    Args:
        settings: what is measured.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        ranks_per_host: None for the default of the device; this and what follows only without a launcher.
        link: rate of each host in the network lab; None for ranks on this host.
        num_hosts: hosts in the lab; None for 2.

    Raises:
        ValueError: the options contradict each other.
        typer.Exit: a rank failed or the run was interrupted; the reason is printed.
    """
    for comm_hook in settings.comm_hooks:
        compressor_of(comm_hook)  # raises what is wrong with it
    identity = find_rank_identity()
    if identity is not None and identity.world_size > 1:
        options = {"--nproc-per-node": ranks_per_host, "--link": link, "--hosts": num_hosts}
        unused = [name for name, value in options.items() if value is not None]
        if unused:
            raise ValueError(f"{', '.join(unused)}: a launcher has started the ranks already")
        try:
            with _progress(settings, is_shown=identity.rank == 0) as on_progress:
                return bench_launched(settings, identity, device=device, on_progress=on_progress)
        except MeetingError as error:
            echo(f"commopt: {error}", err=True)
            raise typer.Exit(1) from None
    if link is None and num_hosts is not None:
        raise ValueError(f"--hosts {num_hosts} needs a link between them, such as --link 1gbit")
    device_type, num_devices = device_type_of("cpu" if link is not None and device == "auto" else device)
    if link is not None and device_type != "cpu":
        raise ValueError(f"--link {link} is for ranks on CPU: --device must be cpu, got {device}")
    parse_rate(link, "--link")
    try:
        with raise_signals(), _progress(settings) as on_progress:
            return start_bench(
                settings,
                link=link,
                num_hosts=1 if link is None else num_hosts or 2,
                ranks_per_host=ranks_per_host or (num_devices if link is None else 1),
                device_type=device_type,
                on_progress=on_progress,
            )
    except (RankError, InterruptedRun) as error:
        echo(f"commopt: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, RankError) else 128 + error.signal) from None


@contextmanager
def _progress(settings: BenchSettings, *, is_shown: bool = True) -> Iterator[OnProgress]:
    """Shows progress on standard error: a bar on a terminal, elsewhere a line at the start."""
    console = TextConsole(stderr=True)
    texts = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %")
    with Progress(
        *texts, TimeRemainingColumn(), console=console, transient=True, disable=not (is_shown and console.is_terminal)
    ) as bar:
        task = bar.add_task("starting ranks", total=None)

        def on_progress(num_done: int, total: int, label: str) -> None:
            bar.update(task, completed=num_done, total=total, description=label)
            if is_shown and bar.disable and num_done == 0:
                echo(f"commopt: {_workload(settings, total)}", err=True)

        yield on_progress


def _workload(settings: BenchSettings, total: int) -> str:
    """Returns in words what is measured; ``total`` counts a first run of each case, and its repetitions."""
    num_repetitions = settings.num_repetitions
    num_cases = total // (1 + num_repetitions)
    shown = f"{count(num_cases, 'case')}, {count(num_repetitions, 'repetition')}"
    if settings.num_iters is not None:
        return f"{shown} of {count(settings.num_iters, 'call')} each"
    least_s = num_cases * num_repetitions * settings.block_s
    return f"{shown} of {settings.block_s:g} s or one call each: at least {least_s:.0f} s"
