#!/usr/bin/env bash
# Shows that a loop over a rocksdict database ends at a damaged block without an error, as if there were no more rows.
#
# rocksdict 0.3.29. The script inverts 64 bytes in the middle of an .sst file that it has written, like a bad disk.
# Expected: items(), keys() and values() raise, as get() does, because RocksDB verifies a checksum for each block.
# Seen: get() raises for the 35 rows of that block. A loop stops there, forwards and backwards, and skips the undamaged
# half behind it. A loop cannot detect this: only the low-level iter() has status(), which raises. A seek to a later
# row works. A message queue that rebuilds its list of open messages with such a loop starts with half of them,
# never redelivers the others and reports success. Use iter(), and call status() once valid() is false.
# Output seen:
#   rows 20000, get() raised for 35
#   items() 10325 rows, keys() 10325, values() 10325, backwards 9639, error: none
#   iter() 10325 rows, then status() raised Corruption: block checksum mismatch
#   a seek past the block reads on: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'rocksdict==0.3.29'
cat >main.py <<'PYTHON'
import glob, os, sys
from importlib.metadata import version
from rocksdict import Rdict

ROWS = 20_000
key = "{:08}".format
print("rocksdict", version("rocksdict"))
database = Rdict("database")
for number in range(ROWS):
    database[key(number)] = "v" * 100
database.flush()
database.close()
[file] = glob.glob("database/*.sst")
with open(file, "r+b") as damaged:
    middle = os.path.getsize(file) // 2
    damaged.seek(middle)
    inverted = bytes(byte ^ 0xFF for byte in damaged.read(64))
    damaged.seek(middle)
    damaged.write(inverted)

database = Rdict("database")
unreadable = []
for number in range(ROWS):
    try:
        database.get(key(number))
    except Exception:
        unreadable.append(number)
print(f"rows {ROWS}, get() raised for {len(unreadable)}")
items, keys, values = (sum(1 for _ in rows()) for rows in (database.items, database.keys, database.values))
backwards = sum(1 for _ in database.keys(backwards=True))
print(f"items() {items} rows, keys() {keys}, values() {values}, backwards {backwards}, error: none")

iterator, count, error = database.iter(), 0, ""
iterator.seek_to_first()
while iterator.valid():
    count += 1
    iterator.next()
try:
    iterator.status()
except Exception as raised:
    error = str(raised).partition(": stored")[0]
print(f"iter() {count} rows, then status() raised {error}")
iterator.seek(key(unreadable[-1] + 1))
print("a seek past the block reads on:", iterator.valid())
silent = items == keys == values == count == unreadable[0] and 0 < backwards <= ROWS - 1 - unreadable[-1]
sys.exit(not (silent and 0 < len(unreadable) < 100 and "Corruption" in error and iterator.valid()))
PYTHON
venv/bin/python main.py
