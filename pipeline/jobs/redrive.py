"""``redrive``: dead letters chosen by SQL go back to a queue, or are deleted.

Shows the chosen dead letters first: how many, their reasons, and the oldest ones. Redriven messages start again at
their first attempt, as their senders made them. None is sent twice: if interrupted, run the same command again.

Columns of --where: id, queue, value (bytes), text (the value as UTF-8), headers (of the sender, a map), reason, error,
attempts, first_sent_at, dead_lettered_at, origin, partition, offset, size.

  python -m pipeline redrive emails --where "reason LIKE '%timeout%' AND headers['tenant'] = 'acme'" --rate 50
  python -m pipeline redrive emails --where "get_json_object(text, '$.country') = 'NL'" --to emails-nl --dry-run
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from marq.wire.names import check_queue_name
from pipeline.errors import PipelineError
from pipeline.kafka import Connection
from pipeline.redriving import Redrive, Request, Result, survey
from pipeline.session import session
from pipeline.writing import check_limits

_SHOWN_CHARACTERS = 60


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE", help="queue of the dead letters")
    parser.add_argument("--where", metavar="SQL", help="only dead letters for which this is true (default: all)")
    parser.add_argument("--to", metavar="QUEUE", help="target queue (default: QUEUE)")
    parser.add_argument("--delete", action="store_true", help="delete them instead: they can never be redriven")
    parser.add_argument("--rate", type=float, metavar="N", help="at most N dead letters a second")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N dead letters, oldest first")
    parser.add_argument("--wait", type=float, default=30.0, metavar="S", help="seconds to wait for a worker's answer")
    parser.add_argument("--dry-run", action="store_true", help="only show the chosen dead letters")
    parser.add_argument("--show-values", action="store_true", help="show the beginning of values, too")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")


def run(options: argparse.Namespace) -> int:
    request = _request(options)
    connection = Connection.read()
    chosen = survey(session("redrive"), connection, request)
    preview = chosen.preview()
    _show(preview, request, sys.stderr if options.json else sys.stdout)
    result = Result(len(chosen))
    interrupted = False
    if len(chosen) and not options.dry_run:
        if not options.yes:
            _confirm(request, len(chosen))
        redrive = Redrive(connection, chosen, request)
        try:
            result = redrive.run()
        except KeyboardInterrupt:
            result, interrupted = redrive.result(), True
    _report(options, request, preview, result, interrupted)
    if interrupted:
        return 130
    return 1 if result.unanswered or (result.requested < result.chosen and not options.dry_run) else 0


def _request(options: argparse.Namespace) -> Request:
    check_queue_name(options.queue)
    if options.to is not None:
        check_queue_name(options.to)
        if options.delete:
            raise PipelineError("--to and --delete: dead letters are redriven or deleted, give one of the options")
    check_limits(options.rate, options.limit, "dead letters")
    if not 0 < options.wait < 1e6:
        raise PipelineError(f"--wait {options.wait:g}: expected seconds, more than 0")
    return Request(
        options.queue, options.to or options.queue, options.where, options.limit, options.rate, options.delete,
        options.wait, options.show_values,
    )  # fmt: skip


def _show(preview: dict[str, Any], request: Request, out: Any) -> None:
    if not preview["dead_letters"]:
        print(f"queue {request.queue!r} has no such dead letters", file=out)
        return
    print(f"{preview['dead_letters']:,} dead letters of queue {request.queue!r}", file=out)
    print(f"  from {preview['oldest']} to {preview['newest']}", file=out)
    for reason, count in preview["reasons"].items():
        print(f"  {count:>10,}  {_short(reason)}", file=out)
    print("the oldest:", file=out)
    for row in preview["rows"]:
        cells = [row["id"], row["dead_lettered_at"], f"{row['attempts']} attempts", f"{row['size']:,} bytes"]
        cells += [_short(row[name]) for name in ("reason", "error", "text") if row.get(name)]
        print(f"  {' | '.join(cells)}", file=out)


def _short(text: str) -> str:
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"


def _confirm(request: Request, count: int) -> None:
    if not sys.stdin.isatty():
        raise PipelineError("this is not a terminal, so nothing was changed: add --yes, or preview with --dry-run")
    action = f"Delete {count:,} dead letters permanently" if request.delete else f"Redrive {count:,} dead letters"
    target = "" if request.delete else f" to queue {request.to!r}"
    print(f"{action}{target}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise PipelineError("nothing was changed")


def _report(
    options: argparse.Namespace, request: Request, preview: dict[str, Any], result: Result, interrupted: bool
) -> None:
    verb = "deleted" if request.delete else "redriven"
    if options.json:
        counts = asdict(result) | {verb: result.done, "unanswered": result.unanswered}
        del counts["done"]
        document = {
            "queue": request.queue, "to": None if request.delete else request.to, "where": request.where, **counts,
            "dry_run": options.dry_run, "interrupted": interrupted, "preview": preview,
        }  # fmt: skip
        print(json.dumps(document, ensure_ascii=False, default=str))
        return
    if options.dry_run:
        print(f"{result.chosen:,} dead letters would be {verb}; nothing was changed")
        return
    print(f"{result.done:,} of {result.chosen:,} dead letters {verb}")
    if result.already_settled:
        print(f"{result.already_settled:,} were redriven or deleted by others meanwhile")
    if result.removed:
        print(f"{result.removed:,} were removed meanwhile by the retention of their topic")
    if result.unanswered:
        print(
            f"{result.unanswered:,} requests are not answered yet: is a worker running (marq worker)? The"
            " requests are durable and a worker will carry them out once, even if you run the same command again"
        )
    if result.requested < result.chosen:
        print(f"{result.chosen - result.requested:,} were not requested: the same command again does the rest")
