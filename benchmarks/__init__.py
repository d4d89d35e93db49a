"""The programs behind every number that README and docs quote; results lie in results/."""
