"""The programs behind every number in README and docs; their records are in results/."""
