"""Under which names verl knows our parts; importable without verl."""

ROLLOUT_NAME = "sam_vllm"
TRAINER_NAME, ASYNC_TRAINER_NAME = "sam_sync", "sam_colocate_async"
# Our trainers -> the mode of verl's that each is built on.
TRAINER_MODES = {TRAINER_NAME: "sync", ASYNC_TRAINER_NAME: "colocate_async"}
AGENT_LOOP_MANAGER = "sam_rollout.integrations.verl.agent_loop.SamAgentLoopManager"
SAMPLER_MODULE = "pkg://sam_rollout.integrations.verl.sampler"
# Beside the checkpoints, which all nodes see: a head that the run trained, and the one of random
# weights that it began with; in a checkpoint: the head of that step.
HEAD_FOLDER, FIRST_HEAD_FOLDER = "draft_head", "draft_head_first"
