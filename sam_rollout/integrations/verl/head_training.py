"""Trains the draft head inside verl's training processes, before verl updates the policy.

Hidden states are captured in verl's forward pass for the old log-probabilities. The next weight
sync sends the policy and then the head to the engines. Checkpoints of the policy include the head.
"""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.workers.engine_workers import ActorRolloutRefWorker

from sam_rollout.heads.checkpoint import is_fresh
from sam_rollout.heads.hidden_states import STORED
from sam_rollout.heads.online import SHARE_OF_BUFFER, OnlineHead
from sam_rollout.heads.peers import Peers
from sam_rollout.heads.writing import load_head, write_head
from sam_rollout.integrations.verl.policy_part import FsdpPart, this_device
from sam_rollout.integrations.verl.registered_names import HEAD_FOLDER
from sam_rollout.integrations.verl.state_capture import StateCapture
from sam_rollout.integrations.vllm.engine_settings import ADDITIONAL_CONFIG_KEY, EngineSettings
from sam_rollout.integrations.vllm.model_drafts.head_update import PREFIX

STATE_FILE = "training.pt"


class HeadTraining:
    """Trains the head in one of verl's training processes."""

    def __init__(self, worker: ActorRolloutRefWorker) -> None:
        extra = worker.config.rollout.engine_kwargs.vllm.additional_config[ADDITIONAL_CONFIG_KEY]
        self._source = EngineSettings.from_json(extra).sam.sources.model
        engine = worker.actor.engine
        if worker.config.actor.strategy == "megatron":
            # Megatron is installed only where a run trains with it.
            from sam_rollout.integrations.verl.policy_part_megatron import MegatronPart

            self._part: Any = MegatronPart(engine)
        else:
            self._part = FsdpPart(engine)
        self._model_path = str(worker.config.model.path)
        self._model_config = engine.model_config.hf_config.to_dict()
        settings, path = self._source.train, Path(self._source.path).expanduser()
        with torch.random.fork_rng(devices=[]):  # leaves the global generator unchanged
            head = load_head(path, self._model_config)
        group = torch.distributed.group.WORLD
        peers = self._peers = Peers(group if torch.distributed.get_world_size() > 1 else None)
        self.online = OnlineHead(head, self._source.max_tokens, settings, peers, not is_fresh(path))
        share = SHARE_OF_BUFFER * settings.buffer_tokens / settings.window / peers.size
        rng, windows = random.Random(engine.get_data_parallel_rank()), max(1, round(share))
        layers = head.shape.target_layers
        self._capture = StateCapture(self._part, layers, settings.window, windows, rng)

    def reading(self, responses: int) -> AbstractContextManager[None]:
        """Return a context that captures hidden states in verl's forward pass over a batch."""
        return nullcontext() if self.online.failed else self._capture.running(responses)

    def learn(self, seconds: float) -> dict[str, float]:
        """Train on the captured states, for at most the given time; return the metrics."""
        taken, self._capture.taken = self._capture.taken, []
        if not self.online.failed:
            self.online.buffer.add(taken)
            self.online.charge(self._capture.spent_s)
            self.online.problem = self._capture.problem
        return self.online.learn(self._part.matrices, this_device(), seconds)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.online.trainable.head.state_dict().items():
            sent = tensor.to(this_device())
            # Engines on a CPU compute in float32, as the training of the head does.
            yield PREFIX + name, sent if sent.device.type == "cpu" else sent.to(STORED)

    def save(self, folder: Path) -> None:
        """Write the head, in vLLM's format, and the state of its training into a folder."""
        online, settings = self.online, self._source.train.to_mapping()
        write_head(
            folder, online.trainable, self._model_config, self._model_path,
            self._source.max_tokens, {"updates": online.updates, "settings": settings},
        )  # fmt: skip
        torch.save(online.state_dict(), folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Load the files that `save` wrote; keep the run's first head if no process finds them.

        Raises:
            FileNotFoundError: Some processes find the files, and others do not.
        """
        file = folder / STATE_FILE
        votes = torch.tensor([float(file.exists())]).to(this_device())
        found = self._peers.sum(votes).item()
        if found == self._peers.size:
            self.online.load_state_dict(torch.load(file, map_location="cpu"))
        elif found:
            raise FileNotFoundError(f"{file}: {found:.0f} of {self._peers.size} processes have it")
        elif self._peers.rank == 0:
            print(f"No draft head in {folder}: training goes on from the first head.", flush=True)


class HeadTrainingWorker(ActorRolloutRefWorker):
    """verl's worker for policy and rollout; it also trains a draft head."""

    _head: HeadTraining

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        self._head = HeadTraining(self)
        self.rollout.head_weights = self._head.weights

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: Any) -> Any:
        with self._head.reading(len(data)):
            return super().compute_log_prob(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train_head(self, seconds: float) -> dict[str, float]:
        return self._head.learn(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_head(self, folder: str) -> None:
        if self.rank == 0:
            self._head.save(Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(local_path, *args, **kwargs)
        self.save_head(str(Path(local_path) / HEAD_FOLDER))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(local_path, *args, **kwargs)
        self._head.load(Path(local_path) / HEAD_FOLDER)
