"""Handles ranks with different numbers of batches, before an epoch begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_commopt.compat.loops import limit_batches, most_batches_of_epoch, num_batches, repeat_batches
from lightning_commopt.text.formatting import grouped, ranks_text
from lightning_commopt.text.validation import warn_once

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

POLICIES = ("error", "drop", "pad", "allow")
RESIZING = ("drop", "pad")
"""The policies that change a rank's number of batches."""

_WHY = "Gradient sync needs every rank in every step: a rank without a batch would leave the others waiting for it."
_WHAT_TO_DO = (
    "Distribute the samples evenly: Trainer(use_distributed_sampler=True), DistributedSampler, or a length that is the"
    " same on all ranks. Or let the strategy do it: uneven_batches='drop' ends epochs at the smallest number, 'pad'"
    " repeats batches up to the largest. Trainer(limit_train_batches=N) sets a number."
)
_WITHOUT_LENGTH = (
    "Let the dataset give every rank as many samples as the others, or end epochs by Trainer(limit_train_batches=N)"
    " with an N that all ranks reach. With a __len__ that is right, uneven_batches='drop' ends epochs at the smallest"
    " number, and 'pad' repeats batches up to the largest."
)
"""The remedy if numbers of batches were unknown, or not as expected, when the epoch began."""
STOPPED = "trainer.should_stop was set"
SKIPPED = "on_train_batch_start returned -1, or StopIteration was raised"
_TOGETHER = {
    STOPPED: (
        "Set it on all ranks in the same step: trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop,"
        " all=False)."
    ),
    SKIPPED: (
        "Lightning then ends the epoch on that rank: make this happen on all ranks in the same step. next() raises"
        " StopIteration at the end of an iterator."
    ),
}
"""The remedy if a rank has ended an epoch by itself, for each reason."""


class UnevenBatchesError(RuntimeError):
    """Ranks have different numbers of training batches; the message has the numbers and remedies."""


def make_even(trainer: Trainer, policy: str, rank: int, gather: Callable[[int], Mapping[int, int]]) -> int | None:
    """Compares the ranks' numbers of batches, and applies the policy. All ranks must call it.

    Args:
        trainer: its training dataloaders have just been set up.
        policy: one of `POLICIES`.
        rank: number of this rank.
        gather: takes this rank's number, and returns the numbers of all ranks, by rank.

    Returns:
        The number of batches in an epoch, the same on all ranks; None if it is unknown on a rank, if ``max_steps`` ends
        the fit before, or with "allow".

    Raises:
        UnevenBatchesError: the numbers differ and the policy is "error"; or a rank has no batch; or the policy needs a
            number that is unknown.
    """
    if policy == "allow":
        return None
    number_here = num_batches(trainer)
    numbers = gather(-1 if number_here is None else number_here)
    unknown = [other for other, number in numbers.items() if number < 0]
    if unknown:
        if policy != "error":
            raise UnevenBatchesError(_unknown_message(policy, unknown))
        return None
    own, smallest, largest = numbers[rank], min(numbers.values()), max(numbers.values())
    if smallest == largest:
        return own
    ends_before = most_batches_of_epoch(trainer) <= smallest
    if ends_before and policy == "error":
        return None
    counts = f"Ranks have different numbers of training batches: {_numbers_text(numbers)}."
    if policy == "error":
        raise UnevenBatchesError(f"{counts} {_WHY} {_WHAT_TO_DO}")
    if smallest == 0:
        raise UnevenBatchesError(f"{counts} uneven_batches={policy!r} cannot help a rank without batches. {_WHY}")
    # Also where max_steps ends the fit before, as a share of the number says when to validate.
    number = smallest if policy == "drop" else largest
    if own > number:
        limit_batches(trainer, number)
    elif own < number:
        repeat_batches(trainer, number)
    if ends_before:
        return None
    warn_once(f"{counts} uneven_batches={policy!r}: {_consequence(numbers.values(), number)}")
    return number


def _consequence(numbers: Collection[int], number: int) -> str:
    """Returns what it means that epochs have ``number`` batches on all ranks, which have other ``numbers``."""
    if number == min(numbers):
        dropped = sum(numbers) - number * len(numbers)
        return f"every epoch ends after {number} batches on all ranks, which drops {_count(dropped)} in total."
    repeated = number * len(numbers) - sum(numbers)
    return (
        f"every epoch has {number} batches on all ranks; those with fewer start over, and {repeated} batches count"
        " twice or more."
    )


def different_ends_message(numbers: Mapping[int, int], epoch: int) -> str:
    """Returns the message for an epoch that has ended after these numbers of batches, by rank."""
    return (
        f"Ranks ended epoch {epoch} after different numbers of batches: {_numbers_text(numbers)}. {_WHY}"
        f" {_WITHOUT_LENGTH}"
    )


def early_end_message(ended: tuple[int, int], going: tuple[int, int], epoch: int, reason: str) -> str:
    """Returns the message for a rank that continues in an epoch that another rank has ended.

    Args:
        ended: the rank that has ended the epoch, and the number of batches after which it has.
        going: the rank that continues, and the number of batches that it has begun.
        epoch: number of the epoch.
        reason: `STOPPED` or `SKIPPED` if the epoch was ended before its last batch, else empty.
    """
    cause = f", because {reason} there" if reason else ""
    return (
        f"Rank {ended[0]} has ended epoch {epoch} after {_count(ended[1])}{cause}, and rank {going[0]} continues after"
        f" {_count(going[1])}. {_WHY} {_TOGETHER.get(reason, _WITHOUT_LENGTH)}"
    )


def _unknown_message(policy: str, ranks: Sequence[int]) -> str:
    return (
        f"uneven_batches={policy!r} needs to know before an epoch how many batches each rank has, and the dataloader of"
        f" {ranks_text(ranks)} has no length. Give the IterableDataset a __len__, or set"
        " Trainer(limit_train_batches=N), or leave uneven_batches='error', which reports a rank that runs out."
    )


def _numbers_text(numbers: Mapping[int, int]) -> str:
    """Returns the numbers with their ranks.

    >>> _numbers_text({0: 6, 1: 6, 2: 5})
    '6 batches on ranks 0, 1; 5 batches on rank 2'
    """
    ranks_with = grouped((number, rank) for rank, number in numbers.items())
    return "; ".join(f"{_count(number)} on {ranks_text(ranks)}" for number, ranks in ranks_with.items())


def _count(number: int) -> str:
    return f"{number} batch" if number == 1 else f"{number} batches"
