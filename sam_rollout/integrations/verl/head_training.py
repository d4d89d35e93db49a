"""Trains the draft head inside verl's training processes, between two passes of their own.

Hidden states come from the pass over old log-probabilities. When that is done, and before the
policy is updated, the head learns on the same device: its targets are then what the policy says
now. It travels to the engines behind the policy, in the sync that ends the step, and is saved and
resumed with the policy's checkpoints.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils.device import get_device_id
from verl.workers.engine_workers import ActorRolloutRefWorker

from sam_rollout.heads.checkpoint import TRAINING
from sam_rollout.heads.hidden_states import STORED, Policy
from sam_rollout.heads.online import SHARE_OF_BUFFER, OnlineHead
from sam_rollout.heads.peers import Peers
from sam_rollout.heads.training import Learner
from sam_rollout.heads.writing import load_head, speculators_config, write_head
from sam_rollout.integrations.verl.names import HEAD_FOLDER
from sam_rollout.integrations.verl.state_capture import StateCapture
from sam_rollout.integrations.vllm.head_update import PREFIX
from sam_rollout.integrations.vllm.settings import ADDITIONAL_CONFIG_KEY, EngineSettings

STATE_FILE = "training.pt"


class HeadTraining:
    """One training process's part in the head: what of it is verl's business.

    Args:
        worker: verl's, with its policy loaded.
    """

    def __init__(self, worker: ActorRolloutRefWorker) -> None:
        extra = worker.config.rollout.engine_kwargs.vllm.additional_config[ADDITIONAL_CONFIG_KEY]
        self._source = EngineSettings.from_mapping(extra).sam.sources.model
        self._engine = worker.actor.engine
        self._model_path = str(worker.config.model.path)
        self._model_config = self._engine.model_config.hf_config.to_dict()
        settings, path = self._source.train, Path(self._source.path)
        with torch.random.fork_rng(devices=[]):  # the policy's training draws from it
            head, self._shape, vocabulary, output = load_head(path, self._model_config)
        learner = Learner(
            head.to(get_device_id()), self._policy(), self._source.max_tokens, vocabulary, output
        )
        group = torch.distributed.group.WORLD
        peers = Peers(group if torch.distributed.get_world_size() > 1 else None)
        record = path / TRAINING  # others' heads have none
        knows_nothing = record.exists() and json.loads(record.read_text()).get("updates") == 0
        self.online = OnlineHead(learner, settings, peers, trained=not knows_nothing)
        windows = SHARE_OF_BUFFER * settings.buffer_tokens / settings.window / peers.size
        rng = random.Random(peers.rank)
        most = max(1, round(windows))
        self._capture = StateCapture(
            self._engine, self._shape.target_layers, settings.window, most, rng
        )
        self._passes = 0

    def reading(self, responses: int) -> Any:
        """A context for the pass over so many responses; what it brings is kept."""
        return self._capture.running(responses)

    def is_due(self) -> bool:
        """Whether this training step is one to learn in; asked once a step."""
        self._passes += 1
        return not self.online.failed and self._passes % self._source.train.every_steps == 0

    def learn(self, seconds: float) -> dict[str, float]:
        """As `OnlineHead.learn`, with what the last pass brought."""
        began_s = time.perf_counter()
        taken, self._capture.taken = self._capture.taken, []
        self.online.buffer.add(taken)
        policy = self._policy()
        self.online.charge(self._capture.spent_s + time.perf_counter() - began_s)
        return self.online.learn(policy, seconds)

    def _policy(self) -> Policy:
        """The policy's two matrices, whole, on this process's device."""
        module = self._engine.module
        inputs, outputs = (
            part.weight for part in (module.get_input_embeddings(), module.get_output_embeddings())
        )
        embeddings = _whole(inputs)
        return Policy(None, embeddings, embeddings if outputs is inputs else _whole(outputs))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What a sync brings the engines."""
        for name, tensor in self.online.learner.head.state_dict().items():
            # A CPU's engine computes in float32, as the head is trained.
            dtype = tensor.dtype if tensor.device.type == "cpu" else STORED
            yield PREFIX + name, tensor.to(dtype)

    def save(self, folder: Path) -> None:
        """Write the head as vLLM reads it, and beside it what a resumed training goes on from."""
        online = self.online
        config = speculators_config(
            self._shape, self._model_config, self._model_path, self._source.max_tokens
        )
        record = {"updates": online.updates, "settings": self._source.train.to_mapping()}
        write_head(folder, online.learner, config, self._model_config, record)
        torch.save(online.state_dict(), folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote; from the run's first head where there is nothing."""
        if (file := folder / STATE_FILE).exists():
            self.online.load_state_dict(torch.load(file, map_location=get_device_id()))


def _whole(weight: Tensor) -> Tensor:
    weight = weight.detach().to(get_device_id())
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).float()


class HeadTrainingWorker(ActorRolloutRefWorker):
    """verl's worker of policy and rollout, with a draft head that is trained along."""

    _head: HeadTraining

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy as verl does, then the head."""
        super().init_model()
        self._head = HeadTraining(self)
        self.rollout.head_weights = self._head.weights

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: Any) -> Any:
        """As verl's; keeps hidden states for the head where it is due to learn."""
        if not self._head.is_due():
            return super().compute_log_prob(data)
        with self._head.reading(len(data)):
            return super().compute_log_prob(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train_head(self, seconds: float) -> dict[str, float]:
        """Let the head learn for so long; its metrics."""
        return self._head.learn(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_head(self, folder: str) -> None:
        """Write the head into a folder, from one process."""
        if self.rank == 0:
            self._head.save(Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """As verl's; the head lies in a folder beside the policy."""
        super().save_checkpoint(local_path, *args, **kwargs)
        self.save_head(str(Path(local_path) / HEAD_FOLDER))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """As verl's, and the head that was trained with that policy."""
        super().load_checkpoint(local_path, *args, **kwargs)
        self._head.load(Path(local_path) / HEAD_FOLDER)
