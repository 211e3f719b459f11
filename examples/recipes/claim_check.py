"""A claim check: large payloads are stored in S3, and messages contain only a reference.

``S3_BUCKET=pictures python -m examples.recipes.claim_check FILE`` sends a file. A worker handles it:
``S3_BUCKET=pictures MARQ_HANDLERS=examples.recipes.claim_check marq worker``.
"""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import boto3

import marq


@dataclass
class Claim:
    """What the message contains."""

    key: str
    sha256: str


class Store:
    """Payloads in a bucket. boto3 blocks, so its calls run in threads."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self._s3: Any = boto3.client("s3")

    async def put(self, payload: bytes) -> Claim:
        """Store a payload under a new key, so that no other message's payload is ever overwritten."""
        claim = Claim(f"payloads/{uuid.uuid4()}", sha256(payload).hexdigest())
        await asyncio.to_thread(self._s3.put_object, Bucket=self._bucket, Key=claim.key, Body=payload)
        return claim

    async def get(self, claim: Claim) -> bytes:
        """Return a payload. Rejects the message if the payload has expired or is another one."""
        try:
            payload = await asyncio.to_thread(self._read, claim.key)
        except self._s3.exceptions.NoSuchKey:
            raise marq.Reject(f"{claim.key} is no longer in the bucket") from None
        if sha256(payload).hexdigest() != claim.sha256:
            raise marq.Reject(f"{claim.key} is not the payload that was sent")
        return payload

    def _read(self, key: str) -> bytes:
        with self._s3.get_object(Bucket=self._bucket, Key=key)["Body"] as body:
            return body.read()


@marq.lifespan
async def resources() -> AsyncIterator[dict[str, Store]]:
    yield {"store": Store(os.environ["S3_BUCKET"])}


@marq.handler("pictures")
async def resize(claim: Claim, message: marq.Message[Claim]) -> None:
    picture = await message.state["store"].get(claim)
    print("received", len(picture), "bytes")


async def send_picture(store: Store, picture: bytes) -> marq.Receipt:
    # Store before you send: a handler may receive the message at once.
    claim = await store.put(picture)
    return await resize.send(claim)


async def main(picture: bytes) -> None:
    async with marq.Producer():
        receipt = await send_picture(Store(os.environ["S3_BUCKET"]), picture)
    print("sent", receipt.id)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).read_bytes()))
