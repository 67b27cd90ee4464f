"""Small models, one for each thing that a training step may do, and how to train them on a rank."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_commopt.compressors.base import as_real
from support.lightnings import BaseFinetuning, Callback, LightningModule, Trainer, callbacks

FEATURES = 6
Params = dict[str, np.ndarray]


class Tiny(LightningModule):
    """Three layers, which several small buckets can share."""

    lr = 0.1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Keeping(Tiny):
    """Zeroes gradients in place."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class Manual(Tiny):
    """Steps by itself, once for every ``accumulate`` batches."""

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        if (batch_idx + 1) % self.accumulate:
            no_sync = getattr(self.trainer.strategy, "block_backward_sync", nullcontext)
            with no_sync():
                self.manual_backward(self.loss(batch))
            return
        self.manual_backward(self.loss(batch))
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]


class Gan(Tiny):
    """Two optimizers that take turns within a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, turn: int = 0) -> Tensor:
        fake = self.layers(x)
        return self.critic(fake if turn == 0 else fake.detach())

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for turn, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            judged = self(batch[0], turn)
            loss = F.mse_loss(judged, batch[1]) if turn == 0 else -judged.sigmoid().log().mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[Optimizer]:  # type: ignore[override]
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.layers, self.critic)]


class Unused(Tiny):
    """Has one layer that no step uses, and one that every second batch uses (``now_and_then``)."""

    def __init__(self, now_and_then: bool = False) -> None:
        super().__init__()
        self.never = nn.Linear(FEATURES, 5)
        self.sometimes = nn.Linear(FEATURES, 1)
        self.now_and_then = now_and_then

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.sometimes(batch[0]).square().mean() if self.now_and_then and batch_idx % 2 else loss


class Frozen(Tiny):
    """Trains all layers but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Thaw(BaseFinetuning):
    """Unfreezes the first layer in epoch 1."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.layers[0])  # type: ignore[index]

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer)  # type: ignore[index]


class FreezeLater(Callback):
    """Freezes the first layer in epoch 1."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.layers[0].requires_grad_(False)  # type: ignore[index]


class AveragingWeights(callbacks.StochasticWeightAveraging):
    """Keeps the average with which an epoch only computes the statistics of BatchNorm."""

    average: Params

    def __init__(self) -> None:
        super().__init__(swa_lrs=0.05, swa_epoch_start=1)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self.average = {name: x.detach().double().numpy() for name, x in pl_module.named_parameters()}


class Thawing(Frozen):
    """What `Thaw` trains."""

    def __init__(self) -> None:
        Tiny.__init__(self)


class Tied(Tiny):
    """Uses one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(24, 24)
        self.back.weight = self.layers[2].weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[4](self.back(self.layers[:4](x)).tanh())


class Checkpointed(Tiny):
    """Computes the inner layers again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[:2](x)
        return self.layers[4](checkpoint(self.layers[2:4], hidden, use_reentrant=self.use_reentrant))


class BatchNormed(Tiny):
    """Has buffers that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.norm(x))


class _CenterOverRanks(torch.autograd.Function):
    """Subtracts the mean over the batches of all ranks, with collectives in both directions, as SyncBatchNorm does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - _mean_over_ranks(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] - _mean_over_ranks(grads[0])


def _mean_over_ranks(x: Tensor) -> Tensor:
    mean = x.mean(0)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


class Talking(Tiny):
    """Issues collectives of its own between all layers, in forward and in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(_CenterOverRanks.apply(x))
        return x


class Embedded(Tiny):
    """Adds rows of a table, whose sparse gradient has the memory of the gradient that the first layer gets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 24, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1:](self.layers[0](x) + self.table((x[:, 0].abs() * 10).long() % 10))

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Compiled(Tiny):
    """Runs its layers through ``torch.compile``."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        torch.compiler.reset()
        self.layers = torch.compile(self.layers, backend=backend)  # type: ignore[assignment]


def loader(samples: int = 24, batch_size: int = 4) -> DataLoader[Any]:
    """Returns the same samples in the same order everywhere, dealt out to the ranks one by one."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_ranks, rank, shuffle=False
    )  # Lightning's own would shuffle
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


class SelfFed(Tiny):
    """Brings its data, which it makes when the ranks are there; rank 1 may be told to raise."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.breaks and batch_idx == 1 and self.global_rank == 1:
            raise ArithmeticError("broken on purpose")
        return super().training_step(batch, batch_idx)


def trainer(strategy: Any, **options: Any) -> Trainer:
    """Returns a quiet trainer on CPU, two epochs long and for every rank of the group unless told otherwise."""
    devices = dist.get_world_size() if dist.is_initialized() else 1
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    defaults = {"accelerator": "cpu", "devices": devices, "max_epochs": 2, "num_sanity_val_steps": 0, **quiet}
    return Trainer(strategy=strategy, **{**defaults, **options})


def numbers(module: nn.Module) -> Params:
    """Returns the parameters and buffers; complex ones as pairs."""
    state = {name: as_real(tensor).double().numpy() for name, tensor in module.state_dict().items()}
    return {name.replace("_orig_mod.", ""): values for name, values in state.items()}


def assert_same(got: Params, expected: Params, rtol: float = 0.0, of: str = "") -> None:
    """Compares parameters: bit by bit, unless a tolerance is given; ``of`` names what they are of."""
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=rtol, atol=rtol / 10, err_msg=f"{of} {name}")


class Steady(Tiny):
    """Trains on the same batches in every epoch.

    Args:
        begin_batch: called with rank, epoch and index of a batch before it is trained on.
    """

    def __init__(self, begin_batch: Callable[[int, int, int], None] = lambda *place: None) -> None:
        super().__init__()
        self.begin_batch = begin_batch

    def train_dataloader(self) -> Any:
        return loader(24)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begin_batch(self.global_rank, self.current_epoch, batch_idx)
        return super().training_step(batch, batch_idx)
