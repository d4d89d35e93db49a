"""The ``sam_vllm`` rollout of verl: server, trainer hooks, prompt rounds, CPU platform."""
