"""Handles drafts and weights of a draft model that vllm-ascend runs.

vllm-ascend's drafters call `compute_logits` once per draft token and take the likeliest token. We
replace this method while the drafter runs, unless all passes are captured in one graph.
"""

from typing import Any

import torch

from sam_rollout.config import ConfigError
from sam_rollout.integrations.vllm.model_drafts.drafter_weights import (
    reads_policy,
    share_embeddings,
)
from sam_rollout.integrations.vllm.model_drafts.engine_drafter import EngineDrafter
from sam_rollout.integrations.vllm.wrapping import wrap_once
from sam_rollout.sources.model import ModelSourceConfig


class AscendEngineDrafter(EngineDrafter):
    """Wraps the drafting of vllm-ascend's runner; each rank of an engine has one wrapper.

    Raises:
        ConfigError: The drafter has too few positions for the longest texts.
    """

    def __init__(
        self, runner: Any, config: ModelSourceConfig, *others: Any, **options: Any
    ) -> None:
        drafter = runner.drafter
        passes_one_by_one = hasattr(drafter, "_run_merged_draft") and not drafter.parallel_drafting
        self._is_open = passes_one_by_one and drafter._runnable == drafter._run_merged_draft
        drafting = runner.speculative_config.draft_model_config  # None if the drafter has no model
        needed = runner.model_config.max_model_len
        if drafting is not None and drafting.max_model_len < needed:  # vllm-ascend would use it
            raise ConfigError(
                "sam.sources.model.path",
                config.path,
                f"knows {drafting.max_model_len} positions, but max_model_len is {needed}: raise "
                "max_position_embeddings in its config.json (docs/draft_models.md)",
            )
        self._compute_logits: Any = None
        self._rows = 0
        super().__init__(runner, config, *others, **options)

    def _wrap_choice(self) -> None:
        """Do nothing: `_ask` replaces the choice of tokens while vllm-ascend's drafter runs."""

    def _ask(self, *args: Any, **kwargs: Any) -> Any:
        sampled, sampling, scheduler_output, metadata, *_others = args
        if not self._is_open:
            return self._propose(*args, **kwargs)
        drafter = self._runner.drafter
        model, most = drafter.get_model(), drafter.num_speculative_tokens
        self._find_positions(sampled, sampling, metadata)
        self._rows, self._compute_logits = len(sampled), model.compute_logits
        model.compute_logits = self._with_choice
        asked = getattr(scheduler_output, "num_spec_tokens_to_schedule", most)  # from our scheduler
        drafter.num_speculative_tokens = max(1, min(asked, self._passes))
        try:
            return self._propose(*args, **kwargs)
        finally:
            drafter.num_speculative_tokens = most
            del model.compute_logits

    def _with_choice(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Choose tokens, store their probabilities; return logits whose maxima are these tokens."""
        logits = self._compute_logits(*args, **kwargs)
        tokens = self._pick(logits[: self._rows])  # rows of padding follow
        if self._noise is not None:
            logits[: self._rows].scatter_(1, tokens.unsqueeze(1), torch.inf)
        return logits


def share_weights() -> None:
    """Let the draft heads of our engines share the policy's embedding and output layer.

    Call it only after vllm-ascend's runner was imported, because importing drafters chooses a
    device.
    """
    from vllm_ascend.spec_decode.llm_base_proposer import AscendSpecDecodeBaseProposer

    share_embeddings(AscendSpecDecodeBaseProposer)
    wrap_once(AscendSpecDecodeBaseProposer, "_maybe_share_lm_head", _sharing_output_layer)


def _sharing_output_layer(original: Any) -> Any:
    """Give EAGLE-3 heads the policy's output layer if they have none of their own.

    vllm-ascend 0.23 to 0.26 do this only for the methods `eagle` and `dflash`. This wrapper can go
    when vllm-ascend's `_maybe_share_lm_head` checks whether the head has an output layer, as vLLM's
    method does.
    """

    def share(self: Any, model: Any) -> None:
        original(self, model)
        if not reads_policy(self) or getattr(self.model, "has_own_lm_head", True):
            return
        owner = model if hasattr(model, "lm_head") else model.get_language_model()
        self.model.lm_head = owner.lm_head

    return share
