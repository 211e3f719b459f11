"""How the endpoint names queues: URLs and ARNs."""

from __future__ import annotations

REGION, ACCOUNT = "us-east-1", "000000000000"


def url_of(base_url: str, queue: str) -> str:
    """Return the URL of a queue."""
    return f"{base_url}/{ACCOUNT}/{queue}"


def arn_of(queue: str) -> str:
    """Return the ARN of a queue."""
    return f"arn:aws:sqs:{REGION}:{ACCOUNT}:{queue}"
