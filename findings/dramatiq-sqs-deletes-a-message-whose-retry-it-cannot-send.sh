#!/usr/bin/env bash
# Shows that dramatiq on SQS deletes a message whose retry it cannot send, instead of keeping or dead-lettering it.
#
# dramatiq 2.2.1, dramatiq-sqs 0.4.4, boto3 1.44.8. The broker has a dead-letter queue (dead_letter=True) and dramatiq's
# default middleware. An actor always fails, as it does while a mail server is down. The script's own endpoint has no
# clock: it delivers a retry at once, whatever its delay.
# Expected: 20 retries (the default), then a dead letter. The README states that SQS delays a message by 15 minutes at
# most, so a longer delay is shortened, or leads to a dead letter. If SQS does not take a retry, the message stays, and
# SQS delivers it again after its visibility timeout.
# Seen: the delay doubles from 15 s, so at the sixth or seventh failure it is above 15 minutes, and the broker raises
# MessageDelayTooLong. It does so in a hook of the middleware Retries, and dramatiq only logs errors of such hooks. It
# takes the message for processed, so the worker acknowledges it, and SQS deletes it. With default settings, an outage
# of an hour thus loses each message that it affects, and the dead-letter queue is empty. If SQS answers 503 to all of
# boto3's attempts to send a retry, the message is lost at its first failure, even with a max_backoff of 15 minutes. A
# message queue must not acknowledge a message before its retry is written.
# Output seen:
#   max_backoff of 15 minutes: 21 attempts, longest delay 855 s, dead letters 1, left in the queue 0
#   default max_backoff: 7 attempts, longest delay 521 s, dead letters 0, left in the queue 0
#   max_backoff of 15 minutes, 503 for a retry: 1 attempts, longest delay 0 s, dead letters 0, left in the queue 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'dramatiq==2.2.1' 'dramatiq-sqs==0.4.4' 'boto3==1.44.8'
cat >main.py <<'PYTHON'
import itertools, json, logging, sys, threading, time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
import dramatiq
from dramatiq_sqs import SQSBroker

LONGEST_DELAY_S, LIMIT_S = 900, 200
logging.disable()
print(*(f"{name} {version(name)}" for name in ("dramatiq", "dramatiq-sqs", "boto3")))

class Endpoint(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, operation, request):
        """Return the answer, or None for the status 503."""
        server, name = self.server, request.get("QueueUrl", "").rpartition("/")[2]
        if operation == "GetQueueUrl":
            return {"QueueUrl": f"http://{self.headers['Host']}/000000000000/{request['QueueName']}"}
        if operation == "SendMessage":
            if server.refuses_retries and server.attempts:
                return None
            server.delays.append(request.get("DelaySeconds", 0))
            server.queues[name].append(request["MessageBody"])
            return {"MessageId": "m", "MD5OfMessageBody": "m"}
        if operation == "DeleteMessage":
            del server.in_flight[request["ReceiptHandle"]]
            return {}
        assert operation == "ReceiveMessage", operation
        if not server.queues[name]:
            return {}
        receipt = str(next(server.receipts))
        server.in_flight[receipt] = body = server.queues[name].popleft()
        return {"Messages": [{"MessageId": "m", "ReceiptHandle": receipt, "Body": body, "MD5OfBody": "m"}]}

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            answer = self.answer(self.headers["X-Amz-Target"].removeprefix("AmazonSQS."), request)
        body = json.dumps(answer or {}).encode()
        self.send_response(503 if answer is None else 200)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

def run(refuses_retries=False, **options):
    """Work until the message is in no queue; return its attempts, its delays, dead letters and messages left."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.queues, server.in_flight = {"mail": deque(), "mail_dlq": deque()}, {}
    server.receipts, server.lock = itertools.count(), threading.Lock()
    server.delays, server.attempts, server.refuses_retries = [], 0, refuses_retries
    threading.Thread(target=server.serve_forever, daemon=True).start()
    broker = SQSBroker(dead_letter=True, endpoint_url=f"http://127.0.0.1:{server.server_address[1]}",
                       region_name="eu-west-1", aws_access_key_id="key", aws_secret_access_key="secret")

    @dramatiq.actor(broker=broker, queue_name="mail", **options)
    def send_mail():
        server.attempts += 1
        raise ConnectionError("The mail server is down.")

    def left():
        with server.lock:
            return len(server.queues["mail"]) + len(server.in_flight)

    send_mail.send()
    worker = dramatiq.Worker(broker, worker_timeout=1000, worker_threads=1)
    worker.start()
    end = time.monotonic() + LIMIT_S
    while left() and time.monotonic() < end:
        time.sleep(0.1)
    worker.stop()
    server.shutdown()
    return server.attempts, server.delays, len(server.queues["mail_dlq"]), left()

results = []
for name, options in (("max_backoff of 15 minutes", {"max_backoff": LONGEST_DELAY_S * 1000}),
                      ("default max_backoff", {}),
                      ("max_backoff of 15 minutes, 503 for a retry",
                       {"max_backoff": LONGEST_DELAY_S * 1000, "refuses_retries": True})):
    attempts, delays, dead_letters, left = run(**options)
    print(f"{name}: {attempts} attempts, longest delay {max(delays)} s, dead letters {dead_letters}, "
          f"left in the queue {left}")
    results.append((attempts, dead_letters, left))
limited, default, refused = results
sys.exit(not (limited == (21, 1, 0) and default in ((6, 0, 0), (7, 0, 0)) and refused == (1, 0, 0)))
PYTHON
venv/bin/python main.py
