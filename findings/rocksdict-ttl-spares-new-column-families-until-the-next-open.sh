#!/usr/bin/env bash
# Shows that the TTL of a rocksdict database does not apply to a column family until the database is opened again.
#
# rocksdict 0.3.29. A program opens a database with AccessType.with_ttl(1), creates a column family, and writes ten rows
# to it, and then ten rows to the default family. It compacts both until the rows of the default family have expired.
# Expected: the rows of the column family have expired, too. They are older, and the TTL is that of the database.
# Seen: all of them remain. RocksDB gives a family that is created in an open database the TTL 0, which means never, and
# create_column_family() has no argument for it. When the database is opened again, the same call applies the TTL to all
# families. The next compaction then deletes the rows of the family that are older, and new rows expire, too. So the
# first run of a worker differs from all others. In a message queue, a table of message IDs in its own family grows until
# the first restart. A test that writes to a new family and waits sees that rows are kept, but a restart loses them. A
# program has to close and open the database after it has created families. Neither rocksdict's documentation nor
# RocksDB's page about TTL mentions this.
# Output seen:
#   first open: default family 0 of 10 rows, "ids" 10 of 10
#   second open, the same rows: "ids" 0 of 10
#   second open, new rows: "ids" 0 of 10
#   third open, family "later" is created: "ids" 0 of 10, "later" 10 of 10
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'rocksdict==0.3.29'
cat >main.py <<'PYTHON'
import sys, time
from importlib.metadata import version
from rocksdict import AccessType, BottommostLevelCompaction, CompactOptions, Rdict

ROWS, LIMIT_S = 10, 60
print("rocksdict", version("rocksdict"))
everything = CompactOptions()
everything.set_bottommost_level_compaction(BottommostLevelCompaction.force())

def opened():
    return Rdict("database", access_type=AccessType.with_ttl(1))

def write(family):
    for number in range(ROWS):
        family[f"message {number}"] = "sent"

def compacted(family):
    """Compact a family; return the number of its rows."""
    family.flush()
    family.compact_range(None, None, everything)
    return sum(1 for _ in family.keys())

def expired(family):
    """Compact a family until its rows have expired, at most for LIMIT_S; return the number of its rows."""
    end = time.monotonic() + LIMIT_S
    while (rows := compacted(family)) and time.monotonic() < end:
        time.sleep(0.2)
    return rows

def close(*families):
    for family in families:
        family.close()

database = opened()
ids = database.create_column_family("ids")
write(ids), write(database)
first = expired(database), compacted(ids)
print(f'first open: default family {first[0]} of {ROWS} rows, "ids" {first[1]} of {ROWS}')
close(ids, database)

database = opened()
ids = database.get_column_family("ids")
same = expired(ids)
print(f'second open, the same rows: "ids" {same} of {ROWS}')
write(ids)
new = expired(ids)
print(f'second open, new rows: "ids" {new} of {ROWS}')
close(ids, database)

database = opened()
ids, later = database.get_column_family("ids"), database.create_column_family("later")
write(later), write(ids)
third = expired(ids), compacted(later)
print(f'third open, family "later" is created: "ids" {third[0]} of {ROWS}, "later" {third[1]} of {ROWS}')
sys.exit((first, same, new, third) != ((0, ROWS), 0, 0, (0, ROWS)))
PYTHON
venv/bin/python main.py
