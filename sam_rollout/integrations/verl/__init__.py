"""Extends verl by the rollout backend ``sam_vllm``, trainers, sampling and a CPU platform."""
