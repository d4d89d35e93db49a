"""Under which names verl knows our parts; importable without verl."""

ROLLOUT_NAME = "sam_vllm"
TRAINER_NAME = "sam_sync"
SAMPLER_MODULE = "pkg://sam_rollout.integrations.verl.sampler"
