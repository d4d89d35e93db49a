"""The commands of `sam-rollout` and their options; cli.py registers them."""
