"""A limit on the work that the schemas of a request may take."""

from __future__ import annotations

from lightserve.errors import InvalidRequestError

# A few definitions can be combined in many ways, so a small schema can be a lot of work. A step takes 0.5 to 2 us.
MAX_STEPS = 100_000
CHARACTERS_PER_STEP = 25  # of names and of JSON


class StepBudget:
    """Steps from schema to schema and from name to name. Schemas of one request share it."""

    def __init__(self) -> None:
        self.used = 0

    def spend(self, steps: int, characters: int = 0) -> None:
        """Count work before it is done. InvalidRequestError if it is too much."""
        self.used = min(self.used + steps + characters // CHARACTERS_PER_STEP, MAX_STEPS + 1)
        if self.used > MAX_STEPS:
            raise InvalidRequestError(
                f"reading the request's schemas takes more than {MAX_STEPS} steps: they are too large, or combine too "
                "many schemas for the same values; simplify them"
            )
