"""The Spark session: on this machine by default; Spark's own settings take precedence.

Settings of the user (spark-submit, ``--conf``, spark-defaults.conf, PYSPARK_SUBMIT_ARGS) are never overridden, except
two on which the tables would depend: the time zone, which decides their days, and the type of times.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
from importlib import resources
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from pipeline import class_archive, jars, java
from pipeline.errors import PipelineError, sentence

#: Heap of the Java process on one machine. With Java's other memory (0.6 GiB), this process, and a Python worker of
#: 0.3 GiB for each of two cores, a job stays below 4 GiB.
DRIVER_MEMORY = "2g"
#: Java never compiles methods of more than 8,000 bytes by default, and Spark generates such for tables as wide as ours.
COMPILE_ALL = "-XX:-DontCompileHugeMethods"
#: Partitions after a shuffle on one machine. With Spark's 200, a small job would mostly start tasks.
LOCAL_SHUFFLE_PARTITIONS = 4
#: Rows and bytes sent to Python at once. A row may be a record of a megabyte, so Spark's 10,000 could take gigabytes;
#: below a few hundred, the cost of each batch shows.
ARROW_ROWS, ARROW_BYTES = 1_000, 32 << 20

#: Settings with which queries are neither compiled nor planned again half-way.
FEW_ROWS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}

ROOT = Path(__file__).resolve().parents[1]
_LOG_SETTINGS = "log4j2.properties"
#: Spark's names for an application without a name.
_NAMELESS = {"", "pyspark-shell", "__main__.py"}


def session(name: str) -> SparkSession:
    """Return the session, started if there is none; ``name`` is the job's name in Spark's UI."""
    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    # PySpark writes some exceptions as JSON in addition to raising them.
    for logger in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(logger).setLevel(logging.CRITICAL)
    _connect_to_java()
    configuration = SparkConf()  # with all settings of the user, which spark-submit collected
    if configuration.get("spark.app.name", "") in _NAMELESS:
        configuration.setAppName(f"marq {name}")
    for setting, value in _defaults(configuration).items():
        configuration.setIfMissing(setting, value)
    configuration.set("spark.sql.session.timeZone", "UTC")
    # Spark's default, INT96, has no time zone and no statistics, and readers compute the year 1816 from the year 9999.
    configuration.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    if not sys.stderr.isatty():
        # spark-submit switches it on even without a terminal.
        configuration.set("spark.ui.showConsoleProgress", "false")
    _add_connector(configuration)
    return _start(configuration)


def for_few_rows(spark: SparkSession) -> SparkSession:
    """Return another session of the same application, for queries of so few rows that compiling them takes longer."""
    few = spark.newSession()
    for name, value in FEW_ROWS.items():
        few.conf.set(name, value)
    return few


def _connect_to_java() -> None:
    if SparkContext._gateway is not None:
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else the first python3 on PATH, without our packages
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit started Java, and then us
        SparkContext._ensure_initialized()
        _configure_log()
        return
    home = java.home()
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)
    # Spark reads this variable last, so every other way to set it takes precedence.
    os.environ.setdefault("SPARK_DRIVER_MEMORY", DRIVER_MEMORY)
    # The user's options come last: of two contradictory options Java takes the last.
    users = os.environ.get("SPARK_SUBMIT_OPTS", "")
    options = [] if "ArchiveClassesAtExit" in users else class_archive.flags()
    options += [COMPILE_ALL, users]
    if not _has_log_settings():
        options.append(f"-Dlog4j2.configurationFile={Path(__file__).with_name(_LOG_SETTINGS).as_uri()}")
    os.environ["SPARK_SUBMIT_OPTS"] = " ".join(filter(None, options))
    with java.JavaErrors() as errors:
        try:
            gateway = launch_gateway(popen_kwargs={"stderr": errors.write_end})
        except Exception as error:
            raise PipelineError(f"Spark does not start: {errors.sentence() or sentence(error)}") from error
        SparkContext._ensure_initialized(gateway=gateway)


def _has_log_settings() -> bool:
    directory = os.environ.get("SPARK_CONF_DIR")
    in_directory = directory is not None and (Path(directory) / _LOG_SETTINGS).exists()
    return in_directory or "log4j2.configurationFile" in os.environ.get("SPARK_SUBMIT_OPTS", "")


def _configure_log() -> None:
    """Apply our log settings to a Java that spark-submit started, unless the user configured others."""
    jvm: Any = SparkContext._jvm
    configured = jvm.java.lang.System.getProperty("log4j2.configurationFile")
    if configured is not None or _class_loader().getResource(_LOG_SETTINGS) is not None:
        return
    with contextlib.suppress(Exception), resources.as_file(resources.files("pipeline") / _LOG_SETTINGS) as settings:
        # Otherwise Spark's first log line would load Spark's own settings over ours.
        getattr(getattr(jvm.org.apache.spark.util, "Utils$"), "MODULE$").initializeLogIfNecessary(False, True)
        jvm.org.apache.logging.log4j.core.config.Configurator.reconfigure(jvm.java.net.URI(settings.as_uri()))


def _class_loader() -> Any:
    jvm: Any = SparkContext._jvm
    return jvm.java.lang.Thread.currentThread().getContextClassLoader()


def _defaults(configuration: SparkConf) -> dict[str, str]:
    settings = {
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_ROWS),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(ARROW_BYTES),
        # Almost every message is a group of its own, so hashing them first is wasted (a tenth of lifecycle's time).
        "spark.sql.execution.useObjectHashAggregateExec": "false",
    }
    if not configuration.get("spark.master", "local").startswith("local"):
        return settings
    return settings | {
        "spark.ui.enabled": "false",  # takes 0.5 s of each start, and a port
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(LOCAL_SHUFFLE_PARTITIONS),
        # The default is the current directory.
        "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "spark-warehouse"),
        # Python workers import our functions from any directory.
        "spark.executorEnv.PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def _add_connector(configuration: SparkConf) -> None:
    """Load the connector in the driver and the executors, unless the user brought one."""
    jvm: Any = SparkContext._jvm
    loader = _class_loader()
    with contextlib.suppress(Exception):
        jvm.java.lang.Class.forName(jars.CONNECTOR_CLASS, False, loader)
        return
    connector = jars.find()
    for jar in connector:
        loader.addURL(jvm.java.io.File(str(jar)).toURI().toURL())
    users = configuration.get("spark.jars", "")
    configuration.set("spark.jars", ",".join([*filter(None, [users]), *map(str, connector)]))


def _start(configuration: SparkConf) -> SparkSession:
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        return SparkSession.builder.config(conf=configuration).getOrCreate()
    except Exception as error:
        raise PipelineError(f"Spark does not start: {sentence(error)}") from error
    finally:
        # Spark's own Ctrl-C handler calls Java in the middle of a call to Java, which fails with stack traces.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)
