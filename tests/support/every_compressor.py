"""Every compressor, alone and composed, for the laws that hold for all of them.

A new compressor is one line here.
"""

import torch
from own_compressor import TopK

from lightning_commopt.compressors import (
    AfterSteps,
    AllReduce,
    AlternatingLowRank,
    AlternatingPowerSGD,
    BlockInt8,
    BySize,
    Cast,
    Compressor,
    ErrorFeedback,
    Hierarchical,
    Int4,
    Int8,
    LowRank,
    PowerSGD,
)

BF16 = Cast(dtype=torch.bfloat16)
BF16_IN_FLOAT32 = Cast(dtype=torch.bfloat16, accumulate="float32")
LOSSLESS = {
    "all_reduce": AllReduce(),
    "hierarchical": Hierarchical(inner=AllReduce()),
    "after_steps_never": AfterSteps(inner=BF16, start_step=1000),
}
WITH_FEEDBACK = {
    "error_feedback_bf16": ErrorFeedback(inner=BF16),
    "powersgd_rank_1": PowerSGD(),
    "powersgd_rank_2": PowerSGD(matrix_rank=2),
    "powersgd_rank_2_cold": PowerSGD(matrix_rank=2, warm_start=False),
    "powersgd_late": PowerSGD(start_step=2),
    "powersgd_refreshed": PowerSGD(matrix_rank=2, refresh_steps=3),
    "powersgd_bf16_residual": PowerSGD(residual_dtype="bfloat16"),
    "alternating_rank_1": AlternatingPowerSGD(),
    "alternating_rank_2": AlternatingPowerSGD(matrix_rank=2, refresh_steps=5),
    "error_feedback_bf16_in_float32": ErrorFeedback(inner=BF16_IN_FLOAT32),
    "int8": Int8(),
    "int8_small_blocks": Int8(block_size=16, residual_dtype="bfloat16"),
    "int4_feedback": Int4(error_feedback=True),
    "hierarchical_int8": Hierarchical(inner=Int8(block_size=16)),
    "hierarchical_powersgd": Hierarchical(inner=PowerSGD()),
    "feedback_around_hierarchical": ErrorFeedback(inner=Hierarchical(inner=LowRank(matrix_rank=2))),
    "example_topk": ErrorFeedback(inner=TopK(share=0.1)),
    "powersgd_large_only": BySize(inner=PowerSGD(), min_numel=100),
    "feedback_around_by_size": ErrorFeedback(inner=BySize(inner=BF16, min_numel=100)),
}
COMPRESSORS: dict[str, Compressor] = {
    **LOSSLESS,
    **WITH_FEEDBACK,
    "bf16": BF16,
    "bf16_in_float32": BF16_IN_FLOAT32,
    "fp16_in_float32": Cast(dtype=torch.float16, accumulate="float32"),
    "fp16": Cast(dtype=torch.float16),
    "low_rank": LowRank(matrix_rank=2),
    "alternating_low_rank": AlternatingLowRank(matrix_rank=2),
    "block_int8": BlockInt8(block_size=16),
    "int4": Int4(),
    "large_only_bf16": BySize(inner=BF16, min_numel=100),
}
