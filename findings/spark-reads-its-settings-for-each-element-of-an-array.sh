#!/usr/bin/env bash
# Shows that Spark 4.2.0 builds a configuration for each element that exists(), filter() or transform() reads.
#
# PySpark 4.2.0. Spark interprets higher-order functions. For each element, UnsafeArrayData.get(index, type) asks
# PhysicalDataType.apply() for the type's physical type, which first asks TypeOps.apply() whether the types framework is
# on. That reads a setting by SQLConf.get(), which in a task creates a new ReadOnlySQLConf, with a new ConfigReader and
# its maps. The setting's default is computed by Utils.isTesting(), which reads the environment. The setting itself
# (spark.sql.types.framework.enabled) makes no difference to the time. Spark 4.0.0 has no such step.
# Expected: reading an element of an array of numbers costs about as much as with array_contains(), which is compiled.
# Seen: a third of the samples of the task's stack are inside SQLConf.typesFrameworkEnabled(). For 200,000 arrays of 50
# numbers, exists() took 2.2 s of processor time, array_contains() 0.3 s; with PySpark 4.0.0 0.7 and 0.3 s. In a profile
# of a job that looks up offsets in arrays of ranges, a third of all samples were there.
# Output seen:
#   pyspark 4.2.0
#   exists(): 30 of 100 samples are in SQLConf.typesFrameworkEnabled
#   array_contains(): 0 of 100 samples are in SQLConf.typesFrameworkEnabled
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'pyspark==4.2.0'
cat >sample.py <<'PYTHON'
import threading
from importlib.metadata import version

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

SAMPLES = 100

print("pyspark", version("pyspark"))
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
numbers = F.sequence(F.lit(0).cast("long"), F.lit(49).cast("long"))
rows = spark.range(0, 200_000, 1, 1).withColumn("numbers", numbers).cache()
rows.count()
manager = spark._jvm.java.lang.management.ManagementFactory.getThreadMXBean()


def stack():
    """Return the stack of the task that runs, or nothing."""
    for thread in manager.dumpAllThreads(False, False, 60):
        if thread.getThreadName().startswith("Executor task launch"):
            return [f"{frame.getClassName()}.{frame.getMethodName()}" for frame in thread.getStackTrace()]
    return []


def share(condition):
    """Return how many of the samples, taken while a query runs again and again, read the setting."""
    ended = threading.Event()

    def query():
        while not ended.is_set():
            rows.select(F.count_if(condition)).collect()

    thread = threading.Thread(target=query)
    thread.start()
    inside = taken = 0
    while taken < SAMPLES:
        frames = stack()
        if any("UnsafeArrayData" in f or "ArrayExists" in f or "GeneratedClass" in f for f in frames):
            taken += 1
            inside += any(frame.endswith("SQLConf.typesFrameworkEnabled") for frame in frames)
    ended.set()
    thread.join()
    return inside


absent = F.col("id") + 100
for name, condition in {
    "exists()": F.exists("numbers", lambda number: number == absent),
    "array_contains()": F.array_contains("numbers", absent),
}.items():
    counted = share(condition)
    print(f"{name}: {counted} of {SAMPLES} samples are in SQLConf.typesFrameworkEnabled", flush=True)
    if name == "exists()":
        assert counted > SAMPLES * 0.1, "hardly any sample reads the setting any more"
    else:
        assert counted == 0, "array_contains() reads the setting, too"
PYTHON
venv/bin/python sample.py 2>errors || { tail -n 5 errors; exit 1; }
