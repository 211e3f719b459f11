#!/usr/bin/env bash
# Shows that concurrent AIOKafkaProducer.send_batch() calls for one partition fail long before request_timeout_ms.
#
# aiokafka 0.14.0, confluent-kafka 2.16.1 (for its mock cluster). 20 concurrent calls for one partition, and a linger of
# 100 ms, so the producer sends one batch every 100 ms. The timeout is 6 s; the last batch would leave after about 2 s.
# Expected: the broker writes all 20, as it does if the same producer sends the same values with send().
# Seen: a call waits for each earlier batch in turn. After each wait, it subtracts the time since the start of the call
# from the timeout, not the duration of that wait: 0.1 + 0.2 + 0.3 ... s. The sum grows with the square of the number of
# batches. 11 batches are written; the other 9 calls raise KafkaTimeoutError after little more than a second. A burst
# of calls on a healthy broker looks like an outage. A message queue that writes with send_batch() needs one writer per
# partition, and must not call it once per request.
# Output seen:
#   send_batch(): 11 written, 9 KafkaTimeoutError, the first after 1.12 s of 6 s
#   send():       20 written
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'aiokafka==0.14.0' 'confluent-kafka==2.16.1'
cat >main.py <<'PYTHON'
import asyncio, sys, time
from importlib.metadata import version
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaTimeoutError
from confluent_kafka import Producer

CALLS, TIMEOUT_S, SIZE = 20, 6.0, 1000
print(*(f"{name} {version(name)}" for name in ("aiokafka", "confluent-kafka")))
mock = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "127.0.0.1:1", "log_level": 0})
servers = ",".join(f"{b.host}:{b.port}" for b in mock.list_topics(timeout=10).brokers.values())

async def written(sending):
    """Return None if it was written, otherwise the seconds until the error."""
    began = time.monotonic()
    try:
        await (await sending)
    except KafkaTimeoutError:
        return time.monotonic() - began

async def main():
    # Each batch has room for one record, so send() waits for the batch before its own, too.
    async with AIOKafkaProducer(bootstrap_servers=servers, linger_ms=100, max_batch_size=SIZE + 200,
                                request_timeout_ms=int(TIMEOUT_S * 1000)) as producer:
        await producer.send_and_wait("t", b"", partition=0)  # Fetch metadata, so that no call below waits for it.
        batches = []
        for _ in range(CALLS):
            batches.append(producer.create_batch())
            batches[-1].append(key=None, value=bytes(SIZE), timestamp=None)
        by_batch = await asyncio.gather(*(written(producer.send_batch(b, "t", partition=0)) for b in batches))
        by_record = await asyncio.gather(*(written(producer.send("t", bytes(SIZE), partition=0)) for _ in batches))
    early = [seconds for seconds in by_batch if seconds is not None]
    print(f"send_batch(): {CALLS - len(early)} written, {len(early)} KafkaTimeoutError, the first after",
          f"{min(early, default=0):.2f} s of {TIMEOUT_S:g} s")
    print(f"send():       {by_record.count(None)} written")
    # On a slow machine, fewer batches are sent, but the first call still fails long before the timeout.
    return len(early) > CALLS // 4 and min(early) < TIMEOUT_S / 2 and by_record.count(None) == CALLS

sys.exit(not asyncio.run(main()))
PYTHON
venv/bin/python main.py
