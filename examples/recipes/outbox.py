"""A transactional outbox: an order and its message are written in one transaction of PostgreSQL.

``python -m examples.recipes.outbox setup``, then ``... relay`` in one terminal, and ``... order ann 30`` in another.
DATABASE_URL names the database.
"""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import json
import os
import sys

import psycopg

import marq

DATABASE_URL = os.environ.get("DATABASE_URL", "postgresql://127.0.0.1/shop")
SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL,
    amount integer NOT NULL CHECK (amount > 0)
);
CREATE TABLE IF NOT EXISTS outbox (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- The deduplication id. A position is not unique enough: after a restore from a backup, new rows reuse positions.
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    queue text NOT NULL,
    -- A message that Marq rejects would stop the relay.
    value bytea NOT NULL CHECK (octet_length(value) <= 1000000)
);
"""
#: Any number that no other program of the database uses for an advisory lock.
RELAY_LOCK = 3_751
BATCH = 500


# --- the service ------------------------------------------------------------------------------------------------------


async def place_order(database: psycopg.AsyncConnection, customer: str, amount: int) -> int:
    """Write the order and its message: both or neither."""
    async with database.transaction():
        cursor = await database.execute(
            "INSERT INTO orders (customer, amount) VALUES (%s, %s) RETURNING id", [customer, amount]
        )
        [order_id] = await cursor.fetchone()
        value = json.dumps({"order_id": order_id, "customer": customer, "amount": amount}).encode()
        await database.execute("INSERT INTO outbox (queue, value) VALUES (%s, %s)", ["invoices", value])
    return order_id


# --- the relay --------------------------------------------------------------------------------------------------------


async def relay_batch(database: psycopg.AsyncConnection, producer: marq.Producer) -> int:
    """Send the oldest messages and return their number."""
    async with database.transaction():
        # One relay works at a time, so messages are sent in the order of their positions. Others wait.
        await database.execute("SELECT pg_advisory_xact_lock(%s)", [RELAY_LOCK])
        cursor = await database.execute(
            "SELECT position, id::text, queue, value FROM outbox ORDER BY position LIMIT %s", [BATCH]
        )
        rows = await cursor.fetchall()
        for queue in {queue for _, _, queue, _ in rows}:
            await producer.send_many(
                queue,
                [value for _, _, name, value in rows if name == queue],
                deduplication_ids=[row_id for _, row_id, name, _ in rows if name == queue],
            )
        # Only now: if the relay deleted rows first, a crash before the send would lose their messages. A relay that is
        # killed here leaves the rows, and the next one sends them again with the same deduplication ids.
        await database.execute("DELETE FROM outbox WHERE position = ANY(%s)", [[row[0] for row in rows]])
    return len(rows)


async def relay() -> None:
    # If a relay's machine disappears, PostgreSQL ends its transaction after a minute, and another relay continues.
    options = "-c idle_in_transaction_session_timeout=60000"
    async with marq.Producer() as producer:
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    DATABASE_URL, autocommit=True, options=options
                ) as database:
                    while True:
                        if not await relay_batch(database, producer):
                            await asyncio.sleep(0.2)
            except (psycopg.Error, marq.BrokerUnavailable) as error:
                print("trying again in a second:", error, flush=True)
                await asyncio.sleep(1)


async def main(command: str, *arguments: str) -> None:
    if command == "relay":
        await relay()
        return
    async with await psycopg.AsyncConnection.connect(DATABASE_URL, autocommit=True) as database:
        if command == "setup":
            await database.execute(SCHEMA)
        else:
            customer, amount = arguments
            print("order", await place_order(database, customer, int(amount)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
