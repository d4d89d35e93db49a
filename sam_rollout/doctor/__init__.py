"""Checks whether this machine, or a cluster, is ready for a run: `sam-rollout doctor`.

The doctor has to work on machines where nothing else works, so it imports nothing heavy.
"""

from sam_rollout.doctor.examination import examine
from sam_rollout.doctor.printed_checks import Finding, Line, Status
from sam_rollout.doctor.scope import DEVICES, Question

__all__ = ["DEVICES", "Finding", "Line", "Question", "Status", "examine"]
