#!/usr/bin/env bash
# Shows that one 503 answer to a poll ends a Celery worker on SQS, although kombu means to take it for an empty answer.
#
# celery 5.7.0, kombu 5.7.0, boto3 1.44.8, pycurl 7.49.0. The script's own endpoint answers what a worker asks. It gives
# one poll (ReceiveMessage) the status 503, as SQS, a load balancer or a proxy does for a moment, or 408, 500, 502, 504.
# Expected: the worker polls again. Since kombu's issue 1172, its source takes these statuses for an empty list, with
# the comment "This prevents hanging the Celery worker".
# Seen: kombu returns an empty list for them, but the code that gets it calls its get(), as an answer in JSON is a
# mapping. Celery does not connect again after an AttributeError, so the worker exits with 1, after its running tasks.
# One moment of a load balancer thus ends all workers that poll at that time. An SQS endpoint has to answer a poll that
# it cannot serve with 200 and no messages, and workers need a supervisor.
# Output seen:
#   200: worker runs, 6 polls
#   408: exit code 1, 3 polls, AttributeError: 'list' object has no attribute 'get'
#   500: exit code 1, 3 polls, AttributeError: 'list' object has no attribute 'get'
#   502: exit code 1, 3 polls, AttributeError: 'list' object has no attribute 'get'
#   503: exit code 1, 3 polls, AttributeError: 'list' object has no attribute 'get'
#   504: exit code 1, 3 polls, AttributeError: 'list' object has no attribute 'get'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'celery==5.7.0' 'kombu[sqs]==5.7.0' 'boto3==1.44.8' 'pycurl==7.49.0'
cat >shop.py <<'PYTHON'
import os
from celery import Celery

app = Celery("shop", broker=f"sqs://key:secret@{os.environ['SERVER']}")
app.conf.broker_transport_options = {"is_secure": False, "region": "eu-west-1", "wait_time_seconds": 1}
PYTHON
cat >main.py <<'PYTHON'
import json, os, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

ANSWERED, POLLS = 3, 6
print(*(f"{name} {version(name)}" for name in ("celery", "kombu", "boto3", "pycurl")))

class Endpoint(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        operation, status = self.headers["X-Amz-Target"].removeprefix("AmazonSQS."), 200
        url = f"http://{self.headers['Host']}/000000000000/celery"
        answer = {"ListQueues": {"QueueUrls": [url]}, "CreateQueue": {"QueueUrl": url},
                  "GetQueueAttributes": {"Attributes": {"ApproximateNumberOfMessages": "0"}}}.get(operation, {})
        if operation == "ReceiveMessage":
            self.server.polls += 1
            time.sleep(0.2)
            if self.server.polls == ANSWERED:
                status = self.server.status
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

def run(status):
    """Run a worker whose third poll gets the status, until it exits or has polled again; return what it did."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.polls, server.status = 0, status
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = os.environ | {"SERVER": f"127.0.0.1:{server.server_address[1]}"}
    with open("log", "w") as log:
        worker = subprocess.Popen([sys.executable, "-m", "celery", "-A", "shop", "worker", "--concurrency", "1"],
                                  env=environment, stdout=log, stderr=log)
    while worker.poll() is None and server.polls < POLLS:
        time.sleep(0.1)
    polls, code = server.polls, worker.poll()
    if code is None:
        worker.terminate()
        worker.wait()
    server.shutdown()
    with open("log") as log:
        errors = [line.strip() for line in log if line.startswith("AttributeError")]
    return code, polls, errors

def text(code, polls, errors):
    outcome = "worker runs" if code is None else f"exit code {code}"
    return ", ".join([outcome, f"{polls} polls", *errors])

seen = {status: run(status) for status in (200, 408, 500, 502, 503, 504)}
for status, result in seen.items():
    print(f"{status}: {text(*result)}")
ended = (1, ANSWERED, ["AttributeError: 'list' object has no attribute 'get'"])
sys.exit(seen != {200: (None, POLLS, [])} | dict.fromkeys((408, 500, 502, 503, 504), ended))
PYTHON
venv/bin/python main.py
