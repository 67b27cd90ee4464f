"""The command ``commopt bench``: parses, calls and prints."""

import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_commopt.commands.errors import check_outputs, echo, echo_notices, print_json
from lightning_commopt.text.terminal import TextConsole, print_text

if TYPE_CHECKING:
    from commopt_diagnose.bench.model import LinkModel
    from commopt_diagnose.bench.result import BenchResult

_NAMES = (
    "all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, send_recv;"
    " reduce_broadcast and reduce_scatter_all_gather, two other ways to all_reduce; or all"
)

# Panels of the help.
_SIZES = "Sizes"
_WHAT_IS_MEASURED = "What is measured"
_HOW_OFTEN = "How often"
_WHERE = "Where"
_RESULTS = "Results"


def bench(
    collectives: Annotated[
        list[str] | None, typer.Argument(metavar="COLLECTIVE...", help=f"By default all_reduce. {_NAMES}.")
    ] = None,
    minbytes: Annotated[
        str, typer.Option("-b", "--minbytes", help="Smallest message, such as 8 or 64K.", rich_help_panel=_SIZES)
    ] = "8",
    maxbytes: Annotated[
        str, typer.Option("-e", "--maxbytes", help="Largest message, such as 1G.", rich_help_panel=_SIZES)
    ] = "64M",
    stepfactor: Annotated[
        float, typer.Option("-f", "--stepfactor", help="Factor from one size to the next.", rich_help_panel=_SIZES)
    ] = 2,
    stepbytes: Annotated[
        str | None,
        typer.Option("-i", "--stepbytes", help="Add this to a size instead of multiplying it.", rich_help_panel=_SIZES),
    ] = None,
    datatype: Annotated[
        str,
        typer.Option("-d", "--datatype", help="One or several, as float,bfloat16.", rich_help_panel=_WHAT_IS_MEASURED),
    ] = "float",
    op: Annotated[
        str,
        typer.Option("-o", "--op", help="How to reduce: sum, min, max, or several.", rich_help_panel=_WHAT_IS_MEASURED),
    ] = "sum",
    root: Annotated[
        int,
        typer.Option(
            "-r", "--root", min=0, help="Root rank of broadcast and reduce.", rich_help_panel=_WHAT_IS_MEASURED
        ),
    ] = 0,
    iters: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--iters",
            min=1,
            help="Calls in a repetition; by default as many as last 0.1 s.",
            rich_help_panel=_HOW_OFTEN,
        ),
    ] = None,
    warmup_iters: Annotated[
        int, typer.Option("-w", "--warmup_iters", min=1, help="Calls before the first one.", rich_help_panel=_HOW_OFTEN)
    ] = 2,
    check: Annotated[
        int, typer.Option("-c", "--check", min=0, max=1, help="0 to check no results.", rich_help_panel=_HOW_OFTEN)
    ] = 1,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Repetitions of each case, round-robin.", rich_help_panel=_HOW_OFTEN)
    ] = 7,
    place: Annotated[
        str, typer.Option(help="in, out or both: in place, out of place.", rich_help_panel=_WHAT_IS_MEASURED)
    ] = "in",
    comm_hook: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure a comm hook too, by name or as JSON with options; repeatable.",
            rich_help_panel=_WHAT_IS_MEASURED,
        ),
    ] = None,
    under_compute: Annotated[
        bool, typer.Option(help="Measure again while matrix products run.", rich_help_panel=_WHAT_IS_MEASURED)
    ] = False,
    scopes: Annotated[
        str,
        typer.Option(
            help="all, node (ranks of each node among themselves), across (nodes); or several.",
            rich_help_panel=_WHAT_IS_MEASURED,
        ),
    ] = "all",
    device: Annotated[
        str, typer.Option(help="cpu (gloo), cuda (NCCL), or auto: CUDA with two devices.", rich_help_panel=_WHERE)
    ] = "auto",
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks on each host; by default one per GPU, 2 on CPU, 1 in the lab.", rich_help_panel=_WHERE
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="In the network lab, such as 1gbit: the rate of each host.", rich_help_panel=_WHERE
        ),
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(min=1, help="In the lab: how many hosts; by default 2.", rich_help_panel=_WHERE)
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.", rich_help_panel=_RESULTS)
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the result as JSON to this file.", rich_help_panel=_RESULTS)
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write a row for each case to this file.", rich_help_panel=_RESULTS)
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Write charts and numbers as a page to this file, *.html.", rich_help_panel=_RESULTS),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Write the link model to this file, as JSON.", rich_help_panel=_RESULTS)
    ] = None,
    predict: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES", help="Predict how long messages take, such as 25M,100M.", rich_help_panel=_RESULTS
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure the messages of a plan, as CommPlan.save writes it.",
            rich_help_panel=_WHAT_IS_MEASURED,
        ),
    ] = None,
    buckets_of: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="With --plan: the buckets of this run, to the byte.",
            rich_help_panel=_WHAT_IS_MEASURED,
        ),
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure nothing: read the result of --output, or a link model.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR", help="Measure nothing: read the buckets of a training run.", rich_help_panel=_RESULTS
        ),
    ] = None,
) -> None:
    """Measures collectives and comm hooks by size; starts its ranks, or runs under torchrun or srun.

    Exit status 1 if a result is wrong or a rank fails, 2 for mistakes in the arguments.
    """
    from commopt_diagnose.bench.model import MODEL_KIND, LinkModel
    from commopt_diagnose.bench.result import BenchResult, kind_of
    from commopt_diagnose.bench.settings import (
        COLLECTIVES,
        PLACES,
        BenchSettings,
        check_predicted,
        parse_size,
        sizes_between,
    )

    check_outputs(output, csv, page, model)
    if load is not None and from_run is not None:
        raise ValueError(f"--load {load} and --from-run {from_run} are two sources: give one of them")
    predicted = [parse_size("--predict", size) for size in predict.split(",")] if predict else []
    if load is not None and kind_of(load) == MODEL_KIND:
        if (output, csv, page, model) != (None,) * 4:
            raise ValueError(f"{load} is a link model: --output, --csv, --page and --model need the times of a bench")
        loaded = LinkModel.load(load)
        check_predicted(predicted, {spread.size_bytes for curve in loaded.curves for spread in curve.spreads})
        _show(loaded, json, predicted)
        return
    result: BenchResult | None = None
    if load is not None:
        result = BenchResult.load(load)
    elif from_run is not None:
        from commopt_diagnose.bench.run_result import result_of_run

        result = result_of_run(from_run)
        echo_notices(from_run)
    if result is not None:
        check_predicted(predicted, {row.case.size_bytes for row in result.measured})
    else:
        sizes_bytes = sizes_between(
            parse_size("-b", minbytes),
            parse_size("-e", maxbytes),
            factor=stepfactor,
            step_bytes=None if stepbytes is None else parse_size("-i", stepbytes),
        )
        hooks = [_parse_hook(text) for text in comm_hook or ()]
        if plan is not None:
            from commopt_diagnose.bench.cases import messages_of
            from lightning_commopt.plan import CommPlan

            sizes_bytes, own = messages_of(CommPlan.load(plan), buckets_of)
            hooks = own + hooks
        elif buckets_of is not None:
            raise ValueError(f"--buckets-of {buckets_of} needs --plan, the plan of that run")
        check_predicted(predicted, sizes_bytes)
        settings = BenchSettings(
            collectives=COLLECTIVES if collectives == ["all"] else collectives or ["all_reduce"],
            sizes_bytes=sizes_bytes,
            dtypes=datatype.split(","),
            redops=op.split(","),
            places=PLACES if place == "both" else place.split(","),
            comm_hooks=hooks,
            loads=("idle", "compute") if under_compute else ("idle",),
            scopes=scopes.split(","),
            root=root,
            num_iters=iters,
            num_warmups=warmup_iters,
            num_repetitions=repetitions,
            is_checked=bool(check),
        )
        from commopt_diagnose.bench.run import run_bench

        result = run_bench(settings, device=device, ranks_per_host=nproc_per_node, link=link, num_hosts=hosts)
    if result is None:  # another rank prints
        return
    _show(result, json, predicted)
    _write(result, output, csv, page, model)
    raise typer.Exit(1 if result.num_wrong or not result.measured else 0)


