#!/usr/bin/env bash
# Shows that a Spark query with availableNow never ends if it has processing-time timers, or leaves those that are due.
#
# PySpark 4.2.0, pandas 3.1.1, pyarrow 26.0.1, protobuf 7.36.2 (the script needs Java). A job is started each hour to find expired leases. It
# reads new messages with transformWithState in the time mode ProcessingTime, sets a timer for each, and writes a row
# when it fires. Its trigger is availableNow=True.
# Expected: each run handles the messages that are available, fires the timers that are due, and ends. The
# documentation of DataStreamWriter.trigger says that availableNow processes all available data and then terminates.
# Seen: the run does not end. After the message, it runs one empty batch after another, even when no timer is left, and
# each writes files to the checkpoint. For this mode, shouldRunAnotherBatch() of the operator always returns true.
# A comment there plans to look at the timers (SPARK-50180). The trigger goes on until the operator needs no batch.
# With the setting spark.sql.streaming.noDataMicroBatches.enabled=false each run ends. But then a run without new
# messages has no batch, and a timer that is long due does not fire. It fires with the next message, of any key. So a
# lease of a quiet queue never expires. Such a job needs the processing time trigger, and has to be stopped by its
# caller, or it needs a message that starts a batch.
# Output seen:
#   default: still running after its timer and 5 empty batches
#   no empty batches: first run ends: m1 registered
#   no empty batches: run with a due timer ends: nothing
#   no empty batches: run with a due timer and another message ends: m1 expired, m2 registered
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'pyspark==4.2.0' 'pandas==3.1.1' 'pyarrow==26.0.1' 'protobuf==7.36.2'
cat >main.py <<'PYTHON'
import json, os, sys, threading, time
from importlib.metadata import version

os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

EMPTY, TIMER_MS, LIMIT_S = 5, 1, 60
print(*(f"{name} {version(name)}" for name in ("pyspark", "pandas", "pyarrow", "protobuf")))
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
store = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
builder = builder.config("spark.sql.streaming.stateStore.providerClass", store)
spark = builder.config("spark.sql.shuffle.partitions", "1").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")

class Leases(StatefulProcessor):
    def init(self, handle):
        self.handle = handle

    def handleInputRows(self, key, rows, timerValues):
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + TIMER_MS)
        yield Row(id=key[0], event="registered")

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        yield Row(id=key[0], event="expired")

    def close(self):
        pass

def send(name, message):
    os.makedirs(f"{name}/in", exist_ok=True)
    with open(f"{name}/in/{message}.json", "w") as file:
        json.dump({"id": message}, file)

def run(name):
    """Start the query; return whether it ended before its fifth empty batch, and its rows."""
    rows, empty, enough = [], [], threading.Event()

    def write(batch, number):
        new = [f"{row.id} {row.event}" for row in batch.collect()]
        rows.extend(new)
        if not new and rows:
            empty.append(number)
        if len(empty) >= EMPTY:
            enough.set()

    messages = spark.readStream.schema("id string").json(f"{name}/in").groupBy("id")
    events = messages.transformWithState(Leases(), "id string, event string", "append", "ProcessingTime")
    query = events.writeStream.option("checkpointLocation", f"{name}/checkpoint").trigger(availableNow=True)
    query = query.foreachBatch(write).start()
    end = time.monotonic() + LIMIT_S
    while not query.awaitTermination(1) and not enough.is_set() and time.monotonic() < end:
        pass
    ended = not query.isActive
    query.stop()
    return ended, sorted(rows)

def text(rows):
    return ", ".join(rows) or "nothing"

send("default", "m1")
seen = [run("default")]
print(f"default: {'ends' if seen[0][0] else f'still running after its timer and {EMPTY} empty batches'}", flush=True)
spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
for title, message in (("first run", "m1"), ("run with a due timer", None),
                       ("run with a due timer and another message", "m2")):
    if message:
        send("quiet", message)
    ended, rows = run("quiet")
    print(f"no empty batches: {title} {'ends' if ended else 'does not end'}: {text(rows)}", flush=True)
    seen.append((ended, rows))
sys.exit(seen != [(False, ["m1 expired", "m1 registered"]), (True, ["m1 registered"]), (True, []),
                  (True, ["m1 expired", "m2 registered"])])
PYTHON
venv/bin/python main.py 2>errors || { tail -n 5 errors; exit 1; }
