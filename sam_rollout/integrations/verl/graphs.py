"""Which captured graphs a rollout's decoding runs in, from the composed configuration.

Sizes of graphs (``cudagraph_capture_sizes``) count tokens, and an engine that speculates decodes
1 + k of them a request: sizes chosen for 128 requests would cover 32. So with drafts each size is
captured 1 + k times as large, too, and both sides of a comparison have graphs for as many requests.
The smaller ones stay: for steps without drafts in graphs of pieces, and for the tail.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import SamConfig

MODE = "actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode"
SIZES = "actor_rollout_ref.rollout.cudagraph_capture_sizes"
VERLS_MODE = "FULL_AND_PIECEWISE"  # where none is given
# Without full graphs for other steps than decoding, and without graphs of pieces.
DECODE_ONLY = "FULL_DECODE_ONLY"
ENGINES_LARGEST = 512  # tokens, where no sizes are given


def graph_mode(config: DictConfig) -> str:
    """Name of vLLM's CUDAGraphMode; NONE in eager mode."""
    if config.actor_rollout_ref.rollout.enforce_eager:
        return "NONE"
    return str(OmegaConf.select(config, MODE) or VERLS_MODE).upper()


def tokens_per_request(sam: SamConfig) -> int:
    """Tokens of a request in the decoding steps that full graphs are captured for."""
    return 1 + sam.max_draft_tokens if sam.enabled else 1


def capture_sizes(config: DictConfig, sam: SamConfig) -> list[int]:
    """Sizes to capture, tokens; empty where the engine chooses them, or captures nothing."""
    rollout = config.actor_rollout_ref.rollout
    given = [] if rollout.enforce_eager else list(rollout.cudagraph_capture_sizes or ())
    # Without full graphs steps of a few drafting requests fit as they are; a model drafts for all.
    if "FULL" not in graph_mode(config) and not sam.drafts_with_model:
        return given
    each = tokens_per_request(sam)
    # Of all requests at once at most: larger graphs would never be used.
    larger = {min(size, rollout.max_num_seqs) * each for size in given}
    return sorted({*given, *larger})


def covered_requests(config: DictConfig, sam: SamConfig) -> int:
    """Most requests whose decoding step, drafts included, fits a graph; 0 in eager mode."""
    if graph_mode(config) == "NONE":
        return 0
    largest = max(capture_sizes(config, sam), default=ENGINES_LARGEST)
    return min(largest // tokens_per_request(sam), config.actor_rollout_ref.rollout.max_num_seqs)


def filled_up_requests(config: DictConfig, sam: SamConfig) -> int:
    """Most requests of a step that is filled up to k drafts whatever the gate says.

    What the proposer settles with the engine's own graphs (``padding_by_rows``), before there are
    any.
    """
    if not sam.enabled:
        return 0
    rollout = config.actor_rollout_ref.rollout
    setting = sam.pad_drafts
    room = min(rollout.max_num_seqs, rollout.max_num_batched_tokens // tokens_per_request(sam))
    if setting == "always":
        return room
    every_step = setting == "auto" and graph_mode(config) == DECODE_ONLY
    return min(room, covered_requests(config, sam)) if every_step else 0
