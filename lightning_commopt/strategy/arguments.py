"""The constructor arguments of strategies: documentation, checks, and which of them a plan or Lightning gets."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_commopt.compressors.catalog import recommended
from lightning_commopt.compressors.hierarchical import is_hierarchical
from lightning_commopt.compressors.registry import canonical_name, names_with_option
from lightning_commopt.plan import CommPlan, DiLoCoPlan, OptionError, Plan, UnknownOptionError
from lightning_commopt.plan.base import check_known, comm_hook_hint
from lightning_commopt.plan.ddp import check_option_names, ddp_options
from lightning_commopt.plan.sharded import ShardedPlan
from lightning_commopt.text.validation import did_you_mean, warn_once
from lightning_commopt.tune.options import AUTO, TuneOptions, plan_from_option
from lightning_commopt.watch.uneven_batches import POLICIES

OWN_OPTIONS = (
    "save_comm_state",
    "uneven_batches",
    "sigterm_every_n_steps",
    "nccl",
    "watch",
    "plan",
    "lossy",
    "patience_s",
)
"""Options of our strategies that are neither arguments of Lightning's strategies nor options of a plan."""

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
_CHOICES = {
    "start_method": get_args(StartMethod),
    "uneven_batches": POLICIES,
}
_Class = TypeVar("_Class", bound=type)


def document_plan_options(strategy: _Class) -> _Class:
    """Replaces the reference to a plan in a docstring by descriptions of its options, for LightningCLI's help."""
    keywords = inspect.signature(strategy).parameters
    for plan in (CommPlan, ShardedPlan, DiLoCoPlan):
        if strategy.__doc__ and plan.__doc__:  # with python -OO there are no docstrings
            # Python 3.13 removes the common indentation of a docstring; earlier versions keep it.
            documented, described = inspect.cleandoc(strategy.__doc__), inspect.cleandoc(plan.__doc__)
            described = described.partition("Attributes:\n")[2].partition("\n\n")[0]
            entries = re.split(r"\n(?= {4}\w+: )", described)
            options = "\n".join(entry for entry in entries if entry.split(":")[0].strip() in keywords)
            reference = rf"(?m)^ *{plan.options()[0]}: see `{plan.__name__}`.*$"
            strategy.__doc__ = re.sub(reference, options.replace("\\", r"\\"), documented)
    return strategy


def plan_from_arguments(arguments: Mapping[str, Any]) -> tuple[CommPlan, TuneOptions | None, dict[str, Any]]:
    """Splits the arguments of a strategy for DDP into the plan, the tuner's options and Lightning's arguments.

    Args:
        arguments: ``locals()`` of the strategy's constructor.

    Returns:
        The plan; with ``plan="auto"`` what the tuner may change, else None; and the arguments for Lightning's
        strategy, including those that it passes to ``DistributedDataParallel``.

    Raises:
        OptionError: an argument is wrong, unknown or given twice, or arguments contradict each other.
    """
    passed, options, lightning_arguments = _split_arguments(arguments, CommPlan)
    ddp_arguments = dict(arguments["kwargs"])
    if "device_ids" in ddp_arguments:
        raise OptionError(
            f"device_ids={ddp_arguments['device_ids']!r} is not an option of strategies: Lightning sets device_ids from"
            " the Trainer's or Fabric's devices"
        )
    _refuse_compressor_options(ddp_arguments, options["comm_hook"])
    check_option_names(ddp_arguments, known=sorted({*passed, *ddp_options()} - {"device_ids"}))
    check_arguments(passed)
    bucket_sizes = ddp_arguments.pop("bucket_cap_mb_list", None)
    if bucket_sizes is not None:
        if options.get("bucket_cap_mb") is not None:
            raise OptionError("bucket_cap_mb and bucket_cap_mb_list exclude each other: pass the list as bucket_cap_mb")
        if not isinstance(bucket_sizes, Sequence) or isinstance(bucket_sizes, str):
            raise OptionError(f"bucket_cap_mb_list must be a list of bucket sizes in MiB, got {bucket_sizes!r}")
        options["bucket_cap_mb"] = list(bucket_sizes)
    tuned = TuneOptions.of(passed.get("plan"), passed.get("lossy"), {**passed, **ddp_arguments, **options})
    plan = plan_from_option(CommPlan, passed.get("plan"), options)
    _warn_of_unused(passed, plan)
    if plan.comm_hook is not None and ddp_arguments.get("mixed_precision") is not None:
        raise OptionError(
            "comm_hook and DDP's mixed_precision exclude each other: DDP takes one hook, and mixed_precision sets one"
        )
    return plan, tuned, {**lightning_arguments, **plan.ddp_kwargs(), **ddp_arguments}


