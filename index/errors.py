"""The error that every package raises for a mistake its user can mend."""

from typing import ClassVar


class LookalikeError(Exception):
    """What went wrong, in words for the person who caused it, and what to do about it.

    The command line prints it as one line, the service as one problem document; anything else that
    escapes is a fault of ours and shows its traceback.
    """

    kind: ClassVar[str] = "invalid"
    """A stable slug for machines; subclasses set their own."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()
