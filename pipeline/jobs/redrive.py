"""``redrive``: dead letters chosen by SQL go back to a queue, or are deleted.

What is meant is shown before anything happens: how many, why they died, and those that died first. Letters go back as
their senders made them, at their first attempt. None goes twice: whoever is interrupted calls it again.

Columns of --where: id, queue, value (bytes), text (the value as UTF-8), headers (those of the sender, a map), reason,
error, attempts, first_sent_at, died_at, origin, partition, offset, size.

  python -m pipeline redrive emails --where "reason LIKE '%timeout%' AND headers['tenant'] = 'acme'" --rate 50
  python -m pipeline redrive emails --where "get_json_object(text, '$.country') = 'NL'" --to emails-nl --dry-run
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from marq.core.names import check_queue_name
from pipeline.errors import PipelineError
from pipeline.kafka import Connection
from pipeline.redriving import Letters, Request, Result, Settling
from pipeline.session import session

MAX_RATE = 1_000_000
_SHOWN_CHARACTERS = 60


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE", help="whose dead letters")
    parser.add_argument("--where", metavar="SQL", help="only letters of which this is true (default: all of the queue)")
    parser.add_argument("--to", metavar="QUEUE", help="send them to another queue")
    parser.add_argument("--delete", action="store_true", help="delete them instead: they can never be redriven")
    parser.add_argument("--rate", type=float, metavar="N", help="letters a second at the most")
    parser.add_argument("--limit", type=int, metavar="N", help="so many, those that died first")
    parser.add_argument("--wait", type=float, default=30.0, metavar="S", help="seconds to wait for a worker's answer")
    parser.add_argument("--dry-run", action="store_true", help="only show what is meant")
    parser.add_argument("--show-values", action="store_true", help="show the beginning of values, too")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(given: argparse.Namespace) -> int:
    request = _request(given)
    connection = Connection.read()
    found = Letters(session("redrive"), connection)
    survey = found.survey(request)
    preview = survey.preview()
    out = sys.stderr if given.json else sys.stdout
    _show(preview, request, out)
    result = Result(len(survey))
    interrupted = False
    if len(survey) and not given.dry_run and _agreed(given, request, len(survey)):
        settling = Settling(found, survey, request)
        try:
            result = settling.run()
        except KeyboardInterrupt:
            result, interrupted = settling.result(), True
    _report(given, request, preview, result, interrupted)
    if interrupted:
        return 130
    return 1 if result.unanswered or (result.asked < result.chosen and not given.dry_run) else 0


def _request(given: argparse.Namespace) -> Request:
    check_queue_name(given.queue)
    if given.to is not None:
        check_queue_name(given.to)
        if given.delete:
            raise PipelineError("--to and --delete: letters are sent to a queue or deleted, say one of them")
    if given.rate is not None and not 0 < given.rate <= MAX_RATE:
        raise PipelineError(f"--rate {given.rate:g}: expected letters a second, more than 0 and at most {MAX_RATE:,}")
    if given.limit is not None and given.limit < 1:
        raise PipelineError(f"--limit {given.limit}: expected a number of letters from 1 on")
    if not 0 < given.wait < 1e6:
        raise PipelineError(f"--wait {given.wait:g}: expected seconds, more than 0")
    to = given.to or given.queue
    return Request(
        given.queue, to, given.where, given.limit, given.rate, given.delete, given.wait, given.show_values
    )  # fmt: skip


def _show(preview: dict[str, Any], request: Request, out: Any) -> None:
    if not preview["letters"]:
        print(f"queue {request.queue!r} has no such dead letters", file=out)
        return
    print(f"{preview['letters']:,} dead letters of queue {request.queue!r}", file=out)
    print(f"  died from {preview['oldest']} to {preview['newest']}", file=out)
    for reason, count in preview["reasons"].items():
        print(f"  {count:>10,}  {_short(reason)}", file=out)
    print("those that died first:", file=out)
    for row in preview["rows"]:
        words = [row["id"], row["died_at"], f"{row['attempts']} attempts", f"{row['size']:,} bytes"]
        words += [_short(row[name]) for name in ("reason", "error", "text") if row.get(name)]
        print(f"  {' | '.join(words)}", file=out)


def _short(text: str) -> str:
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"


def _agreed(given: argparse.Namespace, request: Request, count: int) -> bool:
    if given.yes:
        return True
    if not sys.stdin.isatty():
        raise PipelineError("there is no terminal to ask on, so nothing was changed: add --yes, or --dry-run to look")
    what = "Delete" if request.delete else "Send"
    where = "for good" if request.delete else f"to queue {request.to!r}"
    print(f"{what} {count:,} dead letters {where}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    raise PipelineError("nothing was changed")


def _report(
    given: argparse.Namespace, request: Request, preview: dict[str, Any], result: Result, interrupted: bool
) -> None:
    did = "deleted" if request.delete else "redriven"
    if given.json:
        said = {
            "queue": request.queue, "to": None if request.delete else request.to, "where": request.where,
            "chosen": result.chosen, "asked": result.asked, did: result.done,
            "already_settled": result.already_settled, "removed": result.removed, "unanswered": result.unanswered,
            "dry_run": given.dry_run, "interrupted": interrupted, "preview": preview,
        }  # fmt: skip
        print(json.dumps(said, ensure_ascii=False, default=str))
        return
    if given.dry_run:
        print(f"{result.chosen:,} dead letters would be {did}; nothing was changed")
        return
    print(f"{result.done:,} of {result.chosen:,} dead letters {did}")
    if result.already_settled:
        print(f"{result.already_settled:,} were settled by somebody else meanwhile")
    if result.removed:
        print(f"{result.removed:,} were removed by the retention of their topic meanwhile")
    if result.unanswered:
        print(
            f"{result.unanswered:,} were asked for and are not answered yet: is a worker running (faust -A app worker)?"
            " Nothing is lost: what was asked for is done when one is, and the same command again does it once"
        )
    if result.asked < result.chosen:
        print(f"{result.chosen - result.asked:,} were not asked for: the same command again does the rest")
