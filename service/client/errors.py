"""The errors of the clients, and the conversion of error responses into them."""

import httpx
from pydantic import ValidationError

from index._util.validation import explain_errors
from index.errors import LookalikeError
from service.schemas.problem import Problem


class ServiceError(LookalikeError):
    """The service returned an error, or something else responded in its place; `document` is the RFC 9457 problem."""

    kind = "service"

    def __init__(self, document: Problem) -> None:
        super().__init__(document.detail, document.remedy)
        self.document = document

    @property
    def status(self) -> int:
        """The HTTP status of the response."""
        return self.document.status

    @property
    def type(self) -> str:
        """The stable slug of the problem, such as `item-missing`."""
        return self.document.type.rpartition("/")[2]


class ServiceUnreachable(LookalikeError):
    """No response arrived: the connection failed, broke or timed out."""

    kind = "unreachable"


def error_from(response: httpx.Response) -> ServiceError:
    """Returns the error that an unsuccessful response reports."""
    try:
        return ServiceError(Problem.model_validate_json(response.content))
    except ValidationError:
        return _foreign_response(response, "without an error document of Lookalike")


def unexpected_content(response: httpx.Response, error: ValueError) -> ServiceError:
    """Returns the error for a successful response whose content the service cannot have sent."""
    media_type = response.headers.get("Content-Type", "no type").partition(";")[0]
    return _foreign_response(response, f"with {media_type} that is not from Lookalike: {_first_fault(error)}")


def _foreign_response(response: httpx.Response, what: str) -> ServiceError:
    """Returns the error for a response that a proxy, or another server at this address, must have sent."""
    status, reason = response.status_code, response.reason_phrase
    problem = Problem(
        type="about:blank",
        title=reason,
        status=status,
        detail=f"{response.url} returned {status} {reason} {what}.",
        remedy="Check the address, and any proxy in between.",
        request_id=response.headers.get("X-Request-Id", ""),
    )
    return ServiceError(problem)


def _first_fault(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return explain_errors(error.errors(include_input=False, include_url=False))[0]
