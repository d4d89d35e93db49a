"""What a simulation needs to know of an experiment, from its composed configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sam_rollout.config import SamConfig
from sam_rollout.simulation.rollout import Fleet
from sam_rollout.sizing import HardwareConfig, ModelShape, RolloutLayout
from sam_rollout.sizing.memory import rollout_memory, rollout_weights


@dataclasses.dataclass(frozen=True)
class Setup:
    """An experiment on paper.

    Attributes:
        prompts: of a round.
        siblings: responses to each of them.
        max_response: tokens.
        tensor: ranks that share an engine.
        weight_bytes: of the weights on a die.
    """

    name: str
    fleet: Fleet
    prompts: int
    siblings: int
    max_response: int
    tensor: int
    weight_bytes: float
    shape: ModelShape
    sam: SamConfig

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> Setup:
        """From a configuration as Hydra composes it, everything resolved."""
        rollout = config["actor_rollout_ref"]["rollout"]
        trainer = config["trainer"]
        layout = RolloutLayout(
            devices=trainer["nnodes"] * trainer["n_gpus_per_node"],
            tensor=rollout["tensor_model_parallel_size"],
            data=rollout["data_parallel_size"],
            expert=rollout["expert_parallel_size"],
        )
        shape = ModelShape.from_mapping(config["model_shape"])
        memory = rollout_memory(
            shape,
            layout,
            HardwareConfig.from_mapping(config["hardware"]),
            memory_fraction=rollout["gpu_memory_utilization"],
            max_num_seqs=rollout["max_num_seqs"],
            max_num_batched_tokens=rollout["max_num_batched_tokens"],
        )
        kv_tokens = int(memory["KV cache"] // shape.kv_cache_bytes(layout.tensor))
        fleet = Fleet(
            layout.engines,
            rollout["max_num_seqs"],
            # Experts spread over data parallel engines make these step together.
            lockstep=layout.data if layout.expert > 1 else 1,
            kv_tokens=max(kv_tokens, 0),
        )
        return cls(
            name,
            fleet,
            prompts=config["dynamic_sampling"]["gen_batch_size"],
            siblings=rollout["n"],
            max_response=config["data"]["max_response_length"],
            tensor=layout.tensor,
            weight_bytes=sum(rollout_weights(shape, layout).values()),
            shape=shape,
            sam=SamConfig.from_mapping({**config["sam"], "enabled": True}),
        )
