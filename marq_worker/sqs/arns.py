"""How the endpoint names queues: URLs and ARNs."""

from __future__ import annotations

from marq_worker.sqs.errors import invalid

REGION, ACCOUNT = "us-east-1", "000000000000"


def url_of(base_url: str, queue: str) -> str:
    """Return the URL of a queue."""
    return f"{base_url}/{ACCOUNT}/{queue}"


def arn_of(queue: str) -> str:
    """Return the ARN of a queue."""
    return f"arn:aws:sqs:{REGION}:{ACCOUNT}:{queue}"


def queue_of_arn(arn: str) -> str:
    """Return the name in the ARN of a queue. Raises SqsError."""
    parts = arn.split(":")
    if len(parts) != 6 or parts[:3] != ["arn", "aws", "sqs"] or not parts[5]:
        raise invalid(f"expected arn:aws:sqs:REGION:ACCOUNT:QUEUE, got {arn[:120]!r}")
    return parts[5]
