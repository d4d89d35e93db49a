"""How far the trainer's probabilities are from the rollout's, response by response.

verl reports the mean over a whole batch (``training/rollout_probs_diff_mean``). Here the same
difference is kept apart by response, so that responses with drafts can be laid beside those of
control.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from sam_rollout.integrations.verl.response_counts import ResponseCounts
from sam_rollout.telemetry.sentinel import ProbabilityDifferences

FIELDS = ("rollout_log_probs", "old_log_probs", "response_mask")


def probability_differences(
    batch: KVBatchMeta, counts: Mapping[str, ResponseCounts | None]
) -> ProbabilityDifferences:
    """Fetch both log-probabilities of a batch and compare them where a response was sampled.

    Args:
        batch: trained on; copies that only fill it up are left out.
        counts: of its responses by key; those that nothing is known of are left out.
    """
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS)
    )
    columns = [data[name].unbind() for name in FIELDS]  # rows differ in length
    rows = []
    for key, tag, rollout, trainer, mask in zip(batch.keys, batch.tags, *columns, strict=True):
        one = counts.get(key)
        if one is None or tag.get("is_padding", False):
            continue
        sampled = mask.bool()
        differences = (trainer.float().exp() - rollout.float().exp()).abs()[sampled]
        rows.append((one.group, one.control, float(differences.sum()), int(sampled.sum())))
    groups, control, sums, tokens = zip(*rows, strict=True) if rows else ((), (), (), ())
    return ProbabilityDifferences(
        np.array(groups, str), np.array(control, bool), np.array(sums, float),
        np.array(tokens, np.int64),
    )  # fmt: skip
