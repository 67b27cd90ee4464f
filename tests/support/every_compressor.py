"""Every compressor, alone and composed, for the laws that hold for all of them.

A registered one is here without a line, with its defaults; these are further settings, and compositions.
"""

import torch
from own_compressor import TopK

from lightning_commopt.compressors import (
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
from lightning_commopt.compressors.catalog import example_compressors

BF16 = Cast(dtype=torch.bfloat16)
BF16_IN_FLOAT32 = Cast(dtype=torch.bfloat16, accumulate="float32")
REGISTERED = {name: compressor for name, compressor in example_compressors().items() if name != "topk"}
COMPRESSORS: dict[str, Compressor] = {
    **REGISTERED,
    "hierarchical_lossless": Hierarchical(inner=AllReduce()),
    "powersgd_rank_2": PowerSGD(matrix_rank=2),
    "powersgd_rank_2_cold": PowerSGD(matrix_rank=2, warm_start=False),
    "powersgd_refreshed": PowerSGD(matrix_rank=2, refresh_steps=3),
    "powersgd_bf16_residual": PowerSGD(residual_dtype="bfloat16"),
    "alternating_rank_2": AlternatingPowerSGD(matrix_rank=2, refresh_steps=5),
    "error_feedback_bf16_in_float32": ErrorFeedback(inner=BF16_IN_FLOAT32),
    "int8_small_blocks": Int8(block_size=16, residual_dtype="bfloat16"),
    "block_int8_small_blocks": BlockInt8(block_size=16),
    "int4_feedback": Int4(error_feedback=True),
    "hierarchical_int8": Hierarchical(inner=Int8(block_size=16)),
    "hierarchical_powersgd": Hierarchical(inner=PowerSGD()),
    "feedback_around_hierarchical": ErrorFeedback(inner=Hierarchical(inner=LowRank(matrix_rank=2))),
    "example_topk": ErrorFeedback(inner=TopK(share=0.1)),
    "powersgd_large_only": BySize(inner=PowerSGD(), min_numel=100),
    "feedback_around_by_size": ErrorFeedback(inner=BySize(inner=BF16, min_numel=100)),
    "bf16_in_float32": BF16_IN_FLOAT32,
    "fp16_in_float32": Cast(dtype=torch.float16, accumulate="float32"),
    "low_rank_2": LowRank(matrix_rank=2),
    "alternating_low_rank_2": AlternatingLowRank(matrix_rank=2),
}
FURTHER = tuple(name for name in COMPRESSORS if name not in REGISTERED)
LOSSLESS = {name: compressor for name, compressor in COMPRESSORS.items() if not compressor.claims.is_lossy}
