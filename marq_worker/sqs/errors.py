"""Errors of the SQS endpoint, with the codes and HTTP statuses that clients of SQS know.

An error has two names. Its shape is the exception class of today's clients. Its code is what the older query protocol
called it, and programs still compare it (``error.response["Error"]["Code"]`` in boto3). Answers contain both.
"""

from __future__ import annotations

_PREFIX = "AWS.SimpleQueueService."

#: Codes that differ from the name of their shape.
_CODES = {
    "QueueDoesNotExist": f"{_PREFIX}NonExistentQueue",
    "QueueNameExists": "QueueAlreadyExists",
    "UnknownOperationException": "InvalidAction",
    **{
        shape: f"{_PREFIX}{shape}"
        for shape in (
            "BatchEntryIdsNotDistinct",
            "BatchRequestTooLong",
            "EmptyBatchRequest",
            "InvalidBatchEntryId",
            "MessageNotInflight",
            "PurgeQueueInProgress",
            "QueueDeletedRecently",
            "TooManyEntriesInBatchRequest",
            "UnsupportedOperation",
        )
    },
}

#: Statuses of errors; all others are 400.
_STATUSES = {
    "PurgeQueueInProgress": 403,
    "OverLimit": 403,
    "RequestThrottled": 403,
    "AccessDenied": 403,
    "MissingAuthenticationToken": 403,
    "InvalidClientTokenId": 403,
    "SignatureDoesNotMatch": 403,
    "ResourceNotFoundException": 404,
    "RequestTimeout": 408,
    "InternalFailure": 500,
    "ServiceUnavailable": 503,
}


class SqsError(Exception):
    """A refused call; ``shape`` is the name of its error in SQS's model, or one of AWS's common errors."""

    def __init__(self, shape: str, message: str) -> None:
        super().__init__(message)
        self.shape = shape
        self.message = message

    @property
    def code(self) -> str:
        """The error's code in the query protocol, which the results of a batch also contain."""
        return _CODES.get(self.shape, self.shape)

    @property
    def status(self) -> int:
        return _STATUSES.get(self.shape, 400)

    @property
    def sender_fault(self) -> bool:
        """Whether the client must change the call; otherwise it may repeat the same one."""
        return self.status < 500

    def __repr__(self) -> str:
        return f"SqsError({self.shape!r}, {self.message!r})"


def invalid(message: str) -> SqsError:
    """Return the error of a call with a value that is not accepted."""
    return SqsError("InvalidParameterValue", message)
