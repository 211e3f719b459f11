#!/usr/bin/env bash
# Shows that Spark 4.2.0 lets all duplicates pass once one of five columns of dropDuplicates() has another name.
#
# PySpark 4.2.0. A streaming query drops repeated messages by some of their columns, all of them strings. It is stopped,
# and one of these columns is renamed, as it is after a change in a producer. Then it is started again with its
# checkpoint, with the columns in the same order, and gets the same messages again.
# Expected: it drops them, or it refuses to start. Spark's guide allows no change in the number or type of the keys of a
# deduplication, and neither changes. Spark compares the types of the keys with those in the checkpoint, not the names.
# Seen: with four columns, it drops them. With five, each message passes again, without an error or a warning. The state
# has the keys by position. Dataset.dropDuplicates() takes the columns as colNames.toSet.toSeq. A Scala set keeps the
# order of up to four elements. From five on, it is a hash set, so the order depends on the hashes of all names, and a
# new name can move the other columns. The old keys stay in the state, and match no message. SPARK-57489 makes the order
# fixed in a later version. A deduplication of messages in Spark needs one column of all its keys, for example with
# concat_ws() and a separator that they do not contain.
# Output seen:
#   4 columns, same names: 5 messages, then 0 of the same 5
#   4 columns, one renamed: 5 messages, then 0 of the same 5
#   5 columns, same names: 5 messages, then 0 of the same 5
#   5 columns, one renamed: 5 messages, then 5 of the same 5
#   1 column of 5, one renamed: 5 messages, then 0 of the same 5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'pyspark==4.2.0'
cat >main.py <<'PYTHON'
import json, os, sys
from importlib.metadata import version
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

COLUMNS, MESSAGES = ["queue", "tenant", "region", "source", "message_id"], 5
print("pyspark", version("pyspark"))
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
spark = builder.config("spark.sql.shuffle.partitions", "1").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")

def send(folder, file):
    """Add a file with the same messages as each other file."""
    rows = ({name: f"{name} {number}" for name in COLUMNS} for number in range(MESSAGES))
    with open(f"{folder}/{file}.json", "w") as output:
        output.writelines(json.dumps(row) + "\n" for row in rows)

def passed(name, columns, renamed, combined):
    """Return how many messages one run of the query with this checkpoint lets pass."""
    counts = []
    messages = spark.readStream.schema(", ".join(f"{column} string" for column in COLUMNS)).json(f"{name}/in")
    for old, new in renamed.items():
        messages = messages.withColumnRenamed(old, new)
    keys = [renamed.get(column, column) for column in columns]
    if combined:
        messages, keys = messages.withColumn("key", F.concat_ws("/", *keys)), ["key"]
    query = messages.dropDuplicates(keys).writeStream.option("checkpointLocation", f"{name}/checkpoint")
    query = query.trigger(availableNow=True).foreachBatch(lambda batch, _: counts.append(batch.count())).start()
    query.awaitTermination()
    return sum(counts)

RENAMED = {"queue": "queue_name"}
seen = []
for title, columns, renamed, combined in (("4 columns, same names", COLUMNS[:3] + COLUMNS[4:], {}, False),
                                          ("4 columns, one renamed", COLUMNS[:3] + COLUMNS[4:], RENAMED, False),
                                          ("5 columns, same names", COLUMNS, {}, False),
                                          ("5 columns, one renamed", COLUMNS, RENAMED, False),
                                          ("1 column of 5, one renamed", COLUMNS, RENAMED, True)):
    os.makedirs(f"{title}/in")
    send(f"{title}/in", "first")
    before = passed(title, columns, {}, combined)
    send(f"{title}/in", "second")
    after = passed(title, columns, renamed, combined)
    print(f"{title}: {before} messages, then {after} of the same {MESSAGES}", flush=True)
    seen.append((before, after))
sys.exit(seen != [(MESSAGES, 0)] * 3 + [(MESSAGES, MESSAGES), (MESSAGES, 0)])
PYTHON
venv/bin/python main.py 2>errors || { tail -n 5 errors; exit 1; }
