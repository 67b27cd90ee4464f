"""What `gpu.py` runs, in order of value: programs, and how rows are made of what they write."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_ranks import Place
from gpu_rows import (
    Row,
    fault_rows,
    kernel_rows,
    known_memory,
    measuring_rows,
    profiler_rows,
    row,
    selftest_rows,
    strategy_rows,
)

Reader = Callable[[dict[str, Any]], Iterator[Row]]

_HERE = Path(__file__).parent
_COMMOPT = ("-c", "from lightning_commopt.commands.app import app; app()")
FITS = ("ddp_32", "ddp_bf16", "accumulation", "clipping", "unused", "fp16", "fsdp_32", "compressors_32")
MORE_FITS = (
    *("resume", "auto", "fsdp_bf16", "compile", "diloco_32", "diloco_fp16", "callbacks", "compressors_bf16"),
    "fsdp_bf16_true",
)
FEW_FITS, FEW_MORE_FITS = ("ddp_32", "accumulation", "fsdp_32"), ("resume",)
PLANS = ("no_sync", "ddp", "int8", "int4", "powersgd", "alternating", "torch_powersgd", "bf16", "torch_bf16")
FEW_PLANS = ("ddp", "int8")
RATES = {"10gbit": "10 Gbit/s", "none": "without a limit", "1gbit": "1 Gbit/s", "25gbit": "25 Gbit/s"}
AUTO_RATE = "10gbit"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What parts depend on.

    Attributes:
        place: where ranks run.
        folder: for the files of scripts.
        suffix: of their names.
        why_no_lab: why there is no network lab; None where there is one.
    """

    place: Place
    folder: Path
    suffix: str
    why_no_lab: str | None

    @property
    def is_dry(self) -> bool:
        return self.place.device == "cpu"

    def file(self, name: str) -> Path:
        """Returns the file for a script's own result."""
        return self.folder / f"{name}_{'dry_run_' if self.is_dry else ''}{self.suffix}.json"


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of a part. It prints rows, or writes a file of which rows are made.

    Attributes:
        name: of it, for the row that says how it failed.
        arguments: of Python; ``{limit_s}`` becomes the seconds that it has.
        share: of the part's time, in relation to the programs after it.
        least_s: below which it is not run.
        output: its file.
        read: makes rows of that.
    """

    name: str
    arguments: Sequence[str]
    share: float = 1.0
    least_s: float = 0.0
    output: Path | None = None
    read: Reader | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """One subject.

    Attributes:
        title: in tables.
        limit_s: of 600 s in all; parts shrink and grow with the limit of all.
        least_s: below which it is not run: on one H200 its programs need up to 15 s until they train.
        is_timed: what it finds depends on how fast it runs, so that nothing may run beside it.
        programs: what it runs.
        notes: rows on what it cannot run here.
        known: rows that other parts have measured already; then nothing is run.
    """

    title: str
    limit_s: float
    least_s: float
    is_timed: bool = True
    programs: Callable[[Setting], list[Program]]
    notes: Callable[[Setting], list[Row]] = field(default=lambda setting: [])
    known: Callable[[Mapping[str, Any]], list[Row]] = field(default=lambda parts: [])


def _script(setting: Setting, name: str, script: str, *options: str, read: Reader, share: float = 1.0) -> Program:
    """Returns a program of this folder that writes a file."""
    output = setting.file(name)
    arguments = (str(_HERE / script), *options, "--output", str(output))
    return Program(name=name, arguments=arguments, output=output, read=read, share=share)


def _on_ranks(
    setting: Setting,
    name: str,
    script: str,
    cases: Sequence[str],
    *options: str,
    rate: str | None = None,
    share: float = 1.0,
    least_s: float = 0.0,
) -> Program:
    """Returns a program whose ranks do cases."""
    place = setting.place
    arguments = (
        *(str(_HERE / "gpu_ranks.py"), *place.options, "--num-ranks", str(place.num_ranks)),
        *("--limit-s", "{limit_s}", *(["--rate", rate] if rate else []), "--cases", ",".join(cases)),
        *("--", str(_HERE / script), *options),
    )
    return Program(name=name, arguments=arguments, share=share, least_s=least_s)


def _selftest(setting: Setting, *, is_full: bool = False) -> list[Program]:
    if setting.is_dry:
        return []
    output = setting.file("selftest_full" if is_full else "selftest")
    options = ["--full"] if is_full else []
    arguments = (*_COMMOPT, "selftest", *options, "--device", setting.place.device, "--output", str(output))
    return [Program(name="commopt selftest", arguments=arguments, output=output, read=selftest_rows)]


def _selftest_by_itself(setting: Setting) -> list[Row]:
    if not setting.is_dry:
        return []
    return [row("all checks", "a dry run leaves them to commopt selftest --device cpu", "not run")]


def _fits(setting: Setting, *, cases: Sequence[str], few: Sequence[str]) -> list[Program]:
    options = ("--num-steps", "6" if setting.is_dry else "30")
    return [_on_ranks(setting, "fits", "gpu_fits.py", few if setting.is_dry else cases, *options)]


_TINY_LADDER = ("--model", "plain_vit_tiny", "--batch-size", "2", "--turn-s", "0.1")


def _ladder(setting: Setting) -> list[Program]:
    is_lab = setting.why_no_lab is None
    rates = {rate: link for rate, link in RATES.items() if rate == "none" or is_lab}
    least_s = {"10gbit": 40, "none": 35, "1gbit": 60, "25gbit": 35}  # one turn, after the start of the ranks
    if setting.is_dry:
        rates = dict(list(rates.items())[:1])
    options = (*_TINY_LADDER, "--num-turns", "1") if setting.is_dry else ("--num-turns", "2")
    return [
        _on_ranks(
            setting,
            f"ladder, {link}",
            "gpu_ladder.py",
            FEW_PLANS if setting.is_dry else PLANS,
            *options,
            *("--link", link),
            rate=None if rate == "none" else rate,
            share=least_s[rate],
            least_s=0 if setting.is_dry else least_s[rate],
        )
        for rate, link in rates.items()
    ]


def _no_lab(setting: Setting) -> list[Row]:
    if setting.why_no_lab is None:
        return []
    return [row(link, setting.why_no_lab, "not run") for rate, link in RATES.items() if rate != "none"]


def _kernels(setting: Setting) -> list[Program]:
    sizes: tuple[str, ...] = ("--model", "plain_vit_l_32", "--num-turns", "15")
    if setting.is_dry:
        sizes = ("--model", "plain_vit_tiny", "--num-turns", "2", "--plans", "torch bf16", "bf16", "int8")
    options = ("--device", setting.place.device, "--world-size", str(setting.place.num_ranks), *sizes)
    return [_script(setting, "compressor_cost", "compressor_cost.py", *options, read=kernel_rows)]


def _ranks_options(setting: Setting) -> tuple[str, ...]:
    return *setting.place.options, "--num-ranks", str(setting.place.num_ranks)


def _profiler(setting: Setting) -> list[Program]:
    sizes = ("--num-turns", "1", "--num-steps", "5" if setting.is_dry else "20")
    return [
        _script(
            setting,
            f"comm_time_against_profiler_{strategy}",
            "comm_time_against_profiler.py",
            *(*_ranks_options(setting), *sizes, "--strategy", strategy),
            read=profiler_rows,
        )
        for strategy in (["ddp"] if setting.is_dry else ["ddp", "fsdp2"])
    ]


def _overhead(setting: Setting) -> list[Program]:
    is_dry = setting.is_dry
    pair = ("--num-turns", "1", "--num-steps", "3") if is_dry else ("--num-turns", "6", "--num-steps", "25")
    blocks = ("--num-turns", "1", "--num-steps", "8") if is_dry else ("--num-turns", "12")
    others = ("--num-peer-turns", "0", "--num-sharded-layers", "0", "--num-host-steps", "6" if is_dry else "100")
    return [
        _script(
            setting,
            "measuring_overhead",
            "measuring_overhead.py",
            *(*_ranks_options(setting), *blocks, *others),
            read=measuring_rows,
        ),
        _script(
            setting,
            "strategy_overhead",
            "strategy_overhead.py",
            *(*setting.place.options, *pair, "--pairs", "two_ranks"),
            read=strategy_rows,
        ),
    ]


def _auto(setting: Setting) -> list[Program]:
    is_lab = setting.why_no_lab is None and not setting.is_dry
    options: tuple[str, ...] = ("--model", "plain_vit_small", "--num-fit-steps", "100", "--num-rounds", "2")
    if setting.is_dry:
        options = ("--model", "plain_vit_tiny", "--num-fit-steps", "12", "--num-rounds", "1", "--num-caps", "1")
    link = RATES[AUTO_RATE] if is_lab else RATES["none"]
    rate = AUTO_RATE if is_lab else None
    return [_on_ranks(setting, f"a plan, {link}", "gpu_auto.py", ["search"], *options, "--link", link, rate=rate)]


def _faults(setting: Setting) -> list[Program]:
    place = setting.place
    faults = "exception" if setting.is_dry else "stopped,exception,worker"
    options = (*place.options, "--num-runs", "1", "--faults", faults, "--strategy", "commopt", "--num-at-once", "3")
    return [_script(setting, "hangs", "hangs.py", *options, "--wait-s", "30", read=fault_rows)]


def _memory(setting: Setting) -> list[Program]:
    options = _TINY_LADDER if setting.is_dry else ("--turn-s", "0.1")
    plans = FEW_PLANS if setting.is_dry else PLANS
    end = ("--num-turns", "1", "--link", "peak memory")
    return [_on_ranks(setting, "memory", "gpu_ladder.py", plans, *options, *end)]


_FITS, _MORE_FITS = (
    functools.partial(_fits, cases=cases, few=few) for cases, few in ((FITS, FEW_FITS), (MORE_FITS, FEW_MORE_FITS))
)
PARTS: dict[str, Part] = {
    "selftest": Part(
        title="selftest", limit_s=120, least_s=90, is_timed=False, programs=_selftest, notes=_selftest_by_itself
    ),
    "parity": Part(title="parity", limit_s=140, least_s=100, is_timed=False, programs=_FITS),
    "more_parity": Part(title="parity, more", limit_s=140, least_s=100, is_timed=False, programs=_MORE_FITS),
    "faults": Part(title="faults", limit_s=80, least_s=60, is_timed=False, programs=_faults),
    "profiler": Part(title="CommTimeMonitor", limit_s=80, least_s=70, programs=_profiler),
    "ladder": Part(title="ladder of plans", limit_s=170, least_s=70, programs=_ladder, notes=_no_lab),
    "kernels": Part(title="kernels", limit_s=35, least_s=30, programs=_kernels),
    "auto": Part(title='plan="auto"', limit_s=70, least_s=60, programs=_auto),
    "overhead": Part(title="overhead", limit_s=80, least_s=80, programs=_overhead),
    "memory": Part(title="memory", limit_s=20, least_s=20, programs=_memory, known=known_memory),
    "selftest_full": Part(
        title="selftest --full",
        limit_s=330,
        least_s=100,
        programs=functools.partial(_selftest, is_full=True),
        notes=_selftest_by_itself,
    ),
}
"""The most valuable ones first."""


def command_of(program: Program, limit_s: float) -> list[str]:
    """Returns the command of a program that has so many seconds."""
    return [sys.executable, *(word.replace("{limit_s}", f"{limit_s:.0f}") for word in program.arguments)]
