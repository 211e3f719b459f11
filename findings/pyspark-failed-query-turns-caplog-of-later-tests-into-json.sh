#!/usr/bin/env bash
# Shows that one failed query of PySpark makes the caplog.text of all later tests of the process JSON.
#
# PySpark 4.2.0 with pytest 9.2.0 (9.0.3 is not affected). A query that fails with a context (here: an overflow in
# ANSI mode) is logged by SQLQueryContextLogger or DataFrameQueryContextLogger. These loggers do not propagate, and their
# addHandler() replaces the formatter of each handler. Since pytest 9.1, caplog's handler is added to all loggers that do
# not propagate, and one handler serves the whole run.
# Expected: a failed query changes nothing for tests that do not use Spark.
# Seen: from the next test on, caplog.text is JSON, even for other loggers. Besides, this formatter calls str() of a
# logged exception, so a test whose exception has a failing __str__() fails in the logging call. Such tests pass alone
# and fail when a Spark test ran before them in the same process; with pytest-xdist, that differs from run to run.
# Output seen:
#   before: WARNING  shop:test_caplog.py:… order 7
#   after: {"ts": "…", "level": "WARNING", "logger": "shop", "msg": "order 7", "context": {}}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'pyspark==4.2.0' 'pytest==9.2.0'
cat >test_caplog.py <<'PYTHON'
import logging
from importlib.metadata import version
from pathlib import Path

import pytest
from pyspark.sql import SparkSession


def warn(caplog, name):
    logging.getLogger("shop").warning("order 7")
    Path(name).write_text(caplog.text)


def test_before(caplog):
    print("pyspark", version("pyspark"), "pytest", version("pytest"))
    warn(caplog, "before")


def test_query():
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
        spark.sql("SELECT 1 / 0").collect()
    spark.stop()


def test_after(caplog):
    warn(caplog, "after")
PYTHON
venv/bin/python -m pytest -q -s -p no:cacheprovider test_caplog.py
echo "before: $(cat before)"
echo "after: $(cat after)"
grep -q '^WARNING  shop:' before
grep -q '^{"ts": .*"msg": "order 7"' after
