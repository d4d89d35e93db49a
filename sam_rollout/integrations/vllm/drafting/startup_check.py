"""Checks, when a run starts, that the engine really uses the configured drafter and sampler."""

from collections.abc import Sequence
from typing import Any

from sam_rollout.config import RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.engine_settings import PROPOSER_CLASS
from sam_rollout.session.padding import NO_PADDING


class StartUpError(RuntimeError):
    """The engine does not draft or sample as configured."""


PROBE_TOKENS = 64
# At least this share of the first draft tokens must be right. With random weights, far fewer are.
_LEAST_RIGHT = 0.1


def check_drafters(reports: Sequence[dict[str, Any]], config: SamConfig) -> str:
    """Compare every worker's report (``sam_bind``) with the configuration; return a log line.

    Raises:
        StartUpError: A worker runs another drafter class or another configuration.
    """
    # Only the last pipeline stage has a drafter. Workers without a drafter are not compared.
    found = sorted({str(report["proposer"]) for report in reports if report["proposer"]})
    if not config.enabled:
        if PROPOSER_CLASS in found:
            raise StartUpError(f"sam.enabled=False, but the engine's workers run {found[0]}")
        other = f"drafter {', '.join(found)}, not ours" if found else "no drafter"
        return f"sam_rollout: {other} (sam.enabled=false)"
    if found != [PROPOSER_CLASS]:
        raise StartUpError(
            f"sam.enabled=True asks for the drafter {PROPOSER_CLASS}, but the engine's workers run "
            f"{', '.join(found) or 'none'}. Check rollout.engine_kwargs.vllm.speculative_config "
            "for another method, and the installed sam_rollout package on every node."
        )
    ours = [report for report in reports if report["proposer"]]
    if any(report["sam"] != config.to_mapping() for report in ours):
        raise StartUpError(
            f"the engine's workers run with {ours[0]['sam']}, not {config.to_mapping()}"
        )
    line = (
        f"sam_rollout: drafter {PROPOSER_CLASS} on {len(ours)} worker(s), "
        f"k={config.max_draft_tokens}, gate: {config.gate}"
    )
    if config.drafts_with_model:
        model = config.sources.model
        line += f", with up to {model.max_tokens} tokens of {model.method} {model.path}".rstrip()
    if reason := ours[0].get("why_no_trees"):
        line += f"; chains, not trees: {reason}"
    elif "tree" in (shapes := ours[0]["draft_shapes"]):
        line += "; trees" if len(shapes) == 1 else "; chains or trees, as the gate measures"
    if ours[0]["deciding_engines"] > 1:
        line += f", agreed on by {ours[0]['deciding_engines']} engines"
    if any(report["padding"] != NO_PADDING for report in ours):
        line += f"; filled up to k: {ours[0]['padding']}"
    if reason := ours[0].get("why_synchronous"):
        line += f"; scheduled synchronously: {reason}"
    else:
        line += "; scheduled a step ahead"
    return line


def check_alive(answers: Sequence[tuple[int, int] | None], config: SamConfig) -> str:
    """Check that the draft model fits the policy; return a log line.

    ``answers`` has each worker's answer to ``sam_probe``; workers without a session answer None.

    Raises:
        StartUpError: The drafts were no better than chance, or there were none.
    """
    model = config.sources.model
    told = [answer for answer in answers if answer is not None]
    judged, right = (sum(answer[i] for answer in told) for i in (0, 1))
    if not judged:
        raise StartUpError(
            f"sam.sources.model ({model.method}) drafted nothing in a probe of {PROBE_TOKENS} "
            "tokens: the engine's log says why"
        )
    found = f"of {judged} first draft tokens {right} were right"
    if right < _LEAST_RIGHT * judged:
        raise StartUpError(
            f"sam.sources.model.path = {model.path!r} ({model.method}): {found}, no better than "
            "chance. The files belong to another model, or their weights were not read; "
            "docs/draft_models.md says how to check a head."
        )
    return f"sam_rollout: {model.method} drafts; in a probe {found}"


def check_samplers(reports: Sequence[dict[str, Any]], config: RolloutSamplerConfig) -> str:
    """Compare every worker's report (``sam_bind``) with the configuration; return a log line.

    Raises:
        StartUpError: A worker has another sampler, or lacks batch-invariant kernels that are
            configured.
    """
    found = sorted({report["sampler"] for report in reports})
    if found != [config.kind]:
        raise StartUpError(
            f"rollout_sampler.kind={config.kind} asks for that sampler, but the engine's workers "
            f"run: {', '.join(found)}"
        )
    line = f"sam_rollout: sampler {config.kind} on {len(reports)} worker(s)"
    if not config.batch_invariant:
        return line
    if not all(report["batch_invariant"] for report in reports):
        raise StartUpError(
            "rollout_sampler.batch_invariant=True, but the engine has not switched its kernels: it "
            "has none for this device, or (vllm-ascend) neither Triton nor batch_invariant_ops"
        )
    return f"{line}, batch-invariant kernels"
