"""A CUDA device without a GPU: a runtime, a driver and NCCL of host memory and threads, in front of torch's libraries.

The real DDP, FSDP2 and ProcessGroupNCCL run on it with values, which a schedule brings out of order wherever nothing
keeps them in order; see `Stream` in ``native/device.h``. Modules that the launcher imports do not import torch by
themselves, as torch must find these libraries when it is imported.
"""
