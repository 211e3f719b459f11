"""The session: defaults, precedence of the user's settings, and errors."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from pipeline import class_archive, jars, java
from pipeline.errors import PipelineError, sentence
from tests.embedded.machines import fake_java, shell_script
from tests.pipeline.processes import run

SHOW = """
from pipeline.session import session
spark = session("shown")
context = spark.sparkContext
names = ["spark.sql.shuffle.partitions", "spark.sql.session.timeZone"]
print(context.appName, context.master, *map(spark.conf.get, names), len(context._conf.get("spark.jars").split(",")))
"""


def test_this_machine_has_a_java_that_spark_starts_on() -> None:
    if os.environ.get("SPARK") == "skip":
        pytest.skip("SPARK=skip: tests on Spark are left out")

    try:
        java.home()
    except PipelineError as error:
        pytest.fail(f"{error}; SPARK=skip leaves the tests on Spark out", pytrace=False)


@pytest.mark.verify
def test_the_users_settings_take_precedence_and_nothing_is_left_or_printed(tmp_path: Path, needs_spark: None) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text(
        "spark.master local[1]\nspark.sql.shuffle.partitions 7\nspark.sql.session.timeZone Asia/Tokyo\n"
        "spark.driver.memory 600m\n"
    )
    (tmp_path / "work").mkdir()

    done = run(["-c", SHOW], tmp_path / "work", {"SPARK_CONF_DIR": str(tmp_path / "conf")})

    assert done.stdout == f"marq shown local[1] 7 UTC {len(jars.read_sums())}\n"
    assert done.stderr == ""
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.verify
def test_an_invalid_master_is_a_sentence(tmp_path: Path, needs_spark: None) -> None:
    program = "from pipeline.session import session; session('x')"

    done = run(["-c", program], tmp_path, {"PYSPARK_SUBMIT_ARGS": "--master nowhere pyspark-shell"})

    assert done.stderr.splitlines()[-1] == (
        "pipeline.errors.PipelineError: Spark does not start: "
        "SparkException: Master must either be yarn or start with spark, k8s, or local"
    )


def test_an_error_in_a_python_worker_is_its_own_line(spark: SparkSession) -> None:
    @udf(returnType="string", useArrow=False)
    def refused(number: int) -> str:
        raise PipelineError(f"row {number} is bad: repair it")

    @udf(returnType="string", useArrow=False)
    def failing(number: int) -> str:
        return str(int("no number"))

    for function, expected in (
        (refused, "row 0 is bad: repair it"),
        (failing, "ValueError: invalid literal for int() with base 10: 'no number'"),
    ):
        with pytest.raises(Exception, match="Traceback") as error:
            spark.range(1).select(function("id")).collect()

        assert sentence(error.value) == expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("select nope from range(1)", "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column"),
        ("select raise_error('it is bad') from range(1)", "[USER_RAISED_EXCEPTION] it is bad"),
        ("select * from parquet.`/nowhere`", "[PATH_NOT_FOUND] Path does not exist: file:/nowhere"),
        ("selekt 1", "[PARSE_SYNTAX_ERROR] Syntax error at or near 'selekt'"),
    ],
)
def test_an_error_of_spark_is_one_line(
    spark: SparkSession, capsys: pytest.CaptureFixture[str], sql: str, expected: str
) -> None:
    with pytest.raises(Exception, match=r"\[") as error:
        spark.sql(sql).collect()

    assert sentence(error.value).startswith(expected)
    assert "\n" not in sentence(error.value)
    assert capsys.readouterr().err == ""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all of PATH, on a machine whose package manager installed no Java."""
    monkeypatch.setattr(java, "INSTALLED", tmp_path / "usr-lib-jvm")
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def test_a_failed_query_leaves_the_format_of_captured_logs(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    formatter = caplog.handler.formatter

    with pytest.raises(PySparkException, match="DIVIDE_BY_ZERO"):
        spark.sql("SELECT 1 / 0").collect()
    # What pytest does before each phase of a test with all loggers that do not propagate.
    logger = logging.getLogger("SQLQueryContextLogger")
    assert not logger.propagate
    logger.addHandler(caplog.handler)
    logger.removeHandler(caplog.handler)

    assert caplog.handler.formatter is formatter


def test_without_any_java_it_says_what_to_install(machine: Path) -> None:
    with pytest.raises(PipelineError, match="Java is not installed, but Spark needs it: install Java 17"):
        java.home({"PATH": str(machine)})


@pytest.mark.parametrize(("on_path", "installed"), [("17.0.9", None), ("11.0.2", "java-17")])
def test_a_java_on_path_is_taken_unless_it_is_old_and_the_system_has_a_newer_one(
    machine: Path, on_path: str, installed: str | None
) -> None:
    fake_java(machine / "java", on_path)
    if installed is not None:
        fake_java(java.INSTALLED / installed / "bin" / "java", "17.0.9")

    # None: Spark finds it by itself.
    home = java.home({"PATH": f"{machine}:/usr/bin:/bin"})

    assert home == (None if installed is None else java.INSTALLED / installed)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo 'openjdk version \"11.0.2\"' >&2", "is Java 11"),
        (
            "echo 'java.lang.module.FindException: Module jdk.incubator.vector not found' >&2; exit 1",
            "lacks the module jdk.incubator.vector",
        ),
    ],
    ids=["too old", "cut down"],
)
def test_a_java_that_spark_does_not_start_on_is_named(machine: Path, program: str, said: str) -> None:
    shell_script(machine / "java", program)

    with pytest.raises(PipelineError, match=rf"{machine}/java {said}: install Java 17"):
        java.home({"PATH": f"{machine}:/usr/bin:/bin"})


# --- the archive of classes -------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARQ_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("needs_spark")
def test_java_starts_from_the_archive_of_its_own_and_of_these_jars(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (chosen := java.home()) is not None:
        monkeypatch.setenv("JAVA_HOME", str(chosen))
    target = class_archive.path()
    assert (target.parent, class_archive.flags()) == (cache, [])
    # An empty archive stands for a Java that writes none.
    target.touch()
    assert class_archive.flags() == []

    target.write_bytes(b"classes")

    assert class_archive.flags()[0] == f"-XX:SharedArchiveFile={target}"


def test_set_up_leaves_it_out_with_the_tests_on_spark(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK", "skip")

    code = class_archive.main()

    assert code == 0
    assert list(cache.iterdir()) == []
