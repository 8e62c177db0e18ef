"""What can be said of a cell, in one word."""

from enum import StrEnum


class Outcome(StrEnum):
    """What is said of a cell."""

    PASS = "PASS"
    IMPROVED = "IMPROVED"
    """Better beyond the tolerance: the baseline is stale; never red."""
    REGRESSED = "REGRESSED"
    ENVIRONMENT = "ENVIRONMENT"
    """The machine moved, not the code."""
    NOISY = "NOISY"
    """Too noisy to be gated on time."""
    NO_BASELINE = "NO_BASELINE"
    WRONG = "WRONG"
    """The numbers are not the model's, or the asked mode was not in effect."""
    INVALID = "INVALID"
    """Not a measurement."""
    ERROR = "ERROR"
    """A run failed, or the baseline cannot be read."""
    NOT_RUN = "NOT_RUN"
    """Expected, no result."""
    UNSUPPORTED = "UNSUPPORTED"
    """Refused before any process started."""


FAILURES = frozenset({Outcome.REGRESSED, Outcome.WRONG, Outcome.ERROR})
MEASURED = frozenset(
    {Outcome.PASS, Outcome.IMPROVED, Outcome.REGRESSED, Outcome.ENVIRONMENT, Outcome.NOISY, Outcome.NO_BASELINE}
)
"""Outcomes of cells whose runs are right and whole, whatever there is to compare them with."""
VERDICTS = frozenset({Outcome.PASS, Outcome.IMPROVED})
"""Green outcomes. Those that are neither a failure nor green are cells without a verdict."""
