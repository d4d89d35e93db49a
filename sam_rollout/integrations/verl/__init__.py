"""The rollout backend ``sam_vllm`` of verl: server, trainers, dynamic sampling, CPU platform."""
