"""Checks whether this machine, or a cluster, is ready for a run: `sam-rollout doctor`.

The doctor has to work on machines where nothing else works, so it imports nothing heavy.
"""
