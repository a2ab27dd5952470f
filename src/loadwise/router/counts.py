"""What has happened since the journal began, in numbers."""

import msgspec


class Counts(msgspec.Struct, kw_only=True):
    """Totals; every turn that arrived is in exactly one of the outcomes, or open (law L1)."""

    arrived: int = 0
    completed: int = 0
    failed: int = 0
    rejected: int = 0
    evicted: int = 0
    cancelled: int = 0
    held: int = 0
    """Turns that had to wait at least once."""
    forgotten: int = 0
    """Programs that never got an answer."""
    censored: int = 0
    escalated: int = 0
    """Programs opened again after a failed attempt; `escalated_stuck` were moved in the middle of one."""
    escalated_stuck: int = 0
    stale: int = 0
    """Events about something that was already over."""
    malformed: int = 0
    """Events, or parts of them, that could not be true and changed nothing."""
    over_budget: int = 0
    """Turns refused because the hour's dollars were spent or promised."""
    policy_errors: int = 0
    """Calls of a user's policy class that raised, or answered nonsense."""
    diverts: int = 0
    """Programs that ran on another model than the selector's, because they start sooner there."""
    rebinds: int = 0
    """Started programs that were moved because their model's backends were gone."""
    pauses: int = 0
    """Places taken back from programs that had started (`router/pausing.py`, `router/residing.py`)."""
    verdicts_stale: int = 0
    verdicts_late: int = 0
    verdicts_corrected: int = 0
    """Verdicts that took the place of another, credited or not."""
    verdicts_abstained: int = 0
