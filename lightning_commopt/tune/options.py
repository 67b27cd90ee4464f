"""The options ``plan`` and ``lossy`` of a strategy, which are checked in its constructor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lightning_commopt.compressors.configs import compressor_from_config, sharded_from_config
from lightning_commopt.plan import OptionError, Plan
from lightning_commopt.plan.base import option_errors
from lightning_commopt.plan.sharded import check_available

AUTO, NEVER = "auto", "never"
_Plan = TypeVar("_Plan", bound=Plan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What ``plan="auto"`` may change.

    Attributes:
        lossy: compressors that may be chosen. For a strategy of sharded models they are `ShardedCompressor`.
        has_fixed_hook: whether the user has chosen a compressor, which is not changed then.
        has_fixed_buckets: whether the user has chosen the buckets, which are not changed then.
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
        if (allowed := _allowed(plan, lossy, options, compressor_from_config)) is None:
            return None
        if options.get("ddp_comm_hook") is not None:
            raise OptionError("plan='auto' and ddp_comm_hook exclude each other: DDP takes one hook")
        if options.get("mixed_precision") is not None:
            raise OptionError("plan='auto' and DDP's mixed_precision exclude each other: DDP takes one hook")
        if allowed and options.get("skip_all_reduce_unused_params"):
            raise OptionError(
                f"lossy={lossy!r} and skip_all_reduce_unused_params=True exclude each other: DDP would skip buckets"
                " without calling the compressor"
            )
        has_hook = _is_given("comm_hook", options)
        if has_hook and allowed:
            raise OptionError(
                f"lossy={lossy!r} has no effect together with comm_hook={options['comm_hook']!r}, which plan='auto'"
                " does not change: pass one of the two"
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
        """Checks the two options of a strategy for sharded models; arguments and errors are those of `of`."""
        if (allowed := _allowed(plan, lossy, options, sharded_from_config)) is None:
            return None
        if (hook := options.get("comm_hook")) not in (None, "none"):
            raise OptionError(f"plan='auto' has nothing to choose with comm_hook={hook!r}: pass one of the two")
        if not allowed:
            raise OptionError(
                "plan='auto' has nothing to choose: for sharded models it chooses among lossy compressors only. List"
                " those it may choose, such as lossy=['bf16', 'int8']"
            )
        check_available("plan='auto'")
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


def plan_from_option(kind: type[_Plan], plan: Any, options: Mapping[str, Any]) -> _Plan:
    """Returns the plan that was passed to a strategy, as an object or a file, or else a plan with its options.

    Args:
        kind: class of the plan.
        plan: the strategy's option ``plan``.
        options: the strategy's options, of which those of a plan count.

    Raises:
        OptionError: ``plan`` is neither, the file has none, options are given besides, or a value is out of range.
    """
    words = (AUTO,) if kind.searched else ()
    if plan is None or plan in words:
        return kind.from_dict({name: options[name] for name in kind.options() if name in options})
    besides = [field.name for field in dataclasses.fields(kind) if _is_given(field.name, options, field.default)]  # type: ignore[arg-type]
    if besides:
        raise OptionError(f"plan={plan!r} is a whole plan, so {', '.join(besides)} cannot be passed as well")
    return kind.of(plan, words)


def _is_given(name: str, options: Mapping[str, Any], default: object = None) -> bool:
    """Returns whether an option of a plan is set; a comm hook "none" is not, in any spelling."""
    value = options.get(name, default)
    if name != "comm_hook":
        return bool(value != default)
    try:
        return compressor_from_config(value) is not None
    except (ValueError, TypeError):
        return True


def _allowed(
    plan: Any, lossy: Any, options: Mapping[str, Any], from_config: Callable[[Any], Any]
) -> tuple[Any, ...] | None:
    """Returns the compressors that may be chosen; None unless ``plan`` is "auto"."""
    allowed = _lossy(lossy, from_config)
    if plan != AUTO:
        if allowed:
            raise OptionError(
                f"lossy={lossy!r} lists what plan='auto' may choose, so it needs plan='auto', got {plan!r}"
            )
        return None
    if options.get("uneven_batches") == "allow":
        raise OptionError("plan='auto' and uneven_batches='allow' exclude each other: ranks are timed together")
    return allowed


def _lossy(lossy: Any, from_config: Callable[[Any], Any]) -> tuple[Any, ...]:
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
        with option_errors("lossy must be 'never' or compressors: "):
            compressor = from_config(config)
        if compressor is not None and compressor not in compressors:
            compressors.append(compressor)
    return tuple(compressors)
