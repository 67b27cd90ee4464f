"""Commands that read the files of runs: trace, summary, report, predict."""

from pathlib import Path
from typing import Annotated

import typer

from lightning_commopt.commands.errors import Json, echo, echo_notices, errors_in_a_line, print_json
from lightning_commopt.commands.run_dirs import newest_run
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.text.terminal import TextConsole

RunDir = Annotated[
    Path, typer.Argument(help="Directory of a run with CommTimeMonitor, or one above it, whose newest run is read.")
]


def _with_steps(folder: Path, *others: str) -> Path:
    from lightning_commopt.measure.files import FOLDER

    return newest_run(folder, f"{FOLDER}/rank_*.jsonl", *others)


def trace(
    run_dir: RunDir,
    output: Annotated[Path | None, typer.Option(help="The file; by default comm_time/trace.json in RUN_DIR.")] = None,
    first_step: Annotated[
        int | None, typer.Option(min=0, help="First step of the trace; by default the first one that was saved.")
    ] = None,
    num_steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 100,
) -> None:
    """Writes a trace of the steps of all ranks, for https://ui.perfetto.dev or chrome://tracing."""
    from lightning_commopt.measure.trace import write_trace

    with errors_in_a_line():
        written, notices = write_trace(_with_steps(run_dir), output, first_step, num_steps)
    for notice in notices:
        echo(f"commopt: {notice}", err=True)
    echo(f"{written}. Open it in https://ui.perfetto.dev")


def summary(
    run_dir: RunDir,
    num_warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="First steps to exclude; by default those that CommTimeMonitor left out.")
    ] = None,
) -> None:
    """Prints where the time of a step went, and what to try: the table at the end of a fit, from its files.

    Exit status 2 if RUN_DIR has no steps.
    """
    from lightning_commopt.measure.summary import summarize_run

    with errors_in_a_line():
        fit, notices = summarize_run(_with_steps(run_dir), num_warmup_steps)
    for notice in notices:
        echo(f"commopt: {notice}", err=True)
    TextConsole().print(fit.table())


def report(
    dirs: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories of sweeps, with runs at any depth, or of runs.")
    ],
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and write only files that --output or --csv names.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="The CSV file; by default report.csv beside the page.")] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Setting that speed-ups refer to, as named in the table.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html and report.csv, or the page; by default the first DIR that exists."),
    ] = None,
    earlier: Annotated[
        Path | None, typer.Option(help="Earlier sweep, or its output of --json: list what is slower now beyond noise.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Share of the throughput that a setting may lose since --earlier; by default 0.05."
        ),
    ] = None,
) -> None:
    """Reports which plan is fastest, by how much and at what loss: on the terminal, as report.html and report.csv.

    Exit status 1 if a setting has become slower than in --earlier, or failed; 2 for mistakes in the arguments.
    """
    with errors_in_a_line(ImportError):
        from lightning_commopt.report.build import build_report
        from lightning_commopt.report.outputs import finite, to_plain, write_csv, write_files
        from lightning_commopt.report.regressions import DEFAULT_TOLERANCE, find_regressions
        from lightning_commopt.report.terminal import print_regressions, print_report

    with errors_in_a_line():
        if tolerance is None:
            tolerance = DEFAULT_TOLERANCE
        elif earlier is None:
            raise ValueError(f"--tolerance {tolerance:g} is for a comparison: add --earlier, or leave it out")
        built = build_report(dirs, baseline=baseline)
        plain = to_plain(built)
        regressions = None if earlier is None else find_regressions(plain, earlier, tolerance=tolerance)
        # Files are written before anything is printed, as the reader of the output, such as `head`, may stop early.
        written = None
        if output is not None or not json:
            beside = next(folder for folder in dirs if folder.is_dir())
            written = write_files(built, output or beside, csv)
        elif csv is not None:
            write_csv(built, csv)
        if json:
            whole = plain if regressions is None else {**plain, "regressions": finite(regressions.to_plain())}
            print_json(whole, allow_nan=False)
        else:
            console = TextConsole()
            print_report(built, console)
            if regressions is not None:
                print_regressions(regressions, console)
        if written is not None:
            page, table = written
            echo(f"report: {page} and {table}", err=json)
    raise typer.Exit(1 if regressions is not None and regressions.is_worse else 0)


def predict(
    run_dir: RunDir,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks; by default as many as trained.")] = None,
    link: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate of each rank's link, such as 25gbit; by default the run's.")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, help="Batches to accumulate for a step; by default as many as the run did.")
    ] = None,
    comm_hook: Annotated[
        list[str] | None,
        typer.Option(help="Name of a compressor; may be given several times. By default the recommended ones."),
    ] = None,
    json: Json = False,
) -> None:
    """Predicts the time of a step under other plans, and on machines that you do not have, from the records of a run.

    Exit status 2 for mistakes in the arguments, or if RUN_DIR does not show enough.
    """
    from lightning_commopt.commands.predict.outlook import outlook

    with errors_in_a_line():
        run_dir = _with_steps(run_dir, PREDICTION_FILE)
        predicted = outlook(run_dir, num_ranks=ranks, link=link, num_batches=accumulate, comm_hooks=comm_hook)
        echo_notices(run_dir)
    if json:
        print_json(predicted.to_plain())
    else:
        TextConsole().print(predicted.table())
