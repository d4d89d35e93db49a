"""A run's curves in an order that answers questions: for wandb, TensorBoard and pictures."""
