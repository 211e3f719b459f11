#!/usr/bin/env bash
# Shows that a read-only look at a rocksdict database makes its owner's next open fail.
#
# rocksdict 0.3.29. A database is in raw mode (bytes only, as the tables of Faust) or not. A tool opens it read-only in
# the other mode, for example to see its bytes, and closes it.
# Expected: a look with AccessType.read_only() changes nothing for the owner, which opens the database as before.
# Seen: each open writes its own mode to rocksdict-config.json, even a read-only one. The next open takes the comparator
# from this file, and RocksDB refuses it. Explicit options do not help: the open writes their mode to the file, but only
# after reading it, so it fails, too, and the one after it succeeds. Without options, all opens fail until then. Nothing
# is lost, but the error reads like corruption. In a message queue, a look at the table of a worker that has stopped can
# make its next start fail, and a worker that deletes a table that it cannot open reads the whole changelog again.
# Output seen:
#   raw mode, owner gives its options: look: ok, open: does not match existing comparator, open: 1 row, open: 1 row
#   default mode, owner gives no options: look: ok, open: does not match existing comparator (3 times)
#   default mode, owner now gives its options: open: does not match existing comparator, open: 1 row, open: 1 row
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'rocksdict==0.3.29'
cat >main.py <<'PYTHON'
import sys
from importlib.metadata import version
from rocksdict import AccessType, Options, Rdict

TRIES, REFUSED = 3, "does not match existing comparator"
print("rocksdict", version("rocksdict"))

def create(path, raw):
    database = Rdict(path, Options(raw_mode=raw))
    database[b"key"] = b"value"
    database.close()

def look(path, raw):
    database = Rdict(path, Options(raw_mode=raw), access_type=AccessType.read_only())
    database.close()
    return "ok"

def open_and_count(path, *options):
    try:
        database = Rdict(path, *options)
    except Exception as error:
        return REFUSED if REFUSED in str(error) else str(error)
    rows = sum(1 for _ in database.keys())
    database.close()
    return f"{rows} row"

create("raw", True)
looked = look("raw", False)
raw = [open_and_count("raw", Options(raw_mode=True)) for _ in range(TRIES)]
print(f"raw mode, owner gives its options: look: {looked},", ", ".join(f"open: {seen}" for seen in raw))
create("default", False)
looked = look("default", True)
without = [open_and_count("default") for _ in range(TRIES)]
print(f"default mode, owner gives no options: look: {looked},", *sorted({f"open: {seen}" for seen in without}),
      f"({len(without)} times)")
explicit = [open_and_count("default", Options(raw_mode=False)) for _ in range(TRIES)]
print("default mode, owner now gives its options:", ", ".join(f"open: {seen}" for seen in explicit))
once = [REFUSED, "1 row", "1 row"]
sys.exit((raw, without, explicit) != (once, [REFUSED] * TRIES, once))
PYTHON
venv/bin/python main.py
