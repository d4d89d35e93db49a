"""Is this machine, or this cluster, ready for a run? The checks behind `sam-rollout doctor`.

Each check is a function from a `Question` to `Line`s and knows nothing of the others. Nothing heavy
is imported: engines are looked at through their metadata, devices through processes of their own,
so that the doctor answers on machines where nothing else works.
"""

from sam_rollout.doctor.examination import examine
from sam_rollout.doctor.printed_checks import Finding, Line, Status
from sam_rollout.doctor.scope import DEVICES, Question

__all__ = ["DEVICES", "Finding", "Line", "Question", "Status", "examine"]
