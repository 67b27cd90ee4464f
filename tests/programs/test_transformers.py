"""Hugging Face models, made from their configurations, as LightningModules."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lossless_fits import assert_trains_as_lightnings_ddp
from torch import Tensor
from torch.utils.data import DataLoader

pytestmark = pytest.mark.exhaustive

_VOCABULARY = 128


class _HuggingFace(LightningModule):
    """What tutorials do: the model computes the loss from the labels."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))]


def _gpt2(*, checkpointing: dict[str, Any] | None = None) -> tuple[LightningModule, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_VOCABULARY,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return _with_data(model, checkpointing)


def _llama(*, checkpointing: dict[str, Any] | None = None) -> tuple[LightningModule, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return _with_data(LlamaForCausalLM(config), checkpointing)


def _t5(*, checkpointing: dict[str, Any] | None = None) -> tuple[LightningModule, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config)
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
    return _with_data(model, checkpointing)


def _with_data(model: Any, checkpointing: dict[str, Any] | None) -> tuple[LightningModule, Any]:
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    tokens = torch.randint(0, _VOCABULARY, (64, 16), generator=torch.Generator().manual_seed(1))
    return _HuggingFace(model), DataLoader(tokens, batch_size=4)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def transformers() -> None:
    pytest.importorskip("transformers", reason="benchmarks/programs.sh installs and runs this")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [_gpt2, _llama, _t5])
def test_trains_as_with_lightnings_ddp(make: Any, options: dict[str, Any]) -> None:
    """If it fails, a fine-tuning script gets another model from a plan that loses nothing."""
    assert_trains_as_lightnings_ddp(make, **options)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("make", [_gpt2, _llama, _t5])
def test_gradient_checkpointing(make: Any, use_reentrant: bool) -> None:
    """If it fails, gradient checkpointing and a comm hook do not go together."""
    checkpointing = {"use_reentrant": use_reentrant}
    options: dict[str, Any] = {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    assert_trains_as_lightnings_ddp(partial(make, checkpointing=checkpointing), **options)
