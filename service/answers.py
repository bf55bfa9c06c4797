"""Makes the JSON of large answers item by item: no object outlives its text, and every byte is counted."""

from pydantic import BaseModel
from pydantic_core import to_json

from service.memory import Holding
from service.problems import ANSWER_TOO_LARGE, ProblemError

_COPIES = 2
"""The text of the items, and the answer that it is joined to."""


class AnswerWriter:
    """Encodes the items of one answer; refuses one that becomes too large, or that there is no memory for."""

    def __init__(self, held: Holding, max_bytes: int | None = None) -> None:
        self._held = held
        self._max_bytes = max_bytes
        self.size = 0

    def encode(self, item: BaseModel) -> bytes:
        """Returns the JSON of an item."""
        data = to_json(item)
        self.size += len(data)
        if self._max_bytes is not None and self.size > self._max_bytes:
            raise ProblemError(
                ANSWER_TOO_LARGE, f"The answer would have more than {self._max_bytes:,} bytes.", ANSWER_TOO_LARGE.remedy
            )
        self._held.add(_COPIES * len(data))
        return data


def join_items(answer: BaseModel, name: str, items: list[bytes]) -> bytes:
    """Returns the JSON of an answer whose first field is an empty list of this name, with the items in it."""
    start, document = b'{"%b":[' % name.encode(), to_json(answer)
    assert document.startswith(start + b"]")
    return b"".join((start, b",".join(items), document[len(start) :]))
