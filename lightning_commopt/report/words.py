"""Short names of settings for people: "bf16, 100 MB buckets, 4 ranks"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

OFF = ("null", "none", "false", "")
"""Values that leave an option unused, in lower case."""

_RANKS = ("ranks", "trainer.devices", "world_size")
_COMM_HOOK = ("strategy/comm_hook", "commopt", "strategy.comm_hook", "strategy.comm_hook.name", "plan")
_PREFIXES = ("trainer.strategy.comm_hook.", "strategy.comm_hook.", "comm_hook.", "trainer.strategy.", "strategy.")

PLAN_OPTIONS = (
    *("static_graph", "gradient_as_bucket_view", "bucket_cap_mb", "find_unused_parameters", "comm_hook"),
    *("broadcast_buffers", "forward_sync_buffers", "init_sync", "skip_all_reduce_unused_params"),
    *("batched_grad_copy", "lazy_bucket_allocation"),
)
"""Of a `CommPlan`, which cannot be asked for them here: it imports torch."""

_OF_PLAN = ("ranks", "variant", "method", *PLAN_OPTIONS)

_SPELLED = {
    "none": "uncompressed",
    "powersgd": "PowerSGD",
    "alternating_powersgd": "alternating PowerSGD",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "commopt": "CommOptDDP",
    "single": "one process",
    "naive": "naive",
    "ddp_one_process": "DDP on one process",
    "bucket_view": "bucket view",
    "DDPStrategy": "Lightning's DDP",
    "FSDPStrategy": "Lightning's FSDP",
    "ModelParallelStrategy": "Lightning's FSDP2",
    "SingleDeviceStrategy": "one process",
}
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")


class Words(NamedTuple):
    """How a value is written.

    Attributes:
        said: text for the name.
        fallback: text for the name only where it would otherwise be empty or not unique.
    """

    said: str
    fallback: str = ""


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


def is_of_plan(name: str) -> bool:
    """Returns whether an override says how gradients travel, or between how many ranks, and nothing else."""
    is_of_hook = "comm_hook." in name and "ddp_comm_hook" not in name
    return is_of_hook or canonical(name) in _OF_PLAN


def spelled(value: str) -> str:
    """Returns how people write the name of a plan or an option.

    >>> spelled("alternating_powersgd"), spelled("one_bucket"), spelled("powersgd_rank_8")
    ('alternating PowerSGD', 'one bucket', 'PowerSGD rank 8')
    """
    return _SPELLED.get(value) or re.sub(r"\bpowersgd\b", "PowerSGD", value.replace("_", " "))


def setting_name(values: Mapping[str, str]) -> tuple[str, str]:
    """Returns the name of a setting, and a longer one that says everything.

    Args:
        values: of overrides by name, only those that the name shall show.
    """
    ordered = sorted(values.items(), key=lambda item: _place(canonical(item[0])))
    words = [(_words(canonical(name), value), name, value) for name, value in ordered]
    short = ", ".join(dict.fromkeys(each.said for each, _, _ in words if each.said))
    long = ", ".join(dict.fromkeys(each.said or each.fallback or f"{name}={value}" for each, name, value in words))
    return short or long, long


def distinct_name(values: Mapping[str, str], others: Sequence[Mapping[str, str]], sync_method: str) -> str:
    """Returns what tells a setting from others; the name of its plan where nothing does.

    Args:
        values: of its overrides by name, only those that the name may show.
        others: those of the other settings; its own may be among them.
        sync_method: short name of how its gradients travel.
    """
    shown = {name: value for name, value in values.items() if any(other.get(name) != value for other in others)}
    return (setting_name(shown)[0] if shown else "") or spelled(sync_method)


def _words(option: str, value: str) -> Words:
    if option in _SAID:
        return _SAID[option](value)
    name = option.replace("_", " ")
    if value.lower() == "true":
        return Words(name)
    return Words("", f"no {name}") if value.lower() in OFF else Words(f"{name} {spelled(value)}")


def _place(option: str) -> int:
    if option in _ORDER:
        return _ORDER.index(option)
    return _ORDER.index("...")


def _number_of(singular: str, plural: str) -> Callable[[str], Words]:
    def words(value: str) -> Words:
        return Words(f"1 {singular}" if value == "1" else f"{value} {plural}")

    return words


def _switch(name: str) -> Callable[[str], Words]:
    def words(value: str) -> Words:
        return Words("", f"no {name}") if value.lower() in OFF else Words(name)

    return words


def _choice(value: str) -> Words:
    return Words("", "none") if value in ("null", "") else Words(spelled(value))


def _bucket_cap(value: str) -> Words:
    if value in OFF:
        return Words("default buckets")
    if value.startswith("["):
        return Words(f"buckets of {value.strip('[]').replace(',', ', ').replace('  ', ' ')} MB")
    return Words(f"{value.removesuffix('.0')} MB buckets")


def _link(value: str) -> Words:
    rate = _RATE.fullmatch(value.lower())
    if rate:
        return Words(f"{rate[1]} {rate[2].replace('m', 'M').replace('g', 'G')}bit/s")
    return Words("", "no link") if value in OFF else Words(value)


_SAID: dict[str, Callable[[str], Words]] = {
    "experiment": _choice,
    "model": _choice,
    "model.size": _choice,
    "data": _choice,
    "variant": _choice,
    "method": _choice,
    "strategy": _choice,
    "comm_hook": lambda value: Words(spelled("none" if value in OFF else value)),
    "matrix_rank": lambda value: Words(f"matrix rank {value}"),
    "bucket_cap_mb": _bucket_cap,
    "static_graph": _switch("static graph"),
    "gradient_as_bucket_view": _switch("bucket view"),
    "trainer.accumulate_grad_batches": lambda value: (
        Words("", "no accumulation") if value == "1" else Words(f"accumulate {value}")
    ),
    "model.activation_checkpointing": _switch("activation checkpointing"),
    "data.batch_size": lambda value: Words(f"batch {value}"),
    "link": _link,
    "hosts": lambda value: Words("", "default hosts") if value in OFF else _number_of("host", "hosts")(value),
    "trainer.num_nodes": _number_of("node", "nodes"),
    "ranks": _number_of("rank", "ranks"),
}
_ORDER = (
    *("experiment", "model", "model.size", "data", "variant", "method", "strategy", "comm_hook", "matrix_rank"),
    *("bucket_cap_mb", "static_graph", "gradient_as_bucket_view", "trainer.accumulate_grad_batches"),
    *("model.activation_checkpointing", "data.batch_size", "...", "link", "hosts", "trainer.num_nodes", "ranks"),
)
