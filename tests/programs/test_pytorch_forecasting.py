"""LightningModules of pytorch-forecasting, on made-up series."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lossless_fits import assert_trains_as_lightnings_ddp

pytestmark = pytest.mark.exhaustive

_NUM_SERIES, _NUM_TIMES = 8, 48


@pytest.fixture(autouse=True)
def pytorch_forecasting() -> None:
    pytest.importorskip("pytorch_forecasting", reason="benchmarks/programs.sh installs and runs this")


def _series(**options: Any) -> Any:
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    times = torch.arange(_NUM_TIMES, dtype=torch.float32).repeat(_NUM_SERIES, 1)
    phases = torch.arange(_NUM_SERIES, dtype=torch.float32).unsqueeze(1)
    values = (times / 4 + phases).sin() + 0.1 * torch.randn(times.shape, generator=torch.Generator().manual_seed(1))
    table = pd.DataFrame(
        {
            "time": times.long().flatten().numpy(),
            "series": [f"s{number}" for number in range(_NUM_SERIES) for _ in range(_NUM_TIMES)],
            "value": values.flatten().numpy(),
        }
    )
    return TimeSeriesDataSet(
        table,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=12,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        **options,
    )


def _temporal_fusion_transformer() -> tuple[LightningModule, Any]:
    from pytorch_forecasting import TemporalFusionTransformer

    series = _series(static_categoricals=["series"], time_varying_known_reals=["time"])
    model = TemporalFusionTransformer.from_dataset(series, learning_rate=1e-2, hidden_size=8, attention_head_size=2)
    return model, series.to_dataloader(train=True, batch_size=8, num_workers=0)


def _n_beats() -> tuple[LightningModule, Any]:
    from pytorch_forecasting import NBeats

    series = _series()
    model = NBeats.from_dataset(series, learning_rate=1e-2, widths=[16, 32], log_interval=-1)
    return model, series.to_dataloader(train=True, batch_size=8, num_workers=0)


def _deep_ar() -> tuple[LightningModule, Any]:
    from pytorch_forecasting import DeepAR

    series = _series(static_categoricals=["series"])
    model = DeepAR.from_dataset(series, learning_rate=1e-2, hidden_size=8, rnn_layers=1)
    return model, series.to_dataloader(train=True, batch_size=8, num_workers=0)


@pytest.mark.parametrize("make", [_temporal_fusion_transformer, _n_beats, _deep_ar])
def test_trains_as_with_lightnings_ddp(make: Any) -> None:
    """If it fails, a library's own modules, optimizers and logging do not go with a plan that loses nothing."""
    assert_trains_as_lightnings_ddp(make, gradient_clip_val=0.1)
