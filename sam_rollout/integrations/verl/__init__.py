"""Adds the rollout backend ``sam_vllm`` to verl: server, trainers, sampling, CPU platform."""
