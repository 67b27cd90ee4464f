"""The options ``plan`` and ``lossy`` of a strategy, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_commopt.compressors.configs import compressor_from_config, sharded_from_config
from lightning_commopt.plan import CommPlan, OptionError, Plan
from lightning_commopt.plan.ddp import plan_options
from lightning_commopt.text.validation import did_you_mean

AUTO, NEVER = "auto", "never"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What ``plan="auto"`` may change.

    Attributes:
        lossy: compressors that may be chosen. For a strategy of sharded models they are `ShardedCompressor`.
        has_fixed_hook: the user has chosen a compressor, which stays.
        has_fixed_buckets: the user has chosen the buckets, which stay.
    """

    lossy: tuple[Any, ...] = ()
    has_fixed_hook: bool = False
    has_fixed_buckets: bool = False

    @classmethod
    def of(cls, plan: Any, lossy: Any, options: Mapping[str, Any]) -> TuneOptions | None:
        """Checks the two options beside the others; None unless ``plan`` is "auto".

        Args:
            plan: the strategy's option ``plan``.
            lossy: the strategy's option ``lossy``.
            options: the plan's options and the others for ``DistributedDataParallel``.

        Raises:
            OptionError: a value is not allowed, two exclude each other, or nothing is left to choose.
        """
        allowed = _lossy(lossy)
        if plan != AUTO:
            if allowed:
                raise OptionError(f"lossy={lossy!r} needs plan='auto': it lists what that may choose")
            return None
        if options.get("ddp_comm_hook") is not None:
            raise OptionError("plan='auto' and ddp_comm_hook exclude each other: DDP takes one hook")
        if options.get("uneven_batches") == "allow":
            raise OptionError("plan='auto' and uneven_batches='allow' exclude each other: ranks are timed together")
        if options.get("mixed_precision") is not None:
            raise OptionError("plan='auto' and DDP's mixed_precision exclude each other: DDP takes one hook")
        if allowed and options.get("skip_all_reduce_unused_params"):
            raise OptionError(
                f"lossy={lossy!r} and skip_all_reduce_unused_params=True exclude each other: DDP then leaves out"
                " buckets without telling a compressor"
            )
        has_hook = _is_given("comm_hook", options)
        if has_hook and allowed:
            raise OptionError(
                f"lossy={lossy!r} has no effect beside comm_hook={options['comm_hook']!r}, which plan='auto' leaves as"
                " it is: give one of the two"
            )
        has_buckets = options.get("bucket_cap_mb") is not None
        if has_buckets and not allowed:
            raise OptionError(
                f"plan='auto' has nothing to choose: bucket_cap_mb={options['bucket_cap_mb']!r} is given, and"
                f" {'comm_hook' if has_hook else 'no lossy compressor'} is {'too' if has_hook else 'allowed'}"
            )
        return cls(lossy=allowed, has_fixed_hook=has_hook, has_fixed_buckets=has_buckets)

    @classmethod
    def of_shards(cls, plan: Any, lossy: Any, options: Mapping[str, Any]) -> TuneOptions | None:
        """Checks the two options of a strategy for sharded models; see `of`.

        Args:
            plan: the strategy's option ``plan``.
            lossy: the strategy's option ``lossy``.
            options: the strategy's other options.

        Raises:
            OptionError: a value is not allowed, two exclude each other, or nothing is left to choose.
        """
        allowed = _lossy(lossy, sharded_from_config)
        if plan != AUTO:
            if allowed:
                raise OptionError(f"lossy={lossy!r} needs plan='auto': it lists what that may choose")
            return None
        if options.get("uneven_batches") == "allow":
            raise OptionError("plan='auto' and uneven_batches='allow' exclude each other: ranks are timed together")
        if (hook := options.get("comm_hook")) not in (None, "none"):
            raise OptionError(f"plan='auto' has nothing to choose beside comm_hook={hook!r}: give one of the two")
        if not allowed:
            raise OptionError(
                "plan='auto' has nothing to choose: for sharded models it chooses among lossy compressors only. List"
                " those it may choose, such as lossy=['bf16', 'int8']"
            )
        return cls(lossy=allowed)

    def fits(self, plan: Plan, base: Plan) -> bool:
        """Returns whether a plan is one that may be chosen instead of the user's."""
        if type(plan) is not type(base):
            return False
        same = all(getattr(plan, name) == getattr(base, name) for name in base.options() if name not in base.searched)
        has_same_buckets = getattr(plan, "bucket_cap_mb", None) == getattr(base, "bucket_cap_mb", None)
        return (
            same
            and plan.comm_hook in (base.comm_hook, *self.lossy)
            and (not self.has_fixed_buckets or has_same_buckets)
        )


def plan_from_option(plan: Any, options: Mapping[str, Any]) -> CommPlan | None:
    """Returns the plan that was given to a strategy as a whole or as a file; None if its options make it.

    Args:
        plan: the strategy's option ``plan``.
        options: the plan's options.

    Raises:
        OptionError: it is neither, the file holds none, or options are given besides.
    """
    if plan is None or plan == AUTO:
        return None
    if not isinstance(plan, CommPlan | str | Path):
        raise OptionError(f"plan must be 'auto', a CommPlan, the path of a file or None, got {plan!r}")
    besides = [name for name in plan_options() if _is_given(name, options)]
    if besides:
        raise OptionError(f"plan={plan!r} is a whole plan, so {', '.join(besides)} cannot be given too")
    if isinstance(plan, CommPlan):
        return plan
    if not Path(plan).is_file():
        hint = did_you_mean(str(plan), [AUTO])
        raise OptionError(
            f"plan must be 'auto', a CommPlan, or the path of a file, and there is no file {plan!r}{hint}"
        )
    return CommPlan.load(plan)


def _is_given(name: str, options: Mapping[str, Any]) -> bool:
    """Returns whether an option of a plan is set; a comm hook "none" is not, in any spelling."""
    value = options.get(name)
    if name != "comm_hook":
        return value is not None
    try:
        return compressor_from_config(value) is not None
    except (ValueError, TypeError):
        return True


def _lossy(lossy: Any, from_config: Callable[[Any], Any] = compressor_from_config) -> tuple[Any, ...]:
    if lossy == NEVER or lossy is None:
        return ()
    if isinstance(lossy, str):
        lossy = [lossy]
    if not isinstance(lossy, Sequence):
        raise OptionError(
            f"lossy must be 'never', a compressor, or a list of compressors that plan='auto' may choose, such as"
            f" ['bf16', 'int8'], got {lossy!r}"
        )
    compressors = []
    for config in lossy:
        try:
            compressor = from_config(config)
        except (ValueError, TypeError) as error:
            raise OptionError(f"lossy: {error}") from error
        if compressor is not None and compressor not in compressors:
            compressors.append(compressor)
    return tuple(compressors)
