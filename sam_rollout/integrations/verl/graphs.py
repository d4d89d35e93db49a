"""Chooses the sizes of the captured graphs (CUDA or ACL) that a rollout decodes with.

The size of a graph (in ``cudagraph_capture_sizes``) is a number of tokens. A request with k draft
tokens has 1 + k tokens in a decoding step. With drafts, graphs are captured for each given size and
for 1 + k times that size, so that as many requests fit into a graph as without drafts.
"""

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import SamConfig

MODE = "actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode"
SIZES = "actor_rollout_ref.rollout.cudagraph_capture_sizes"
VERLS_MODE = "FULL_AND_PIECEWISE"  # verl's default
# vLLM's mode in which decoding steps have full graphs, and all other steps have none.
DECODE_ONLY = "FULL_DECODE_ONLY"
ENGINES_LARGEST = 512  # tokens in the engine's largest graph if no sizes are given


def graph_mode(config: DictConfig) -> str:
    """Return the name of vLLM's CUDAGraphMode; "NONE" in eager mode."""
    if config.actor_rollout_ref.rollout.enforce_eager:
        return "NONE"
    return str(OmegaConf.select(config, MODE) or VERLS_MODE).upper()


def tokens_per_request(sam: SamConfig) -> int:
    """Return how many tokens one request has in a decoding step with full graphs."""
    return 1 + sam.max_draft_tokens if sam.enabled else 1


def capture_sizes(config: DictConfig, sam: SamConfig) -> list[int]:
    """Return the graphs' sizes in tokens; empty if the engine chooses them, or in eager mode."""
    rollout = config.actor_rollout_ref.rollout
    given = [] if rollout.enforce_eager else list(rollout.cudagraph_capture_sizes or ())
    # Without full graphs and without a drafting model, graphs of the given sizes suffice, because
    # few requests have drafts.
    if "FULL" not in graph_mode(config) and not sam.drafts_with_model:
        return given
    each = tokens_per_request(sam)
    larger = {min(size, rollout.max_num_seqs) * each for size in given}
    return sorted({*given, *larger})


def covered_requests(config: DictConfig, sam: SamConfig) -> int:
    """Return how many requests with drafts fit into the largest graph; 0 in eager mode."""
    if graph_mode(config) == "NONE":
        return 0
    largest = max(capture_sizes(config, sam), default=ENGINES_LARGEST)
    return min(largest // tokens_per_request(sam), config.actor_rollout_ref.rollout.max_num_seqs)
