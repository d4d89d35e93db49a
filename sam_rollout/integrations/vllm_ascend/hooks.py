"""Lets vllm-ascend's model runner draft and sample with our code.

vllm-ascend 0.23 refuses vLLM's method ``custom_class``. So the plugin (``plugin.py``), or patches
of the runner's source, make the runner call the functions of this module.
"""

from typing import Any

from sam_rollout.integrations.vllm.drafting.proposer import SamProposer, is_output_rank
from sam_rollout.integrations.vllm.engine_settings import has_settings, settings_of
from sam_rollout.integrations.vllm.scheduling.late_binding import LateBinding
from sam_rollout.integrations.vllm_ascend.versions import is_supported, require_supported


class AscendLateBinding(LateBinding):
    """Wraps methods of vllm-ascend's runner; each rank of an engine has one wrapper.

    No step is prepared ahead, because attention on NPUs reads the lengths of texts on the host. So
    the runner waits for the last step's tokens before it prepares a step with drafts.
    """

    def _fits_ahead(self, rows: int) -> bool:
        return False

    def _keep_books(self, scheduler_output: Any, sampler_output: Any, *args: Any) -> Any:
        """If the step had no placeholders, leave its tokens on the device for the next step."""
        sampled = sampler_output.sampled_token_ids  # [B, N]
        one_each = sampled.shape[-1] == 1
        self._runner.input_batch.prev_sampled_token_ids = sampled if one_each else None
        return self._wrapped["_bookkeeping_sync"](scheduler_output, sampler_output, *args)


def make_drafter(vllm_config: Any, runner: Any) -> Any:
    """Make the drafter of method ``custom_class``; if it is our drafter, bind it to the runner.

    The runner may still be under construction.

    Raises:
        UnsupportedVersionError: The installed release of vllm-ascend is not supported.
    """
    require_supported([f"speculative_config.model = {vllm_config.speculative_config.model!r}"])
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    drafter = create_custom_proposer(vllm_config)
    if isinstance(drafter, SamProposer):
        drafter.bind(runner, drafts_are_used=is_output_rank(), record=False)
    return drafter


def propose_drafts(runner: Any, sampled_token_ids: list[list[int]]) -> list[list[int]]:
    """Ask the runner's ``custom_class`` drafter for the next step's draft tokens."""
    batch = runner.input_batch
    return runner.drafter.propose(sampled_token_ids, batch.num_tokens_no_spec, batch.token_ids_cpu)


def install_samplers(runner: Any) -> None:
    """Install the samplers that ``additional_config`` asks for; they follow ``logprobs_mode``.

    The runner has to be fully constructed. A second call changes nothing.

    Raises:
        UnsupportedVersionError: Our code is asked for, but this vllm-ascend is not supported.
    """
    if not has_settings(runner.vllm_config):
        return
    settings = settings_of(runner.vllm_config)
    if not settings.ours and not is_supported():
        return
    require_supported(settings.ours)
    # These are imported here, because importing vllm-ascend's samplers chooses a device.
    from sam_rollout.integrations.vllm_ascend.samplers import heed_logprobs_mode, install_sampler

    heed_logprobs_mode(runner)
    install_sampler(runner, settings.sampler)