def sharded_plan_from_arguments(
    arguments: Mapping[str, Any],
) -> tuple[ShardedPlan, TuneOptions | None, dict[str, Any]]:
    """Splits the arguments of a strategy for sharded models; see `plan_from_arguments`."""
    passed, options, lightning_arguments = _split_arguments(arguments, ShardedPlan)
    for name in arguments["kwargs"]:
        if name in (*passed, "kwargs") or name not in {*ddp_options(), *CommPlan.options(), "ddp_comm_hook"}:
            check_known(name, [*passed])
        ShardedPlan.check_names([name])
    check_arguments(passed)
    if passed["plan"] == AUTO and "lossy" not in passed:
        raise OptionError(
            "plan='auto' is not available for sharded models in Fabric: it chooses during the fit of a Trainer. Pass"
            " comm_hook, or a ShardedPlan"
        )
    tuned = TuneOptions.of_shards(passed["plan"], passed.get("lossy"), passed)
    plan = plan_from_option(ShardedPlan, passed["plan"], options)
    plan.check_torch()
    return plan, tuned, lightning_arguments


def diloco_plan_from_arguments(arguments: Mapping[str, Any]) -> tuple[DiLoCoPlan, dict[str, Any]]:
    """Splits the arguments of `CommOptDiLoCo` into the plan and the arguments for Lightning's strategy."""
    passed, options, lightning_arguments = _split_arguments(arguments, DiLoCoPlan)
    for name in arguments["kwargs"]:
        if name in (*ddp_options(), *CommPlan.options()):
            within_node = f"wraps a model in DDP only within a node: write inner={{{name!r}: ...}}"
            reason = within_node if "inner" in passed else "does not use DDP in Fabric"
            raise OptionError(f"{name} is an option of DDP, and DiLoCo {reason}")
        check_known(name, [*passed])
    check_arguments(passed)
    if passed.get("uneven_batches") == "allow":
        raise OptionError(
            "uneven_batches='allow' is not possible with DiLoCo: ranks must exchange after the same steps"
        )
    is_patient = passed.get("patience_s") is not None
    if is_patient and passed["sigterm_every_n_steps"] is not None:
        raise OptionError(
            "patience_s and sigterm_every_n_steps exclude each other: an agreement on SIGTERM waits for all ranks"
        )
    plan = plan_from_option(DiLoCoPlan, passed["plan"], options)
    if is_patient and plan.inner is not None:
        raise OptionError("patience_s is not possible with inner: the ranks of a node wait for each other in each step")
    if is_patient and is_hierarchical(plan.comm_hook):
        raise OptionError("patience_s is not possible with comm_hook='hierarchical': ranks of a node need each other")
    return plan, lightning_arguments


