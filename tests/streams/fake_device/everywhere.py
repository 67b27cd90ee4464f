"""Gives the fake device to a program and to all processes that it starts: what its processes do first."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fake_device.loading import begin_schedule, load_device, take_device

LIBRARIES, FOR_CPU, LATE = "FAKE_DEVICE_LIBRARIES", "FAKE_DEVICE_FOR_CPU", "FAKE_DEVICE_LATE"
"""Variables with the libraries of the device; set if what asks for the CPU gets the device; and with a bit for each
stream that works only when somebody waits for it, in the order of their first work; empty if streams work at once."""

_CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
_BACKENDS = "cpu:gloo,cuda:nccl"


def install() -> None:
    """Makes torch have the fake device, as soon as this process imports it."""
    driver, runtime, operators = os.environ[LIBRARIES].split(os.pathsep)
    after: dict[str, Callable[[ModuleType], None]] = {
        "torch": lambda torch: _take_device(operators),
        "lightning_commopt.compressors.kernels.dispatch": lambda dispatch: dispatch.do_without_triton(),
    }
    if os.environ.get(FOR_CPU):
        after |= dict.fromkeys(_CONNECTORS, _accelerate)
        after["torch.distributed.distributed_c10d"] = _with_both_backends
        after["torch.distributed.device_mesh"] = _mesh_of_devices
        after["torch._tensor"] = _numpy_of_devices
    sys.meta_path.insert(0, _AfterImport({"torch": lambda: load_device(driver, runtime)}, after))


def _take_device(operators: str) -> None:
    take_device(operators)
    if late := os.environ.get(LATE):
        begin_schedule(int(late, 0))


class _AfterImport:
    """Finds modules as they are found otherwise, and calls functions before and after they are executed."""

    def __init__(self, before: dict[str, Callable[[], None]], after: dict[str, Callable[[ModuleType], None]]) -> None:
        self._before, self._after = before, after
        self._is_looking = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._after or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                self._before.get(name, lambda: None)()
                execute(module)
                self._after[name](module)

            loader.exec_module = exec_module  # type: ignore[method-assign]  # a loader of this module alone
        return spec


def _accelerate(connectors: ModuleType) -> None:
    connector = getattr(connectors, _CONNECTORS[connectors.__name__])
    connect = connector.__init__

    @functools.wraps(connect)
    def connect_device(self: Any, *args: Any, accelerator: Any = "auto", **options: Any) -> None:
        connect(self, *args, accelerator="gpu" if accelerator == "cpu" else accelerator, **options)

    connector.__init__ = connect_device


def _with_both_backends(c10d: Any) -> None:
    initialize = c10d.init_process_group

    @functools.wraps(initialize)
    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        initialize(_BACKENDS if backend in (None, "gloo", "nccl") else backend, *args, **options)

    c10d.init_process_group = init_process_group


def _mesh_of_devices(meshes: Any) -> None:
    initialize = meshes.init_device_mesh

    @functools.wraps(initialize)
    def init_device_mesh(device_type: str, *args: Any, **options: Any) -> Any:
        return initialize("cuda" if device_type == "cpu" else device_type, *args, **options)

    meshes.init_device_mesh = init_device_mesh


def _numpy_of_devices(tensors: Any) -> None:
    numpy = tensors.Tensor.numpy
    tensors.Tensor.numpy = lambda self, *args, **options: numpy(self.cpu(), *args, **options)
