"""Makes short names of settings for people, such as "bf16, 100 MiB buckets, 4 ranks"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lightning_commopt.measure.runs.settings import Value, text_of
from lightning_commopt.report.choices import canonical, is_off
from lightning_commopt.report.model import Run

_MAX_NAMES = 3
_SPELLED = {
    "none": "uncompressed",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "commopt": "CommOptDDP",
    "commopt_fsdp": "CommOptModelParallel",
    "commopt_fsdp_int8": "CommOptModelParallel, int8",
    "diloco": "DiLoCo",
    "local_sgd": "DiLoCo, mean of weights",
    "single": "one process",
    "ddp_one_process": "DDP on one process",
    "DDPStrategy": "Lightning's DDP",
    "FSDPStrategy": "Lightning's FSDP",
    "ModelParallelStrategy": "Lightning's FSDP2",
    "SingleDeviceStrategy": "one process",
}


def display_name(value: str) -> str:
    """Returns the usual spelling of a plan or an option.

    >>> display_name("alternating_powersgd"), display_name("one_bucket"), display_name("powersgd_rank_8")
    ('alternating PowerSGD', 'one bucket', 'PowerSGD rank 8')
    """
    spaced = value.replace("_", " ")
    return _SPELLED.get(value) or re.sub(r"\bpowersgd\b", "PowerSGD", re.sub(r"^diloco\b", "DiLoCo", spaced))


def setting_name(values: Mapping[str, Value], *, shows_off: bool = False) -> str:
    """Returns the name of a setting, with its disabled options if ``shows_off``, or if it would be empty."""
    texts = [
        _text(canonical(name), value, shows_off) or (f"{name}={text_of(value)}" if shows_off else "")
        for name, value in sorted(values.items(), key=lambda item: _position(canonical(item[0])))
    ]
    joined = ", ".join(dict.fromkeys(filter(None, texts)))
    return joined if joined or shows_off else setting_name(values, shows_off=True)


def distinct_name(values: Mapping[str, Value], others: Sequence[Mapping[str, Value]], sync_method: str) -> str:
    """Returns a name from the values that differ from another setting's, or else from the sync method."""
    shown = {name: value for name, value in values.items() if any(other.get(name) != value for other in others)}
    return (setting_name(shown) if shown else "") or display_name(sync_method)


def link_of(run: Run) -> str | None:
    """Returns the rate of the links between the hosts of a run, in words; None without such links."""
    link = run.settings.get("link")
    return None if link is None else setting_name({"link": link}) or None


def in_quotes(name: str) -> str:
    """Returns a setting's name in quotes for a sentence, as the name may have commas."""
    return f'"{name}"'


def join_names(names: Sequence[str]) -> str:
    """Returns the first few names, and the number of the others.

    >>> join_names(["a", "b"]), join_names(["a", "b", "c", "d", "e"])
    ('"a" and "b"', '"a", "b" and 3 more')
    """
    shown = [in_quotes(name) for name in (names if len(names) <= _MAX_NAMES else names[: _MAX_NAMES - 1])]
    if len(shown) < len(names):
        return f"{', '.join(shown)} and {len(names) - len(shown)} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


class _Option(NamedTuple):
    text: Callable[[Value], str] | str  # a function, or words around the value
    text_if_off: str = ""
    is_off: Callable[[Value], bool] | None = is_off


def _text(name: str, value: Value, shows_off: bool) -> str:
    spaced = name.replace("_", " ")
    switch = _Option(lambda value: spaced if value is True else f"{spaced} {_spelled(value)}", f"no {spaced}")
    option = _OPTIONS.get(name, switch)
    if option.is_off is not None and option.is_off(value):
        return option.text_if_off if shows_off else ""
    return option.text.format(text_of(value)) if isinstance(option.text, str) else option.text(value)


def _position(name: str) -> float:
    names = list(_OPTIONS)
    return names.index(name) if name in _OPTIONS else names.index("link") - 0.5


def _spelled(value: Value) -> str:
    return display_name(text_of(value))


def _count_of(noun: str) -> Callable[[Value], str]:
    return lambda value: f"{text_of(value)} {noun}{'' if value == 1 else 's'}"


def _bucket_cap(value: Value) -> str:
    if is_off(value):
        return "default buckets"
    if isinstance(value, tuple):
        return f"buckets of {', '.join(map(text_of, value))} MiB"
    return f"{text_of(value)} MiB buckets"


def _link(value: Value) -> str:
    rate = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text_of(value).lower())
    return f"{rate[1]} {rate[2].replace('m', 'M').replace('g', 'G')}bit/s" if rate else text_of(value)


_CHOICE = _Option(_spelled, "none", lambda value: value in (None, ""))
# A name lists its options in this order. Options that are unknown here come before the link.
_OPTIONS = {
    **dict.fromkeys(("experiment", "model", "model.size", "data", "variant", "method", "strategy"), _CHOICE),
    "comm_hook": _Option(lambda value: display_name("none") if is_off(value) else _spelled(value), is_off=None),
    "matrix_rank": _Option("matrix rank {}", is_off=None),
    "bucket_cap_mb": _Option(_bucket_cap, is_off=None),
    "static_graph": _Option("static graph", "no static graph"),
    "gradient_as_bucket_view": _Option("bucket view", "no bucket view"),
    "param_hook": _Option("{} parameters", "uncompressed parameters"),
    "accumulate_grads": _Option("accumulate {}"),
    "separate_reduce_scatter_group": _Option("separate reduce-scatter group", "one reduce-scatter group"),
    "reduce_scatter_max_input_buffers": _Option("{} input buffers", "default input buffers"),
    "trainer.accumulate_grad_batches": _Option("accumulate {}", "no accumulation", lambda n: n in (None, 1)),
    "model.activation_checkpointing": _Option("activation checkpointing", "no activation checkpointing"),
    "data.batch_size": _Option("batch {}", is_off=None),
    "sync_every": _Option("exchange every {} steps", is_off=None),
    "fragments": _Option(_count_of("fragment"), is_off=None),
    "fragment_by": _Option("fragments by {}"),
    "overlap": _Option("overlap {}", "no overlap", lambda steps: steps in (None, 0)),
    "mixing": _Option("mixing {}", "default mixing"),
    "outer_lr": _Option("outer lr {}", is_off=None),
    "outer_momentum": _Option("outer momentum {}", is_off=None),
    "nesterov": _Option("Nesterov", "no Nesterov"),
    "eval_weights": _Option("{} weights in validation"),
    "inner": _Option(lambda value: f"{_spelled(value)} within nodes", "no nodes"),
    "link": _Option(_link, "no link"),
    "hosts": _Option(_count_of("host"), "default hosts"),
    "trainer.num_nodes": _Option(_count_of("node"), is_off=None),
    "ranks": _Option(_count_of("rank"), is_off=None),
}