def _show(shown: "BenchResult | LinkModel", json: bool, sizes_bytes: Sequence[int]) -> None:
    """Prints a result with the link model of it, or a link model alone."""
    from commopt_diagnose.bench.model import LinkModel
    from commopt_diagnose.bench.terminal import condition_lines, model_lines, predictions, print_bench

    model = shown if isinstance(shown, LinkModel) else LinkModel.fit(shown) if shown.measured else None
    if json:
        predicted = predictions(model, sizes_bytes) if model else []
        print_json({**shown.to_plain(), "predictions": predicted})
        return
    console = TextConsole()
    if isinstance(shown, LinkModel):
        for condition in condition_lines(shown.where):
            print_text(f"# {condition}", console)
    else:
        print_bench(shown, console)
    for line in model_lines(model, sizes_bytes) if model else ():
        print_text(line, console)


def _write(result: "BenchResult", output: Path | None, csv: Path | None, page: Path | None, model: Path | None) -> None:
    from commopt_diagnose.bench.model import LinkModel

    if output is not None:
        result.save(output)
    if csv is not None:
        result.write_csv(csv)
    if model is not None and not result.measured:
        echo(f"commopt: {model} is not written: no case was measured", err=True)
        model = None
    elif model is not None:
        LinkModel.fit(result).save(model)
    if page is not None:
        # Imports jinja2, which takes time.
        from commopt_diagnose.bench.page import write_bench_page

        write_bench_page(result, page)
    written = [str(path) for path in (output, csv, page, model) if path is not None]
    if written:
        echo(f"written to {', '.join(written)}", err=True)


def _parse_hook(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json_text.loads(text)
    except json_text.JSONDecodeError as error:
        raise ValueError(f"--comm-hook is not JSON: {error.msg} in {text!r}") from None
