"""Lists the names under which verl finds our classes; this module does not import verl."""

ROLLOUT_NAME = "sam_vllm"
TRAINER_NAME, COLOCATE_NAME, SEPARATE_NAME = "sam_sync", "sam_colocate_async", "sam_separate_async"
# Our trainer's name -> mode of the verl trainer that it extends.
TRAINER_MODES = {
    TRAINER_NAME: "sync",
    COLOCATE_NAME: "colocate_async",
    SEPARATE_NAME: "separate_async",
}
ASYNC_TRAINERS = (COLOCATE_NAME, SEPARATE_NAME)  # these trainers interrupt responses
AGENT_LOOP_MANAGER = "sam_rollout.integrations.verl.agent_loop.SamAgentLoopManager"
# Extra field of a response: pairs (training step, number of tokens sampled with this step's
# weights).
TOKENS_BY_WEIGHTS = "sam_tokens_by_weights"
# Folders beside the checkpoints: the trained head, and the first head with random weights. Each
# checkpoint also contains a folder `HEAD_FOLDER` with the head at that training step.
HEAD_FOLDER, FIRST_HEAD_FOLDER = "draft_head", "draft_head_first"
