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
from commopt_diagnose.rank_identity import find_rank_identity
from lightning_commopt.commands.errors import echo
from lightning_commopt.launch.lab import RankError, parse_rate
from lightning_commopt.launch.process import InterruptedRun, raise_signals
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
        with _progress_bar(is_shown=identity.rank == 0) as on_progress:
            return bench_launched(settings, identity, device=device, on_progress=on_progress)
    if link is None and num_hosts is not None:
        raise ValueError(f"--hosts {num_hosts} needs a link between them, such as --link 1gbit")
    device_type, num_devices = device_type_of("cpu" if link is not None and device == "auto" else device)
    if link is not None and device_type != "cpu":
        raise ValueError(f"--link {link} is for ranks on CPU: --device must be cpu, got {device}")
    parse_rate(link, "--link")
    try:
        with raise_signals(), _progress_bar() as on_progress:
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
def _progress_bar(*, is_shown: bool = True) -> Iterator[OnProgress]:
    """Shows progress on standard error if that is a terminal."""
    console = TextConsole(stderr=True)
    texts = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %")
    is_hidden = not (is_shown and console.is_terminal)
    with Progress(*texts, TimeRemainingColumn(), console=console, transient=True, disable=is_hidden) as bar:
        task = bar.add_task("starting ranks", total=None)
        yield lambda num_done, total, label: bar.update(task, completed=num_done, total=total, description=label)
