"""A small GPT over bytes, and the Python standard library's own sources to train it on.

Shapes: ``B`` sequences of ``T`` bytes, width ``D``, ``H`` heads.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics.text import Perplexity

from lightning_commopt.strategy.sharding import shard

_NUM_BYTES = 256  # the values of a byte
_VALIDATION_EVERY = 10  # each tenth file is for validation, so that it has files from the whole alphabet


class Block(nn.Module):
    """Attention and two linear layers, each on a norm of the stream and added to it.

    Args:
        width: width of the residual stream.
        num_heads: attention heads; must divide ``width``.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, T, D)`` to ``(B, T, D)``."""
        size, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(size, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.attention_out(mixed)
        mapped: Tensor = x + self.mlp(x)
        return mapped


class GPT(LightningModule):
    """A byte-level GPT with tied embeddings, trained with AdamW and one learning-rate cycle.

    Logs ``train_loss``, and in validation ``val_loss``, both in nats a byte, and ``val_perplexity``, over all ranks.

    Args:
        width: width of the residual stream.
        num_layers: transformer blocks.
        num_heads: attention heads in a block; must divide ``width``.
        context: maximal bytes in a sequence.
        vocabulary: rows of the tied embedding. Only 256 are used; more make it as large as with real tokens.
        activation_checkpointing: keep only the blocks' inputs for backward, and recompute the blocks there.
        replicated: keep the parameters between forward and backward; only if the model is sharded.
        param_dtype: dtype in which parameters travel and are used, such as "bfloat16"; None for float32. It has an
            effect only if the model is sharded.
        learning_rate: learning rate at the cycle's peak.
        warmup_share: share of the steps in which the learning rate rises.
    """

    def __init__(
        self,
        *,
        width: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        context: int = 64,
        vocabulary: int = _NUM_BYTES,
        activation_checkpointing: bool = False,
        replicated: bool = False,
        param_dtype: str | None = None,
        learning_rate: float = 3e-3,
        warmup_share: float = 0.2,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"num_heads must divide width={width}, got {num_heads}")
        if vocabulary < _NUM_BYTES:
            raise ValueError(f"vocabulary must be at least {_NUM_BYTES}, one row for each byte, got {vocabulary!r}")
        self.save_hyperparameters()
        self.activation_checkpointing = activation_checkpointing
        self.replicated = replicated
        self.param_dtype = None if param_dtype is None else getattr(torch, param_dtype)
        self.val_perplexity = Perplexity()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def configure_model(self) -> None:
        """Shards each block, and the rest as one more unit, for strategies that need it (FSDP2)."""
        if self.device_mesh is not None:
            policy = MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=torch.float32)
            shard(self, self.device_mesh, blocks=Block, replicated=self.replicated, mp_policy=policy)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ``(B, T)`` bytes to ``(B, T, vocabulary)`` logits of the next byte."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return F.linear(self.norm(x), self.token.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        logits, targets = self(batch[:, :-1]), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch))
        self.val_perplexity.update(logits, targets)
        self.log("val_perplexity", self.val_perplexity, batch_size=len(batch))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns AdamW and a cycle over all steps of the fit."""
        peak, share = self.hparams["learning_rate"], self.hparams["warmup_share"]
        num_steps = self.trainer.estimated_stepping_batches
        if math.isinf(num_steps):
            raise ValueError("the learning-rate cycle needs an end: set trainer.max_steps or trainer.max_epochs")
        # OneCycleLR divides by the number of warm-up steps minus one.
        if math.isclose(share * num_steps, 1):
            share *= 1.1
        optimizer = torch.optim.AdamW(self.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR
        cycle = scheduler(optimizer, max_lr=peak, total_steps=int(num_steps), pct_start=share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    def loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class _Windows(Dataset[Tensor]):
    """A text in sequences of ``context + 1`` bytes that overlap by one."""

    def __init__(self, text: bytes, context: int) -> None:
        self._text = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        self._context = context

    def __len__(self) -> int:
        return max(0, (len(self._text) - 1) // self._context)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._context
        return self._text[start : start + self._context + 1].long()


class StdlibSources(LightningDataModule):
    """The top-level modules of the Python standard library as bytes; every tenth file is for validation.

    Args:
        context: bytes in a sequence; a batch is ``(batch_size, context + 1)``.
        batch_size: sequences in a batch of one rank.
        folder: folder of the ``*.py`` files; None for the running interpreter's standard library, unless it is a zip
            file.
    """

    def __init__(self, *, context: int = 64, batch_size: int = 8, folder: str | None = None) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.folder = Path(folder or sysconfig.get_paths()["stdlib"])

    def setup(self, stage: str) -> None:
        files = sorted(self.folder.glob("*.py"), key=lambda file: file.name)
        texts: dict[bool, list[bytes]] = {True: [], False: []}
        for number, file in enumerate(files):
            texts[number % _VALIDATION_EVERY == 0].append(file.read_bytes())
        self._validation = _Windows(b"".join(texts[True]), self.context)
        self._training = _Windows(b"".join(texts[False]), self.context)
        if not len(self._training) or not len(self._validation):
            raise FileNotFoundError(f"{self.folder} has too few Python sources; set data.folder to a folder with more")

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._training, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Returns the validation sequences in one fixed random order, so that the first batches see many files."""
        order = torch.randperm(len(self._validation), generator=torch.Generator().manual_seed(0)).tolist()
        return DataLoader(Subset(self._validation, order), batch_size=4 * self.batch_size)
