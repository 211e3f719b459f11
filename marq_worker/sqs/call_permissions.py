"""The permissions that a call needs: on its own queue, and on those to which the endpoint will send for its client."""

from __future__ import annotations

from marq_worker.sqs.access_keys import DESCRIBE, Key, action_of
from marq_worker.sqs.attributes import target_of
from marq_worker.sqs.aws_json import Call
from marq_worker.sqs.errors import SqsError


def check_permissions(key: Key, call: Call, queue: str) -> None:
    """Raise SqsError if a key may not make a call."""
    check_permission(key, action_of(call.operation), queue)
    policy = (call.parameters.get("Attributes") or {}).get("RedrivePolicy")
    if policy and (target := target_of(policy)) is not None:
        check_permission(key, "send", target)


def check_permission(key: Key, action: str, queue: str) -> None:
    """Raise SqsError if a key may not perform an action on a queue."""
    if not key.allows(action, queue):
        missing = "any action" if action == DESCRIBE else repr(action)
        raise SqsError(
            "AccessDenied", f"the access key {key.id} has no permission for {missing} on the queue {queue[:80]!r}"
        )
