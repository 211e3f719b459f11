#!/usr/bin/env bash
# Shows that a loop over a snapshot of a rocksdict database returns the rows of now, not of then.
#
# rocksdict 0.3.29. A database has ten waiting messages. The script takes a snapshot. Then a worker starts two messages:
# for each, one WriteBatch deletes the waiting row and puts a running row. Another message is sent, and the priority of
# one is changed.
# Expected: the snapshot has ten waiting messages and no running ones. Its documentation calls it "a consistent view of
# the database at the point of creation", and iter() "an iterator over the data in this snapshot".
# Seen: snapshot[key] reads the snapshot. All loops read the database as it is when the loop starts. rocksdict
# sets the snapshot on read options that it then drops, and makes the iterator from new ones. The snapshot is also not
# used with explicit ReadOptions or in raw mode. Code that loops over a snapshot more than once, or that checks rows of a
# loop with snapshot[key], mixes states of different times. A count of waiting messages, and then one of running ones,
# counts a message twice if it starts in between. A backup of a message queue in several passes loses or repeats
# messages in the same way. Use one iterator for all rows, or create_checkpoint().
# Output seen:
#   snapshot[key]: waiting 10, running 0, priority of message 5: low
#   loop, before the changes: waiting 10, running 0, priority of message 5: low
#   items(): waiting 9, running 2, priority of message 5: high
#   keys() and values(): waiting 9, running 2, priority of message 5: high
#   items() with ReadOptions: waiting 9, running 2, priority of message 5: high
#   items(backwards=True): waiting 9, running 2, priority of message 5: high
#   iter(): waiting 9, running 2, priority of message 5: high
#   raw mode, items(): waiting 9, running 2, priority of message 5: high
#   one loop for each state, a message starts in between: 10 messages, 11 counted
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'rocksdict==0.3.29'
cat >main.py <<'PYTHON'
import sys
from importlib.metadata import version
from rocksdict import Options, Rdict, ReadOptions, WriteBatch

MESSAGES = range(10)
print("rocksdict", version("rocksdict"))

def waiting(number):
    return f"waiting/{number:02}".encode()

def running(number):
    return f"running/{number:02}".encode()

def opened(name, raw_mode=False):
    """Return a new database with ten waiting messages."""
    database = Rdict(name, Options(raw_mode=raw_mode))
    for number in MESSAGES:
        database[waiting(number)] = b"low"
    return database

def start(database, number, raw_mode=False):
    batch = WriteBatch(raw_mode=raw_mode)
    batch.delete(waiting(number))
    batch.put(running(number), b"low")
    database.write(batch)

def change(database, raw_mode=False):
    """Start two messages, send one, and change the priority of one."""
    start(database, 0, raw_mode)
    start(database, 1, raw_mode)
    database[waiting(10)] = b"low"
    database[waiting(5)] = b"high"

def summary(rows):
    rows = dict(rows)
    counts = (sum(key.startswith(state) for key in rows) for state in (b"waiting/", b"running/"))
    return *counts, rows[waiting(5)].decode()

def by_key(snapshot):
    for key in [make(number) for make in (waiting, running) for number in range(11)]:
        try:
            yield key, snapshot[key]
        except Exception as error:
            assert str(error) == "key not found", error

def low_level(snapshot):
    iterator = snapshot.iter()
    iterator.seek_to_first()
    while iterator.valid():
        yield iterator.key(), iterator.value()
        iterator.next()

database = opened("default")
snapshot = database.snapshot()
before = summary(snapshot.items())
change(database)
raw = opened("raw", raw_mode=True)
raw_snapshot = raw.snapshot()
change(raw, raw_mode=True)
seen = {
    "snapshot[key]": summary(by_key(snapshot)),
    "loop, before the changes": before,
    "items()": summary(snapshot.items()),
    "keys() and values()": summary(zip(snapshot.keys(), snapshot.values())),
    "items() with ReadOptions": summary(snapshot.items(read_opt=ReadOptions())),
    "items(backwards=True)": summary(snapshot.items(backwards=True)),
    "iter()": summary(low_level(snapshot)),
    "raw mode, items()": summary(raw_snapshot.items()),
}
for reader, (number_waiting, number_running, priority) in seen.items():
    print(f"{reader}: waiting {number_waiting}, running {number_running}, priority of message 5: {priority}")

database = opened("counted")
snapshot = database.snapshot()
counted = sum(key.startswith(b"waiting/") for key in snapshot.keys())
start(database, 0)
counted += sum(key.startswith(b"running/") for key in snapshot.keys())
print(f"one loop for each state, a message starts in between: {len(MESSAGES)} messages, {counted} counted")
of_the_snapshot, of_now = (10, 0, "low"), (9, 2, "high")
sys.exit(list(seen.values()) != [of_the_snapshot] * 2 + [of_now] * 6 or counted != len(MESSAGES) + 1)
PYTHON
venv/bin/python main.py
