"""`python -m marq_worker.broker`: Kafka in the foreground; with `--prepare` it only fetches what it needs.

`--jars LIST` fetches further jars in the same way, such as those of Spark's Kafka connector.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from marq_worker.broker import downloads, java
from marq_worker.broker.downloads import VERSION, JarList
from marq_worker.broker.embedded import EmbeddedBroker
from marq_worker.broker.errors import BrokerError

DEFAULT_ADDRESS = "127.0.0.1:9092"
DEFAULT_DATA = Path(".marq") / "broker"
CHECK_SECONDS = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m marq_worker.broker", description="Apache Kafka, one node, in the foreground."
    )
    parser.add_argument("--prepare", action="store_true", help="fetch Java and Kafka's jars where missing, and end")
    parser.add_argument("--jars", type=Path, action="append", default=[], metavar="LIST", help="fetch these, too")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="kept between runs (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        return run(None if arguments.prepare else arguments.data, arguments.jars)
    except BrokerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run(data: Path | None, lists: Sequence[Path] = (), address: str | None = None) -> int:
    """Fetch what is missing and run the broker, unless ``data`` is None; return the exit code. Raises BrokerError."""
    prepare(lists)
    return 0 if data is None else serve(data, address or os.environ.get("MARQ_BOOTSTRAP_SERVERS") or DEFAULT_ADDRESS)


def prepare(lists: Sequence[Path] = ()) -> None:
    """Fetch Java and the jars, and make the archive that shortens starts. Raises BrokerError."""
    with _step("Java") as report:
        runtime = java.ensure(report)
        report(f"Java {runtime.version}: {runtime.path}")
    for jars in [JarList.read(), *map(JarList.read, lists)]:
        with _step(f"jars of {jars.name}") as report:
            report(f"{jars.name}: {downloads.ensure_jars(jars, report)}")
    archive = java.archive_path(runtime, downloads.class_path())
    if not archive.exists():
        with _step("archive of Kafka's classes") as report:
            made = _make_archive(archive)
            report(str(archive) if made else "this Java writes none: the broker starts in 3 s instead of 1.5 s")


def serve(data: Path, address: str) -> int:
    """Run until SIGINT or SIGTERM; 1 when the broker ends by itself."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    broker = EmbeddedBroker(data, address=address)
    began = time.monotonic()
    with broker:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        seconds = time.monotonic() - began
        print(f"Kafka {VERSION} on {address} after {seconds:.1f} s; data in {data}; Ctrl-C stops it", flush=True)
        while not stop.wait(CHECK_SECONDS):
            if not broker.running:
                raise BrokerError(broker.why_it_ended())
        print("stopping", flush=True)
    return 0


def _make_archive(target: Path) -> bool:
    new = target.with_name(f"{target.name}.{os.getpid()}.new")
    try:
        with EmbeddedBroker(java_flags=[f"-XX:ArchiveClassesAtExit={new}"]):
            pass  # starting loads nearly all classes
        made = new.exists()
        if not made:
            new.touch()  # an empty archive says that this Java writes none
        new.replace(target)
    except OSError as error:
        raise downloads.cannot_write(error, target) from error
    finally:
        new.unlink(missing_ok=True)
    java.remove_other_archives(target)
    return made


@contextmanager
def _step(name: str) -> Iterator[Callable[[str], None]]:
    began = time.monotonic()
    yield lambda text: print(f"    {text}", flush=True)
    print(f"    {name}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
