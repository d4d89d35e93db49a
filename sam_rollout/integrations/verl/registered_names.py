"""Under which names verl knows our parts; importable without verl."""

ROLLOUT_NAME = "sam_vllm"
TRAINER_NAME = "sam_sync"
AGENT_LOOP_MANAGER = "sam_rollout.integrations.verl.agent_loop.SamAgentLoopManager"
SAMPLER_MODULE = "pkg://sam_rollout.integrations.verl.sampler"
# Beside the checkpoints, which all nodes see: a head that the run trained, and the one of random
# weights that it began with; in a checkpoint: the head of that step.
HEAD_FOLDER, FIRST_HEAD_FOLDER = "draft_head", "draft_head_first"
