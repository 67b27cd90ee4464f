"""Short names of settings for people: "bf16, 100 MB buckets, 4 ranks"."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

OFF = ("null", "none", "false", "")
"""Values that leave an option unused, in lower case."""

_RANKS = ("ranks", "trainer.devices", "world_size")
_COMM_HOOK = ("strategy/comm_hook", "commopt", "strategy.comm_hook", "strategy.comm_hook.name", "plan")
_PREFIXES = ("trainer.strategy.comm_hook.", "strategy.comm_hook.", "comm_hook.", "trainer.strategy.", "strategy.")

_OF_PLAN = ("ranks", "variant", "method", "comm_hook")

_SPELLED = {
    "none": "uncompressed",
    "powersgd": "PowerSGD",
    "alternating_powersgd": "alternating PowerSGD",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "commopt": "CommOptDDP",
    "single": "one process",
    "ddp_one_process": "DDP on one process",
    "DDPStrategy": "Lightning's DDP",
    "FSDPStrategy": "Lightning's FSDP",
    "ModelParallelStrategy": "Lightning's FSDP2",
    "SingleDeviceStrategy": "one process",
}
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")


def canonical(name: str) -> str:
    """Returns the one name of an option that can be set under several names.

    >>> canonical("trainer.devices"), canonical("commopt"), canonical("trainer.strategy.bucket_cap_mb")
    ('ranks', 'comm_hook', 'bucket_cap_mb')
    """
    if name in _RANKS:
        return "ranks"
    if name in _COMM_HOOK:
        return "comm_hook"
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def is_ranks(name: str) -> bool:
    """Returns whether an override says how many ranks there are, apart from nodes."""
    return canonical(name) == "ranks"


def is_of_plan(name: str, plan_options: Collection[str]) -> bool:
    """Returns whether an override says how gradients travel, or between how many ranks, and nothing else.

    Args:
        name: of the override.
        plan_options: that the plans in question have set.
    """
    is_of_hook = "comm_hook." in name and "ddp_comm_hook" not in name
    return is_of_hook or canonical(name) in (*_OF_PLAN, *plan_options)


def display_name(value: str) -> str:
    """Returns how people write the name of a plan or an option.

    >>> display_name("alternating_powersgd"), display_name("one_bucket"), display_name("powersgd_rank_8")
    ('alternating PowerSGD', 'one bucket', 'PowerSGD rank 8')
    """
    return _SPELLED.get(value) or re.sub(r"\bpowersgd\b", "PowerSGD", value.replace("_", " "))


def setting_name(values: Mapping[str, str]) -> tuple[str, str]:
    """Returns the name of a setting, and a longer one that names also what is off.

    Args:
        values: of overrides by name, only those that the name shall show.
    """
    ordered = sorted(values.items(), key=lambda item: _place(canonical(item[0])))
    texts = [(_text(canonical(name), value), f"{name}={value}") for name, value in ordered]
    short = ", ".join(dict.fromkeys(text for (text, _), _ in texts if text))
    long = ", ".join(dict.fromkeys(text or text_if_off or override for (text, text_if_off), override in texts))
    return short or long, long


def distinct_name(values: Mapping[str, str], others: Sequence[Mapping[str, str]], sync_method: str) -> str:
    """Returns what tells a setting from others; the name of its plan where nothing does.

    Args:
        values: of its overrides by name, only those that the name may show.
        others: those of the other settings; its own may be among them.
        sync_method: short name of how its gradients travel.
    """
    shown = {name: value for name, value in values.items() if any(other.get(name) != value for other in others)}
    return (setting_name(shown)[0] if shown else "") or display_name(sync_method)


class _Option(NamedTuple):
    """How a name shows an option.

    Attributes:
        text: for a value, which stands for ``{}``.
        text_if_off: where it is off, and the name would otherwise be empty or not unique.
        off: values that leave it unused.
    """

    text: str | Callable[[str], str]
    text_if_off: str = ""
    off: tuple[str, ...] = OFF


def _text(name: str, value: str) -> tuple[str, str]:
    """Returns how an option is shown, and how if it must be though it is off."""
    spaced = name.replace("_", " ")
    option = _OPTIONS.get(name, _Option(lambda value: f"{spaced} {display_name(value)}", f"no {spaced}"))
    if value.lower() in option.off:
        return "", option.text_if_off
    if name not in _OPTIONS and value.lower() == "true":
        return spaced, ""
    return (option.text.format(value) if isinstance(option.text, str) else option.text(value)), ""


def _place(name: str) -> float:
    names = list(_OPTIONS)
    return names.index(name) if name in _OPTIONS else names.index("link") - 0.5


def _number_of(thing: str) -> Callable[[str], str]:
    return lambda value: f"{value} {thing}" if value == "1" else f"{value} {thing}s"


def _bucket_cap(value: str) -> str:
    if value in OFF:
        return "default buckets"
    if value.startswith("["):
        return f"buckets of {value.strip('[]').replace(',', ', ').replace('  ', ' ')} MB"
    return f"{value.removesuffix('.0')} MB buckets"


def _link(value: str) -> str:
    rate = _RATE.fullmatch(value.lower())
    return f"{rate[1]} {rate[2].replace('m', 'M').replace('g', 'G')}bit/s" if rate else value


_CHOICE = _Option(display_name, "none", off=("null", ""))
_OPTIONS = {  # in the order of a name's parts; all others come before the link
    **dict.fromkeys(("experiment", "model", "model.size", "data", "variant", "method", "strategy"), _CHOICE),
    "comm_hook": _Option(lambda value: display_name("none" if value in OFF else value), off=()),
    "matrix_rank": _Option("matrix rank {}", off=()),
    "bucket_cap_mb": _Option(_bucket_cap, off=()),
    "static_graph": _Option("static graph", "no static graph"),
    "gradient_as_bucket_view": _Option("bucket view", "no bucket view"),
    "trainer.accumulate_grad_batches": _Option("accumulate {}", "no accumulation", off=("1",)),
    "model.activation_checkpointing": _Option("activation checkpointing", "no activation checkpointing"),
    "data.batch_size": _Option("batch {}", off=()),
    "link": _Option(_link, "no link"),
    "hosts": _Option(_number_of("host"), "default hosts"),
    "trainer.num_nodes": _Option(_number_of("node"), off=()),
    "ranks": _Option(_number_of("rank"), off=()),
}
