"""What names of settings mean: seeds, numbers of ranks, options of a plan, and options with several names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_commopt.measure.runs.settings import Value

STRATEGIES = ("strategy.", "trainer.strategy.")

# Overrides that cannot change what is trained, themselves or below them.
_WITHOUT_EFFECT = (
    *("repetition", "repeat", "num_warmup_steps", "hydra", "logger", "callbacks.progress_bar"),
    *("trainer.logger", "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.log_every_n_steps"),
    *("trainer.default_root_dir", "callbacks.comm_time.print_summary"),
)
_OFF = ("", "none", "null", "false")
_ALIASES = {
    **dict.fromkeys(("trainer.devices", "world_size"), "ranks"),
    **dict.fromkeys(
        ("strategy/comm_hook", "commopt", "strategy.comm_hook", "strategy.comm_hook.name", "plan"), "comm_hook"
    ),
}
_PREFIXES = ("trainer.strategy.comm_hook.", "strategy.comm_hook.", "comm_hook.", *reversed(STRATEGIES))


def changes_training(name: str) -> bool:
    """Returns whether an override can change what is trained, apart from repeating it with another seed."""
    return not is_seed(name) and not any(
        name == other or name.startswith((f"{other}.", f"{other}/")) for other in _WITHOUT_EFFECT
    )


def is_seed(name: str) -> bool:
    """Returns whether an option is the seed of a run."""
    return name.rpartition(".")[2] in ("seed", "random_seed", "seed_everything")


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


def is_off(value: Value) -> bool:
    """Returns whether a value disables an option."""
    return value is None or value is False or (isinstance(value, str) and value.lower() in _OFF)


def without_ranks(values: Mapping[str, Value]) -> dict[str, Value]:
    """Returns values without the number of ranks and of nodes."""
    return {
        name: value
        for name, value in values.items()
        if not is_ranks(name) and name not in ("trainer.num_nodes", "hosts")
    }
