"""Commands about this machine and about a script: selftest, run, tune."""

import json as json_text
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lightning_commopt.commands.errors import check_outputs, echo, errors_in_a_line
from lightning_commopt.text.terminal import TextConsole


def selftest(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is a device.")] = "auto",
    full: Annotated[bool, typer.Option("--full", help="Also check several buckets, streams, speed and hangs.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write all results as JSON to this file.")] = None,
    limit_s: Annotated[float, typer.Option(min=1, help="Seconds for all checks together.")] = 300,
) -> None:
    """Checks gradient sync on this machine's devices: exactness, equal ranks, resume, memory, measured times.

    Each outcome is printed, and written to --output, as soon as it is known. Exit status 1 if a check fails, 2 if some
    could not run or be completed.
    """
    from lightning_commopt.commands.selftest import run
    from lightning_commopt.launch.process import InterruptedRun, raise_signals
    from lightning_commopt.measure.plain import write_json
    from lightning_commopt.testing.ranks import RankError

    console, latest = TextConsole(), None

    def keep(news: run.SelfTest) -> None:
        nonlocal latest
        latest = news
        # The outcome is written before it is printed, as printing may fail.
        if output is not None:
            write_json(output, asdict(news))
        if news.outcomes:
            run.print_outcome(news.outcomes[-1], console)
        else:
            run.print_place(news, console)

    with errors_in_a_line(RankError), run.progress_lines(console) as on_start, raise_signals():
        check_outputs(output)
        on_start("starting two ranks")
        with suppress(InterruptedRun):
            run.run_selftest(device, on_start, keep, is_full=full, limit_s=limit_s)
    if latest is None:
        echo("commopt: interrupted before the first check", err=True)
        raise typer.Exit(2)
    run.print_sum(latest, console)
    if output is not None:
        console.print(f"written to {output}")
    statuses = {outcome.status for outcome in latest.outcomes}
    raise typer.Exit(1 if "failed" in statuses else 0 if latest.is_whole and "out of time" not in statuses else 2)


def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Such as python train.py; or torchrun ...")],
) -> None:
    """Runs COMMAND with CommTimeMonitor and HangMonitor in every Trainer of it: nothing in the script changes.

    The progress bar shows exposed_share, the share of a step that waits for communication. At its end a fit prints the
    table of its step, a verdict, and the place of its files; if it hangs, it prints which rank is at fault. Strategy
    and numbers do not change. The exit status is that of COMMAND, or 1 if it has made no Trainer.
    """
    from lightning_commopt.commands.monitored import CHANGE
    from lightning_commopt.commands.trainers import run_changed

    with errors_in_a_line():
        status, has_trainer = run_changed(command, CHANGE, {})
    if not has_trainer:
        echo("commopt: COMMAND has made no Trainer of Lightning on this host, so nothing was measured here", err=True)
    else:
        echo("To keep the monitors: Trainer(callbacks=[CommTimeMonitor(), HangMonitor()])")
    raise typer.Exit(status or int(not has_trainer))


def tune(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Such as python train.py; or torchrun ...")],
    lossy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A compressor that may be chosen, such as int8; may be given several times."),
    ] = None,
    output: Annotated[Path, typer.Option(help="The file for the plan, for CommOptDDP(plan=FILE).")] = Path("plan.json"),
    whole_fit: Annotated[
        bool, typer.Option("--whole-fit", help="Train on when the plan is found; else the first fit ends then.")
    ] = False,
) -> None:
    """Runs COMMAND with plan="auto" in place of DDP, prints the plan that it finds, and writes it to a file.

    The script stays as it is: a Trainer of it that would use DDP, or CommOptDDP, gets CommOptDDP(plan="auto"). Exit
    status 1 if no fit has looked for a plan; the status of COMMAND if it fails, which leaves an earlier file unless a
    plan was found before.
    """
    from lightning_commopt.commands.tune.inject import run_tuned

    with errors_in_a_line():
        status, verdict, has_searched = run_tuned(command, lossy=lossy or (), output=output, ends_fit=not whole_fit)
    if status and verdict is None:
        echo(f"commopt: COMMAND ended with status {status}, and no plan was found: {output} is not written", err=True)
        raise typer.Exit(status)
    if verdict is None and has_searched:
        echo("Rank 0 ran on another node: commopt tune has printed and written the plan there.")
        return
    if verdict is None:
        echo("commopt: no fit of COMMAND has looked for a plan: it needs a Trainer with DDP on several ranks", err=True)
        raise typer.Exit(1)
    echo(verdict)
    if not json_text.loads(output.read_text(encoding="utf-8")):
        echo(f"The plan is DDP's own defaults, so {output} sets no options.")
    else:
        echo(f"{output}: CommOptDDP(plan={str(output)!r}) trains with this plan.")
        echo(f"With Hydra: strategy.plan={output}. With LightningCLI: --trainer.strategy.plan={output}.")
    if status:
        echo(f"commopt: COMMAND ended with status {status}, after this plan was found", err=True)
        raise typer.Exit(status)
