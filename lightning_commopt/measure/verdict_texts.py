"""What verdicts and recommendations say. ``{bound}`` is how much faster training would be, at most."""

from __future__ import annotations

from typing import Final

HEADLINES: Final = {
    "one rank": "One rank: there are no gradients to synchronize.",
    "not observed": "No gradient sync was observed on {world_size} ranks, so its cost is unknown.",
    "straggler": (
        "The other ranks wait for rank {rank}, which computes {slowdown} longer than they do. No compression helps"
        " against that."
    ),
    "data": "{data} of the step waits for data, and {exposed} for communication.",
    "exposed": "{exposed} of the step waits for communication. If all of it were hidden: {bound}.",
    "hidden": "Communication is hidden: {exposed} of the step waits for it. Without any: {bound}.",
}

RECOMMENDATIONS: Final = {
    "observable strategy": (
        'Trainer(strategy="commopt_ddp"), or Lightning\'s "ddp": their gradient sync can be observed. With other'
        " strategies only the phases of a step are timed."
    ),
    "straggler": (
        "Look at rank {rank} first: other programs on its cores or its GPU, clocks and temperature, its disk, larger"
        " batches, callbacks that only it runs. If it were as fast as the others: {bound}."
    ),
    "data": (
        "DataLoader(num_workers=..., persistent_workers=True): {data} of the step is spent between two batches, which"
        " includes callbacks and loggers. Without: {bound}."
    ),
    "uneven steps": (
        "Use batches of the same size on all ranks, and run no other programs beside them: {wait} of the exposed time"
        " is spent waiting for whichever rank comes last, which no comm_hook shortens. Without: {bound}."
    ),
    "use buckets": "strategy=CommOptDDP(), lossless: gradients travel in buckets, not one by one.",
    "split bucket": (
        "bucket_cap_mb={cap}, lossless: the only bucket starts when backward is over; about {num_with_cap} buckets"
        " would start earlier. Backward can hide at most {hideable} more: {bound}."
    ),
    "more buckets": (
        "bucket_cap_mb={cap}, lossless: of {num_buckets} buckets, the first starts late; about {num_with_cap} buckets"
        " would start earlier. Backward can hide at most {hideable} more: {bound}."
    ),
    "fewer buckets": (
        "bucket_cap_mb={cap}, lossless: each of {num_buckets} buckets of {mib} MiB pays the latency of a collective;"
        " about {num_with_cap} buckets are enough."
    ),
    "cheaper than a cast": 'comm_hook="none", lossless: of {comm} of communication {compression} are compression.',
    "cheaper than low rank": (
        'comm_hook="bf16", or a smaller matrix_rank, both lossy: of {comm} of communication {compression} are'
        " compression."
    ),
    "cheaper": 'comm_hook="bf16", lossy, or "none": of {comm} of communication {compression} are compression.',
    "bf16": 'comm_hook="bf16", lossy: half the bytes; {bound}.',
    "int8": 'comm_hook="int8", lossy: about a quarter of the bytes; {bound}.',
    "int4": 'comm_hook="int4", lossy: about a seventh of the bytes; {bound}. Compare the final metric as well.',
    "int4 after int8": (
        'comm_hook="int4", lossy: about half the bytes that travel now; {bound}. Compare the final metric as well.'
    ),
    "int8 after a cast": 'comm_hook="int8", lossy: about half the bytes that travel now; {bound}.',
    "powersgd": (
        'comm_hook="powersgd", lossy: collectives take {transfer} and backward computes for {backward}, which is too'
        " short to hide them; {bound}. Compare the final metric as well."
    ),
    "accumulation": (
        "Trainer(accumulate_grad_batches=4), or four times its present value: gradients are synchronized a quarter as"
        " often; {bound}. They stay exact, but a step takes four times the samples, which changes training."
    ),
    "no compression": (
        'comm_hook="none": "{comm_hook}" is lossy, and compression takes {compression} of a step ({compression_share}).'
        " Without it {ratio} times the bytes travel, which backward may hide as well: compare both."
    ),
}
