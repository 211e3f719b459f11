"""``python -m tests.browser.tour``: a real browser through all pages and actions, on what the demo's load leaves.

Options and sizes are the demo's. One line for each page and action; exit code 1: one of them failed; 2: the load did
not come to its end.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, Error, expect

from broker import EmbeddedBroker
from broker.errors import BrokerError
from demo.errors import DemoError
from demo.plan import Plan, read_plan
from marq.core.errors import MarqError
from tests.browser.serving import Background
from tests.browser.tour.stage import Stage, staged
from tests.browser.tour.steps import STEPS, Step
from tests.browser.windows import WAIT_MS, launched, watched


def main() -> int:
    plan = read_plan(sys.argv[1:])
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    expect.set_options(timeout=WAIT_MS)
    background = Background()
    try:
        with tempfile.TemporaryDirectory(prefix="marq-tour-") as folder, EmbeddedBroker() as broker:
            failed = tour(background, broker.bootstrap_servers, Path(folder), plan)
    except (DemoError, BrokerError, MarqError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        background.stop()
    print(f"{len(STEPS) - failed} of {len(STEPS)} pages and actions as they should be")
    return 1 if failed else 0


def tour(background: Background, servers: str, folder: Path, plan: Plan) -> int:
    """Go through all steps; return how many failed."""
    began_s = time.monotonic()
    with staged(background, servers, folder, plan) as stage, launched() as browser:
        print(f"{plan.messages:,} messages of {plan.queues} queues have ended, {time.monotonic() - began_s:.1f} s")
        return sum(not took(step, stage, browser) for step in STEPS)


def took(step: Step, stage: Stage, browser: Browser) -> bool:
    """Take a step, and say how it went."""
    began_s, why = time.monotonic(), ""
    try:
        with watched(browser) as new_page:
            step.check(stage, new_page())
    except (AssertionError, Error, MarqError, TimeoutError) as error:
        why = f"\n       {str(error) or type(error).__name__}"
    print(f"{'FAILED' if why else 'ok':6} {step.name} {time.monotonic() - began_s:.1f} s{why}", flush=True)
    return not why


if __name__ == "__main__":
    sys.exit(main())
