"""The networks that `gpu.py` trains: they need neither torchvision nor data, and compute the same bits every time."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import shard

NUM_TOKENS, LENGTH = 512, 32
_NUM_HEADS = 4
_NUM_SAMPLES = 4096
IMAGE_SIZE, NUM_CLASSES = 224, 1000


class VisionTransformer(nn.Module):
    """A vision transformer with patches of 32 pixels. As many parameters as torchvision's ViT-L/32 by default.

    Args:
        width: of the residual stream.
        num_layers: of the encoder.
        num_heads: of each layer.
    """

    def __init__(self, width: int = 1024, num_layers: int = 24, num_heads: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 32, 32)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 1 + (IMAGE_SIZE // 32) ** 2, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, 224, 224)`` to ``(B, 1000)``."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), patches], dim=1) + self.positions
        head: Tensor = self.head(self.encoder(tokens)[:, 0])
        return head


SIZES: dict[str, dict[str, int]] = {
    "plain_vit_l_32": {},
    "plain_vit_small": {"width": 512, "num_layers": 8, "num_heads": 8},
    "plain_vit_tiny": {"width": 64, "num_layers": 2, "num_heads": 2},
}
"""Vision transformers of 306, 27 and 0.4 million parameters, by name."""


class Block(nn.Module):
    """Attention and two linear layers, of operations whose gradients are the same bits in every run on a GPU.

    Args:
        width: of the residual stream.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, T, D)`` to ``(B, T, D)``."""
        size, length, width = x.shape
        head = width // _NUM_HEADS
        q, k, v = self.qkv(self.attention_norm(x)).view(size, length, 3, _NUM_HEADS, head).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / head**0.5, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class TokenModel(LightningModule):
    """Learns which of 64 sequences of tokens it sees, with AdamW.

    Args:
        is_tiny: for the CPU.
        is_sharded: by FSDP2, each block by itself.
        has_unused: parameters that no loss depends on.
        compiler: backend of `torch.compile` for each block; None for no compiler.

    Attributes:
        losses: of every batch.
    """

    def __init__(
        self,
        *,
        is_tiny: bool = False,
        is_sharded: bool = False,
        has_unused: bool = False,
        compiler: str | None = None,
    ) -> None:
        super().__init__()
        width, num_layers = (16, 1) if is_tiny else (128, 3)
        self.embedding = nn.Embedding(NUM_TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        if compiler is not None:
            for block in self.blocks:
                block.compile(backend=compiler)
        self.head = nn.Linear(width, NUM_TOKENS)
        if has_unused:
            self.unused = nn.Linear(width, width)
        self.is_sharded, self.is_tiny = is_sharded, is_tiny
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        """Shards, where that is asked for."""
        if self.is_sharded:
            shard(self, self.device_mesh, blocks=Block)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ``(B, T)`` to ``(B, T, NUM_TOKENS)``."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of the next tokens."""
        (tokens,) = batch
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2 if self.is_tiny else 1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the same batches every time."""
        generator = torch.Generator().manual_seed(7)
        sequences = torch.randint(0, NUM_TOKENS, (64, LENGTH + 1), generator=generator)
        chosen = sequences[torch.randint(0, len(sequences), (_NUM_SAMPLES,), generator=generator)]
        return DataLoader(TensorDataset(chosen), batch_size=4 if self.is_tiny else 16)
