"""The Spark session: one machine unless Spark's own settings say otherwise, which go before everything here.

A setting of the user (spark-submit, ``--conf``, spark-defaults.conf, PYSPARK_SUBMIT_ARGS) is never overridden but for
the time zone: tables would be cut into other days by each user's own.
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

from pipeline import archive, jars, java
from pipeline.errors import PipelineError
from pipeline.java_errors import JavaErrors
from pipeline.sentences import sentence

#: Heap of the one Java process on one machine. With what Java takes beside it (0.6 GiB), this process, and a Python
#: worker of 0.3 GiB for each of two cores, the whole stays below 4 GiB.
DRIVER_MEMORY = "2g"
#: Java interprets methods of more than 8,000 bytes for ever, and Spark writes such for tables as wide as ours.
COMPILE_ALL = "-XX:-DontCompileHugeMethods"
#: Partitions after a shuffle on one machine. Spark's 200 are for clusters: on two cores most of the time of a small job
#: would go into starting tasks.
LOCAL_SHUFFLE_PARTITIONS = 4
#: Rows that go to Python at once. A row may be a record of a megabyte, so Spark's 10,000 could take gigabytes; below a
#: few hundred, each batch's own cost begins to show.
ARROW_ROWS = 1_000

ROOT = Path(__file__).resolve().parents[1]
_LOG_SETTINGS = "log4j2.properties"
#: What Spark calls an application that nobody gave a name.
_NAMELESS = {"", "pyspark-shell", "__main__.py"}


def session(name: str) -> SparkSession:
    """Return the session, started if there is none; ``name`` is what Spark's pages call the job.

    Raises:
        PipelineError: no Java that Spark starts on, no connector, or Spark refused to start.
    """
    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    _quiet()
    _connect_to_java()
    configuration = SparkConf()  # with all that the user set: spark-submit has put it together
    if configuration.get("spark.app.name", "") in _NAMELESS:
        configuration.setAppName(f"marq {name}")
    for setting, value in _defaults(configuration).items():
        configuration.setIfMissing(setting, value)
    configuration.set("spark.sql.session.timeZone", "UTC")
    if not sys.stderr.isatty():
        # spark-submit asks for it on every terminal, real or not.
        configuration.set("spark.ui.showConsoleProgress", "false")
    _bring_connector(configuration)
    return _start(configuration)


def _quiet() -> None:
    """PySpark writes some exceptions as JSON beside raising them."""
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


def _connect_to_java() -> None:
    if SparkContext._gateway is not None:
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else the first python3 on PATH, without our packages
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit started Java, and then us
        SparkContext._ensure_initialized()
        _log_as_ours()
        return
    home = java.home()
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)
    # Spark looks at this variable last, so every other way to say it goes before.
    os.environ.setdefault("SPARK_DRIVER_MEMORY", DRIVER_MEMORY)
    # First: of two that contradict each other Java takes the last, which is the user's.
    options = [COMPILE_ALL, os.environ.get("SPARK_SUBMIT_OPTS", "")]
    if not _has_log_settings():
        settings = Path(__file__).with_name(_LOG_SETTINGS)
        options.append(f"-Dlog4j2.configurationFile={settings.as_uri()}")
    os.environ["SPARK_SUBMIT_OPTS"] = " ".join(filter(None, options))
    if "ArchiveClassesAtExit" not in os.environ.get("SPARK_SUBMIT_OPTS", ""):
        os.environ["SPARK_SUBMIT_OPTS"] = " ".join([*archive.flags(), os.environ.get("SPARK_SUBMIT_OPTS", "")])
    with JavaErrors() as errors:
        try:
            gateway = launch_gateway(popen_kwargs={"stderr": errors.write_end})
        except Exception as error:
            raise PipelineError(f"Spark does not start: {errors.sentence() or sentence(error)}") from error
        SparkContext._ensure_initialized(gateway=gateway)


def _has_log_settings() -> bool:
    given = os.environ.get("SPARK_CONF_DIR")
    return "log4j2.configurationFile" in os.environ.get("SPARK_SUBMIT_OPTS", "") or (
        given is not None and (Path(given) / _LOG_SETTINGS).exists()
    )


def _log_as_ours() -> None:
    """Java was started without our settings of its log; where somebody gave it others, these stay."""
    jvm: Any = SparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    given = jvm.java.lang.System.getProperty("log4j2.configurationFile")
    if given is not None or loader.getResource(_LOG_SETTINGS) is not None:
        return
    with contextlib.suppress(Exception), resources.as_file(resources.files("pipeline") / _LOG_SETTINGS) as settings:
        # Else Spark would take the first start of its own log for a reason to load its own settings over ours.
        getattr(getattr(jvm.org.apache.spark.util, "Utils$"), "MODULE$").initializeLogIfNecessary(False, True)
        jvm.org.apache.logging.log4j.core.config.Configurator.reconfigure(jvm.java.net.URI(settings.as_uri()))


def _defaults(configuration: SparkConf) -> dict[str, str]:
    found = {
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_ROWS),
        # Nearly each message is a group of its own: hashing them first is in vain (a tenth of lifecycle's time).
        "spark.sql.execution.useObjectHashAggregateExec": "false",
    }
    if not configuration.get("spark.master", "local").startswith("local"):
        return found
    return found | {
        "spark.ui.enabled": "false",  # 0.5 s of each start, and a port that may be taken
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(LOCAL_SHUFFLE_PARTITIONS),
        # Not in the directory that somebody happens to be in.
        "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "spark-warehouse"),
        # Python workers import our functions; they need not be started from the checkout.
        "spark.executorEnv.PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def _bring_connector(configuration: SparkConf) -> None:
    """Have the connector known here and by executors, unless the user brought one."""
    jvm: Any = SparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    with contextlib.suppress(Exception):
        jvm.java.lang.Class.forName(jars.CONNECTOR_CLASS, False, loader)
        return
    found = jars.find()
    for jar in found:
        loader.addURL(jvm.java.io.File(str(jar)).toURI().toURL())
    given = configuration.get("spark.jars", "")
    configuration.set("spark.jars", ",".join([*filter(None, [given]), *map(str, found)]))


def _start(configuration: SparkConf) -> SparkSession:
    _keep_artifacts_apart()
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        return SparkSession.builder.config(conf=configuration).getOrCreate()
    except Exception as error:
        raise PipelineError(f"Spark does not start: {sentence(error)}") from error
    finally:
        # Spark's own handler for Ctrl-C calls Java in the middle of a call to Java, which fails with stack traces.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)


def _keep_artifacts_apart() -> None:
    """Spark 4.0 makes a directory `artifacts` where one is, and fails where one may not write; a later one need not."""
    jvm: Any = SparkContext._jvm
    with contextlib.suppress(Exception):
        manager = jvm.java.lang.Class.forName("org.apache.spark.sql.artifact.ArtifactManager$")
        root = jvm.org.apache.spark.util.Utils.createTempDir(jvm.System.getProperty("java.io.tmpdir"), "artifacts")
        for name, value in (("artifactRootDirectory", root.toPath()), ("bitmap$0", True)):
            field = manager.getDeclaredField(name)
            field.setAccessible(True)
            field.set(None, value)
