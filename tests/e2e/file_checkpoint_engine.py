"""Sends weights to separate engines through a file; verl's own transports need accelerators.

The setting ``checkpoint_engine.custom_backend_module`` names this module.
"""

import asyncio
import tempfile
from pathlib import Path

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master = is_master

    def prepare(self) -> str:
        return tempfile.mkdtemp(prefix="weights-") if self._is_master else ""

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[str]) -> tuple[dict, dict]:
        return {"folder": metadata[:1] * actors}, {"folder": metadata[:1] * rollouts}

    def init_process_group(self, folder: str) -> None:
        self._path = Path(folder) / "weights.pt"

    def finalize(self) -> None:
        if self._is_master:
            self._path.unlink()
            self._path.parent.rmdir()

    async def send_weights(self, weights, global_steps=None) -> None:
        content = {name: tensor.detach().clone() for name, tensor in weights}
        torch.save(content, self._path.with_suffix(".tmp"))
        self._path.with_suffix(".tmp").rename(self._path)

    async def receive_weights(self, global_steps=None):
        while not self._path.exists():
            await asyncio.sleep(0.05)
        for name, tensor in torch.load(self._path).items():
            yield name, tensor
