"""A handler that books each payment once, however often its message is delivered.

``python -m examples.recipes.idempotent`` creates the tables. Then run it in a worker:
``MARQ_HANDLERS=examples.recipes.idempotent marq worker``. DATABASE_URL names the database.
"""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import psycopg
from psycopg_pool import AsyncConnectionPool

import marq

DATABASE_URL = os.environ.get("DATABASE_URL", "postgresql://127.0.0.1/shop")
CONNECTIONS = 10
SCHEMA = """
CREATE TABLE IF NOT EXISTS accounts (name text PRIMARY KEY, balance integer NOT NULL);
CREATE TABLE IF NOT EXISTS handled (
    queue text,
    key text,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (queue, key)
);
"""


@dataclass
class Payment:
    #: The sender creates it once for each payment, and sends it again with each retry.
    id: str
    account: str
    amount: int


@marq.lifespan
async def resources() -> AsyncIterator[dict[str, AsyncConnectionPool]]:
    async with AsyncConnectionPool(DATABASE_URL, max_size=CONNECTIONS) as pool:
        yield {"pool": pool}


# More concurrent calls than connections would wait for the pool, and fail after 30 s.
@marq.handler("payments", concurrency=CONNECTIONS)
async def book(payment: Payment, message: marq.Message[Payment]) -> None:
    # One transaction: it commits at the end of the block, and rolls back on an exception.
    async with message.state["pool"].connection() as database:
        # If another delivery is in progress, this waits for the end of its transaction.
        key = await database.execute(
            "INSERT INTO handled (queue, key) VALUES (%s, %s) ON CONFLICT DO NOTHING", [message.queue, payment.id]
        )
        if key.rowcount == 0:
            return  # booked by an earlier delivery, whose acknowledgement was lost
        account = await database.execute(
            "UPDATE accounts SET balance = balance + %s WHERE name = %s", [payment.amount, payment.account]
        )
        if account.rowcount == 0:
            # Rolls back the key, too, so a redrive of the dead letter can book the payment.
            raise marq.Reject(f"no account {payment.account}")


if __name__ == "__main__":
    with psycopg.connect(DATABASE_URL) as connection:
        connection.execute(SCHEMA)
