"""A compressor of your own: only the largest gradients travel, and error feedback sends the others later.

python examples/own_compressor.py
python examples/own_compressor.py own/epoch=0.ckpt      # resumes from there, bit for bit
commopt report own
"""

import sys
from dataclasses import dataclass

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from model import Classifier, Points

from lightning_commopt import Claims, CommOptDDP, Compressor, register_compressor
from lightning_commopt.callbacks import CommTimeMonitor, RunRecorder, SpeedMonitor


@register_compressor("topk")
@dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """Sends the ``share`` of a bucket that is largest in magnitude, and its places (Aji and Heafield, EMNLP 2017)."""

    share: float = 0.05
    claims = Claims(error_bound=1.0)  # better than to send nothing: what `check_compressor` holds it to

    def init(self, layout, device, step=0):
        return {}

    def rounds(self, flat, layout, state, channel, residual=None):
        wanted = flat if residual is None else flat + residual
        places = wanted.abs().topk(self._num_sent(layout)).indices
        sent = wanted[places].float()
        received = yield channel.all_gather(torch.cat([places.int(), sent.view(torch.int32)]))
        flat.zero_()
        for places_of_rank, values in (row.chunk(2) for row in received):
            flat.index_add_(0, places_of_rank, values.view(torch.float32).to(flat.dtype) / channel.size)
        if residual is not None and flat.isfinite().all():
            residual.copy_(wanted.index_add_(0, places, -sent.to(wanted.dtype)))

    def wire_bytes(self, layout, world_size):
        return world_size * self._num_sent(layout) * 8 // 2  # an all-gather is half an all-reduce

    def _num_sent(self, layout):
        return max(1, int(self.share * layout.numel))


def main() -> None:
    seed_everything(0)
    comm_hook = {"name": "error_feedback", "inner": {"name": "topk", "share": 0.05}}
    callbacks = [RunRecorder(dirpath="own"), SpeedMonitor(), CommTimeMonitor(dirpath="own")]
    callbacks.append(ModelCheckpoint("own", "{epoch}", save_top_k=-1))
    trainer = Trainer(devices=2, max_epochs=3, strategy=CommOptDDP(comm_hook=comm_hook), callbacks=callbacks)
    trainer.fit(Classifier(), Points(), ckpt_path=sys.argv[1] if len(sys.argv) > 1 else None)


if __name__ == "__main__":
    main()
