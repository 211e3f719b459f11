#!/usr/bin/env bash
# Shows that PyIceberg 0.12.0 inserts a message again if another worker has upserted it, and then refuses to upsert it.
#
# pyiceberg 0.12.0, and 0.11.1 and deltalake 1.6.6 (delta-rs) for comparison, pyarrow 26.0.1. Two workers have loaded a
# table of messages. A lease ends while the first worker is busy, so both process message m1, and upsert its row. The
# second worker has loaded the table before the first one's upsert.
# Expected: the table has m1 once. The second upsert updates the row, or it fails, and the worker repeats it with the
# new table. pyiceberg 0.11.1 and a merge of deltalake fail. pyiceberg 0.12.0 retries commits, checks them for conflicts
# first, and raises ValidationException if there is one. Its default is serializable isolation.
# Seen: an upsert overwrites the rows that it has found, and appends all others. Each part is a snapshot, and only checks
# itself. For an append, this check is empty, because appends do not conflict. But this append depends on what the
# upsert has read. So an upsert of new rows is retried as it is, and both workers get "1 row inserted". Only an upsert
# that also updates rows can conflict. From then on, an upsert of m1 updates two rows, and one of m1 and a new message
# raises ValueError: "Target table has duplicate rows". So the new message is not stored, either, in each batch with m1.
# Before 0.12.0, an upsert in a loop was a way to store redelivered messages once. With 0.12.0, set the table's property
# commit.retry.num-retries to 0, and load the table before each try.
# Output seen:
#   pyiceberg 0.12.0: second worker: 1 inserted, 0 updated; table: m0 m1 m1
#   pyiceberg 0.12.0, later: m1: 0 inserted, 2 updated; m1 and m2: ValueError; table: m0 m1 m1
#   pyiceberg 0.12.0, no retries: second worker: CommitFailedException; table: m0 m1
#   pyiceberg 0.12.0, no retries, later: m1: 0 inserted, 1 updated; m1 and m2: 1 inserted, 0 updated; table: m0 m1 m2
#   pyiceberg 0.11.1: second worker: CommitFailedException; table: m0 m1
#   pyiceberg 0.11.1, later: m1: 0 inserted, 1 updated; m1 and m2: 1 inserted, 0 updated; table: m0 m1 m2
#   deltalake 1.6.6: second worker: CommitFailedError; table: m0 m1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'pyiceberg[sql-sqlite]==0.12.0' 'deltalake==1.6.6' 'pyarrow==26.0.1'
venv/bin/pip install --quiet --no-deps --target older 'pyiceberg==0.11.1'
cat >main.py <<'PYTHON'
import logging, os, sys
import pyarrow, pyiceberg
from deltalake import DeltaTable, write_deltalake
from deltalake import __version__ as deltalake_version
from pyiceberg.catalog.sql import SqlCatalog

SCHEMA = pyarrow.schema([pyarrow.field("id", pyarrow.string(), nullable=False), ("state", pyarrow.string())])
logging.disable()

def rows(state, *ids):
    return pyarrow.table({"id": ids, "state": [state] * len(ids)}, schema=SCHEMA)

def attempt(store):
    """Return what the call reports, or the name of its error."""
    try:
        inserted, updated = store()
    except Exception as error:
        return type(error).__name__
    return f"{inserted} inserted, {updated} updated"

def upsert(table, state, *ids):
    def store():
        result = table.upsert(rows(state, *ids), join_cols=["id"])
        return result.rows_inserted, result.rows_updated
    return attempt(store)

def merge(table, state, *ids):
    def store():
        merger = table.merge(rows(state, *ids), "table.id = new.id", source_alias="new", target_alias="table")
        metrics = merger.when_matched_update_all().when_not_matched_insert_all().execute()
        return metrics["num_target_rows_inserted"], metrics["num_target_rows_updated"]
    return attempt(store)

def text(ids):
    return " ".join(sorted(ids.to_pylist()))

def with_iceberg(name, properties):
    """Return what the second worker gets, later upserts, and the table after each."""
    def load():
        catalog = SqlCatalog(name, uri=f"sqlite:///{name}.db", warehouse=f"file://{os.getcwd()}/{name}")
        catalog.create_namespace_if_not_exists("queue")
        return catalog.create_table_if_not_exists("queue.messages", SCHEMA, properties=properties)

    def stored():
        return text(load().scan().to_arrow().column("id"))

    load().append(rows("sent", "m0"))
    first, second = load(), load()
    assert upsert(first, "done", "m1") == "1 inserted, 0 updated"
    results = [upsert(second, "done", "m1"), stored()]
    return *results, upsert(load(), "read", "m1"), upsert(load(), "read", "m1", "m2"), stored()

def with_delta(name):
    write_deltalake(name, rows("sent", "m0"))
    first, second = DeltaTable(name), DeltaTable(name)
    assert merge(first, "done", "m1") == "1 inserted, 0 updated"
    return merge(second, "done", "m1"), text(DeltaTable(name).to_pyarrow_table().column("id"))

def show(title, second, table, *later):
    print(f"{title}: second worker: {second}; table: {table}")
    if later:
        print(f"{title}, later: m1: {later[0]}; m1 and m2: {later[1]}; table: {later[2]}")

version = pyiceberg.__version__
name = "iceberg" + version.replace(".", "")
refused = ("CommitFailedException", "m0 m1", "0 inserted, 1 updated", "1 inserted, 0 updated", "m0 m1 m2")
retried = ("1 inserted, 0 updated", "m0 m1 m1", "0 inserted, 2 updated", "ValueError", "m0 m1 m1")
default = with_iceberg(name, {})
show(f"pyiceberg {version}", *default)
if version == "0.11.1":
    sys.exit(default != refused)
without_retries = with_iceberg(f"{name}_no_retries", {"commit.retry.num-retries": "0"})
show(f"pyiceberg {version}, no retries", *without_retries)
delta = with_delta("delta")
show(f"deltalake {deltalake_version}", *delta)
sys.exit((default, without_retries, delta) != (retried, refused, ("CommitFailedError", "m0 m1")))
PYTHON
venv/bin/python main.py
PYTHONPATH=older venv/bin/python main.py
