"""Rollouts of a run without drafts, sampled once more on paper, with the drafts of `sam=on`."""
