"""Makes short names of settings for people, such as "bf16, 100 MiB buckets, 4 ranks"."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

_MAX_NAMES = 3
OFF = ("null", "none", "false", "")  # values that disable an option, in lower case

_ALIASES = {
    **dict.fromkeys(("trainer.devices", "world_size"), "ranks"),
    **dict.fromkeys(
        ("strategy/comm_hook", "commopt", "strategy.comm_hook", "strategy.comm_hook.name", "plan"), "comm_hook"
    ),
}
_PREFIXES = ("trainer.strategy.comm_hook.", "strategy.comm_hook.", "comm_hook.", "trainer.strategy.", "strategy.")
_SPELLED = {
    "none": "uncompressed",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "commopt": "CommOptDDP",
    "commopt_fsdp": "CommOptModelParallel",
    "commopt_fsdp_int8": "CommOptModelParallel, int8",
    "single": "one process",
    "ddp_one_process": "DDP on one process",
    "DDPStrategy": "Lightning's DDP",
    "FSDPStrategy": "Lightning's FSDP",
    "ModelParallelStrategy": "Lightning's FSDP2",
    "SingleDeviceStrategy": "one process",
}


def canonical(name: str) -> str:
    """Returns the one name of an option that can be set under several names.

    >>> canonical("trainer.devices"), canonical("commopt"), canonical("trainer.strategy.bucket_cap_mb")
    ('ranks', 'comm_hook', 'bucket_cap_mb')
    """
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _ALIASES.get(name, name.removeprefix(prefix))


def is_ranks(name: str) -> bool:
    """Returns whether an override sets the number of ranks."""
    return canonical(name) == "ranks"


def is_of_plan(name: str, plan_options: Collection[str]) -> bool:
    """Returns whether an override sets only how gradients travel, by options of the compared plans, or the ranks."""
    is_of_hook = "comm_hook." in name and "ddp_comm_hook" not in name
    return is_of_hook or canonical(name) in ("ranks", "variant", "method", "comm_hook", *plan_options)


def display_name(value: str) -> str:
    """Returns the usual spelling of a plan or an option.

    >>> display_name("alternating_powersgd"), display_name("one_bucket"), display_name("powersgd_rank_8")
    ('alternating PowerSGD', 'one bucket', 'PowerSGD rank 8')
    """
    return _SPELLED.get(value) or re.sub(r"\bpowersgd\b", "PowerSGD", value.replace("_", " "))


def setting_name(values: Mapping[str, str], *, shows_off: bool = False) -> str:
    """Returns the name of a setting, with its disabled options if ``shows_off``, or if it would be empty."""
    texts = [
        _text(canonical(name), value, shows_off) or (f"{name}={value}" if shows_off else "")
        for name, value in sorted(values.items(), key=lambda item: _position(canonical(item[0])))
    ]
    joined = ", ".join(dict.fromkeys(filter(None, texts)))
    return joined if joined or shows_off else setting_name(values, shows_off=True)


def distinct_name(values: Mapping[str, str], others: Sequence[Mapping[str, str]], sync_method: str) -> str:
    """Returns a name from the values that differ from another setting's, or else from the sync method."""
    shown = {name: value for name, value in values.items() if any(other.get(name) != value for other in others)}
    return (setting_name(shown) if shown else "") or display_name(sync_method)


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
    text: Callable[[str], str]
    text_if_off: str = ""
    off: tuple[str, ...] = OFF  # values that disable it


def _text(name: str, value: str, shows_off: bool) -> str:
    spaced = name.replace("_", " ")
    option = _OPTIONS.get(name, _Option(lambda value: f"{spaced} {display_name(value)}", f"no {spaced}"))
    if value.lower() in option.off:
        return option.text_if_off if shows_off else ""
    return spaced if name not in _OPTIONS and value.lower() == "true" else option.text(value)


def _position(name: str) -> float:
    names = list(_OPTIONS)
    return names.index(name) if name in _OPTIONS else names.index("link") - 0.5


def _count_of(thing: str) -> Callable[[str], str]:
    return lambda value: f"{value} {thing}{'' if value == '1' else 's'}"


def _bucket_cap(value: str) -> str:
    if value in OFF:
        return "default buckets"
    if value.startswith("["):
        return f"buckets of {value.strip('[]').replace(',', ', ').replace('  ', ' ')} MiB"
    return f"{value.removesuffix('.0')} MiB buckets"


def _link(value: str) -> str:
    rate = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", value.lower())
    return f"{rate[1]} {rate[2].replace('m', 'M').replace('g', 'G')}bit/s" if rate else value


_CHOICE = _Option(display_name, "none", off=("null", ""))
# A name lists its options in this order. Options that are unknown here come before the link.
_OPTIONS = {
    **dict.fromkeys(("experiment", "model", "model.size", "data", "variant", "method", "strategy"), _CHOICE),
    "comm_hook": _Option(lambda value: display_name("none" if value in OFF else value), off=()),
    "matrix_rank": _Option("matrix rank {}".format, off=()),
    "bucket_cap_mb": _Option(_bucket_cap, off=()),
    "static_graph": _Option("static graph".format, "no static graph"),
    "gradient_as_bucket_view": _Option("bucket view".format, "no bucket view"),
    "trainer.accumulate_grad_batches": _Option("accumulate {}".format, "no accumulation", off=("1",)),
    "model.activation_checkpointing": _Option("activation checkpointing".format, "no activation checkpointing"),
    "data.batch_size": _Option("batch {}".format, off=()),
    "link": _Option(_link, "no link"),
    "hosts": _Option(_count_of("host"), "default hosts"),
    "trainer.num_nodes": _Option(_count_of("node"), off=()),
    "ranks": _Option(_count_of("rank"), off=()),
}
