"""Registers our rollout server and its adapter in every process that imports verl.

verl imports this module by the ``verl.plugins`` entry point and by ``VERL_USE_EXTERNAL_MODULES``.
The launcher sets that variable, because verl hides errors of entry points.
"""

import os

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from sam_rollout.integrations.verl.platform_cpu import PLATFORM_ENV, use_single_gloo_backend
from sam_rollout.integrations.verl.registered_names import ROLLOUT_NAME


def _load_replica() -> type:
    # vLLM takes seconds to import, and most of verl's processes do not need it.
    from sam_rollout.integrations.verl.server import SamReplica

    return SamReplica


RolloutReplicaRegistry.register(ROLLOUT_NAME, _load_replica)
# verl 0.9.1 has no public way to register the training side's adapter.
_ROLLOUT_REGISTRY[ROLLOUT_NAME, "async"] = (
    "sam_rollout.integrations.verl.weight_transfer.SamServerAdapter"
)

# vLLM's API server imports model_hosting_container_standards, which sets the root logger to the
# level in the variable below. The default level, ERROR, would hide all our warnings.
if "LOG_LEVEL" not in os.environ:
    os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")

if os.environ.get(PLATFORM_ENV) == "cpu":
    use_single_gloo_backend()
