#!/usr/bin/env bash
# Shows that the ttl of a Faust table deletes its rows, although it is described as the lifetime of RocksDB's old logs.
#
# faust-streaming 0.15.3, mode-streaming 0.7.1, aiokafka 0.14.0, rocksdict 0.3.29. Three tables with one partition get
# the same changelog records, as at a recovery: 100 old rows, and 3 s later many new ones, until RocksDB has compacted.
# Expected: options={"ttl": seconds} removes WAL files after this time, as the Store's documentation says.
# Seen: Faust does so for python-rocksdb only. With rocksdict, it opens the database with RocksDB's TTL, and each
# compaction deletes the rows that have not been written for that time. The changelog gets no record of it: a worker
# that rebuilds the table has the rows again, for a while. RocksDB appends a timestamp to each value. If the option is
# removed, the database opens as usual, but all values are four bytes longer. A message queue whose table of open
# messages has a ttl forgets those that are open for longer. To stop using it, delete the table's folder first.
# Output seen:
#   without ttl: 100 of 100 old rows
#   with ttl: 0 of 100 old rows
#   with ttl, at first: values of 10 bytes, after the removal of ttl: 14 bytes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" && python3 -m venv venv
venv/bin/pip install -q 'faust-streaming==0.15.3' 'mode-streaming==0.7.1' 'aiokafka==0.14.0' 'rocksdict==0.3.29'
cat >main.py <<'PYTHON'
import asyncio, sys, time
from importlib.metadata import version
from types import SimpleNamespace
import faust
from faust.types import TP

OLD, LIMIT_S = 100, 60
print(*(f"{name} {version(name)}" for name in ("faust-streaming", "mode-streaming", "aiokafka", "rocksdict")))

def store(name, **options):
    """Return the store of a table; two stores of the same name share their files."""
    app = faust.App(name, broker="kafka://127.0.0.1:1", store="rocksdb://", datadir=name)
    options |= {"driver": "rocksdict", "write_buffer_size": 1 << 16, "block_cache_size": 1 << 20}
    return app.Table("rows", partitions=1, options=options).data

def write(target, keys):
    messages = (SimpleNamespace(tp=TP("changelog", 0), partition=0, offset=offset, key=key, value=b"0123456789")
                for offset, key in enumerate(keys))
    target.apply_changelog_batch([SimpleNamespace(message=message) for message in messages], None, None)

def rows(target):
    return {key: value for key, value in target._db_for_partition(0).items() if key != target.offset_key}

def old_rows_after(target, seconds, until):
    """Write old rows, wait, and write new ones until the condition holds; return the number of old rows."""
    write(target, [b"old%d" % number for number in range(OLD)])
    time.sleep(seconds)
    began, number, count = time.monotonic(), 0, OLD
    while time.monotonic() - began < LIMIT_S and not until(count, number):
        write(target, [b"new%d" % (number + more) for more in range(1000)])
        number += 1000
        count = sum(key.startswith(b"old") for key in rows(target))
    return count

async def main():
    kept = old_rows_after(store("without"), 3, lambda count, number: number == 50_000)
    print(f"without ttl: {kept} of {OLD} old rows")
    left = old_rows_after(store("with", ttl=1), 3, lambda count, number: count == 0)
    print(f"with ttl: {left} of {OLD} old rows")
    first = store("changed", ttl=86_400)
    write(first, [b"key"])
    before = len(rows(first)[b"key"])
    first._dbs.pop(0).close()
    after = len(rows(store("changed"))[b"key"])
    print(f"with ttl, at first: values of {before} bytes, after the removal of ttl: {after} bytes")
    return kept, left, before, after

sys.exit(asyncio.run(main()) != (OLD, 0, 10, 14))
PYTHON
venv/bin/python main.py
