"""Under which names verl knows our parts; importable without verl."""

ROLLOUT_NAME = "sam_vllm"
TRAINER_NAME = "sam_sync"
SAMPLER_MODULE = "pkg://sam_rollout.integrations.verl.sampler"
ROUTER_SETTINGS = "sam/routing.yaml"  # in the run folder: written by the trainer, read by verl
HEAD_FOLDER = "draft_head"  # in the run folder and in checkpoints: the head that the run trains
FIRST_HEAD_FOLDER = "draft_head_first"  # in the run folder: what it begins with, without another
