"""The commands of `sam-rollout`: options of what the rooms offer. cli.py puts them together."""