def _split_arguments(
    arguments: Mapping[str, Any], plan: type[Plan]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns all named arguments of a constructor, those that are options of its plan, and those for Lightning."""
    passed = named_arguments(arguments)
    options = {name: value for name, value in passed.items() if name in plan.options()}
    return passed, options, {name: passed[name] for name in passed if name not in (*options, *OWN_OPTIONS)}


def named_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the named arguments of a constructor from its ``locals()``."""
    return {name: value for name, value in arguments.items() if name not in ("self", "__class__", "kwargs")}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises an OptionError for a wrong argument of a strategy that is not an option of a plan."""
    for name, (is_allowed, allowed) in _ALLOWED.items():
        value = arguments.get(name)
        if name in arguments and not is_allowed(value):
            hint = comm_hook_hint(value) or did_you_mean(value, _CHOICES.get(name, ()))
            if (name, value) == ("accelerator", AUTO) and "lossy" in arguments:
                # Strategies that take lossy take plan="auto".
                hint = "; did you mean plan='auto'?"
            raise OptionError(f"{name} must be {allowed}, got {value!r}{hint}")
    uneven_batches = arguments.get("uneven_batches")
    if uneven_batches in ("drop", "pad") and not arguments["watch"]:
        raise OptionError(f"uneven_batches={uneven_batches!r} needs watch=True: with watch=False nothing is compared")
    if uneven_batches == "allow" and arguments.get("sigterm_every_n_steps") is not None:
        raise OptionError(
            "sigterm_every_n_steps and uneven_batches='allow' exclude each other: the ranks must take the same steps"
        )


def _warn_of_unused(passed: Mapping[str, Any], plan: CommPlan) -> None:
    """Warns once about arguments that have no effect because of other arguments."""
    has_hook = passed.get("ddp_comm_hook") is not None
    is_local_sgd = isinstance(passed.get("ddp_comm_state"), PostLocalSGDState)
    needs = {
        "ddp_comm_state": (has_hook or is_local_sgd, "ddp_comm_hook"),
        "ddp_comm_wrapper": (has_hook, "ddp_comm_hook"),
        "model_averaging_period": (is_local_sgd, "a PostLocalSGDState as ddp_comm_state"),
    }
    for name, (has_effect, needed) in needs.items():
        if passed.get(name) is not None and not has_effect:
            warn_once(f"{name} has no effect: it needs {needed}.")
    # DDP searches for unused parameters only with one of these two; with a static graph it does so once.
    if plan.skip_all_reduce_unused_params and not (plan.find_unused_parameters or plan.static_graph):
        warn_once("skip_all_reduce_unused_params=True has no effect: it needs find_unused_parameters=True.")


def _optional(is_allowed: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_allowed(value)


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0)


_CALLABLE = _optional(callable), "a callable or None"
_NUM_STEPS = _is_count, "a number of steps above 0 or None"
_NUM_RANKS = (lambda value: value == AUTO or (value is not None and _is_count(value))), "'auto' or a number above 0"
_SWITCH = (lambda value: isinstance(value, bool)), "true or false"
_ALLOWED: dict[str, tuple[Callable[[object], bool], str]] = {
    "accelerator": (
        # The first positional argument of a strategy is the accelerator, where users write a compressor or a plan.
        lambda value: value not in ("", AUTO) and not isinstance(value, int | float) and canonical_name(value) is None,
        'an Accelerator, the name of one, such as "gpu", or None',
    ),
    "data_parallel_size": _NUM_RANKS,
    "tensor_parallel_size": _NUM_RANKS,
    "parallelize_fn": (callable, "a callable"),
    "parallel_devices": (_optional(lambda value: isinstance(value, list)), "a list of torch.device or None"),
    "process_group_backend": (
        _optional(lambda value: isinstance(value, str) and value != ""),
        'the name of a backend, such as "gloo", or None',
    ),
    "timeout": (
        _optional(lambda value: isinstance(value, timedelta) and value > timedelta()),
        "a timedelta above 0, such as timedelta(seconds=30), or None",
    ),
    **{name: (choices.__contains__, f"one of {', '.join(choices)}") for name, choices in _CHOICES.items()},
    "ddp_comm_hook": _CALLABLE,
    "ddp_comm_wrapper": _CALLABLE,
    "model_averaging_period": _NUM_STEPS,
    "sigterm_every_n_steps": _NUM_STEPS,
    "patience_s": (
        _optional(
            lambda value: isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf
        ),
        "a number of seconds above 0 or None",
    ),
    "watch": _SWITCH,
    "save_comm_state": _SWITCH,
}


def _refuse_compressor_options(ddp_arguments: Mapping[str, Any], comm_hook: object) -> None:
    """Raises an OptionError for a compressor's option beside ``comm_hook``, which shows how to write it within."""
    for name, value in ddp_arguments.items():
        if name not in ddp_options() and (owners := names_with_option(name)):
            owner = next((owner for owner in (comm_hook, *recommended()) if owner in owners), owners[0])
            example = json.dumps({"name": owner, name: value}, default=repr)
            raise UnknownOptionError(
                f"{name} is an option of comm_hook {' or '.join(owners)}: write comm_hook={example}"
            )
