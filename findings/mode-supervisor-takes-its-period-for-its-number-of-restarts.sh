#!/usr/bin/env bash
# Shows that a supervisor of mode (used by Faust's agents) confuses the number of restarts with their period.
#
# mode-streaming 0.7.1, on which faust-streaming 0.15.3 is built. max_restarts=N, over=S means N restarts in S seconds,
# as in Erlang, whose names the supervisors have. The default is 100 restarts in 1 s; Faust uses the same for agents.
# Expected: with 5 in 1 s, five services that crash together are restarted. With 3 in 60 s, a service that crashes at
# each start is started four times; then the supervisor gives up.
# Seen: the token bucket holds S tokens and gets N new ones per second, so the limit is a burst of S restarts, and then
# N per second. With 5 in 1 s, the bucket holds one token: after two restarts, the supervisor itself crashes with
# SystemExit, and the other services stay dead. With 3 in 60 s, it allows 60 restarts in a row. In a message queue, all
# actors of an agent with concurrency may lose the same database at once. The worker then ends, although it may restart
# 100 in a second, while a crash loop that was to end goes on.
# Output seen:
#   max_restarts=5, over=1: 5 services crashed once, 2 were restarted, then the supervisor crashed: SystemExit(1)
#   max_restarts=3, over=60: a service that crashes at each start was restarted at least 20 times
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'mode-streaming==0.7.1'
cat >main.py <<'PYTHON'
import asyncio, logging, sys, time
from importlib.metadata import version
from mode import Service
from mode.supervisors import OneForOneSupervisor

ENOUGH, LIMIT_S = 20, 60
logging.disable()
print("mode-streaming", version("mode-streaming"))

class Crashing(Service):
    def __init__(self, crashes):
        super().__init__()
        self.crashes, self.starts = crashes, 0

    async def on_start(self):
        self.starts += 1

    @Service.task
    async def run(self):
        if self.starts <= self.crashes:
            raise ConnectionError("no broker")
        await self.wait_for_stopped()

async def supervise(services, enough, **limits):
    """Return how many restarts there were, and why the supervisor crashed."""
    supervisor = OneForOneSupervisor(**limits)
    supervisor.add(*services)
    await supervisor.start()
    until = time.monotonic() + LIMIT_S
    def restarts():
        return sum(service.starts - 1 for service in services)
    while restarts() < enough and not supervisor.crashed and time.monotonic() < until:
        await asyncio.sleep(0.01)
    seen = restarts(), supervisor.crash_reason
    await supervisor.stop()
    return seen

async def main():
    few, gave_up = await supervise([Crashing(1) for _ in range(5)], 5, max_restarts=5, over=1)
    print("max_restarts=5, over=1: 5 services crashed once,",
          f"{few} were restarted, then the supervisor crashed: {gave_up!r}")
    many, _ = await supervise([Crashing(sys.maxsize)], ENOUGH, max_restarts=3, over=60)
    print("max_restarts=3, over=60: a service that crashes at each start was restarted",
          f"at least {ENOUGH} times" if many >= ENOUGH else f"{many} times")
    # On a slow machine, the bucket may get a token between two restarts.
    return few < 5 and isinstance(gave_up, SystemExit) and many >= ENOUGH

sys.exit(not asyncio.run(main()))
PYTHON
venv/bin/python main.py
