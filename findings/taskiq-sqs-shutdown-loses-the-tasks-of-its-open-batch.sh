#!/usr/bin/env bash
# Shows that the shutdown of a taskiq broker on SQS loses its open batch, although the README promises to send it.
#
# taskiq-aio-sqs 2.1.1, taskiq 0.13.0, aiobotocore 3.10.0. The script's own endpoint answers GetQueueUrl, SendMessage
# and SendMessageBatch. A program sends four tasks, and shuts the broker down a little later.
# Expected: the endpoint gets all four. The README says: "The broker ensures all messages are sent when shutting down,
# even partial batches".
# Seen: with enable_batching, kiq() only puts a task into a queue in memory. A background task moves it to a list, the
# open batch, and sends the list when it is full, or after batch_timeout (1 s). shutdown() cancels the background task,
# which then sends the rest of the queue. It does not send the list, because this is a local variable of the function
# that was cancelled. The queue is nearly always empty, so all tasks of the last second are lost, without an error or a
# log line. Each restart of a web server thus loses up to nine tasks that it has confirmed to its clients. A producer of
# a message queue has to keep an open batch where its shutdown finds it.
# Output seen:
#   without batching, shutdown after 0.5 s: sent a b c d
#   with batching, shutdown after 2 s: sent a b c d
#   with batching, shutdown after 0.5 s: sent nothing
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'taskiq-aio-sqs==2.1.1' 'taskiq==0.13.0' 'aiobotocore==3.10.0'
cat >main.py <<'PYTHON'
import asyncio, json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from taskiq_aio_sqs import SQSBroker

print(*(f"{name} {version(name)}" for name in ("taskiq-aio-sqs", "taskiq", "aiobotocore")))
NAMES = ["a", "b", "c", "d"]

class Endpoint(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        operation, answer = self.headers["X-Amz-Target"].removeprefix("AmazonSQS."), {}
        if operation == "GetQueueUrl":
            answer = {"QueueUrl": f"http://{self.headers['Host']}/000000000000/q"}
        else:
            entries = request.get("Entries", [request])
            self.server.sent += [json.loads(entry["MessageBody"])["args"][0] for entry in entries]
            done = [{"Id": entry.get("Id"), "MessageId": "m", "MD5OfMessageBody": "m"} for entry in entries]
            answer = {"Successful": done, "Failed": []} if "Entries" in request else done[0]
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

async def send(batching, pause):
    """Send four tasks, wait, and shut down; return the tasks that the endpoint got."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.sent = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    broker = SQSBroker("q", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret",
                       enable_batching=batching)

    @broker.task
    async def work(name):
        pass

    await broker.startup()
    for name in NAMES:
        await work.kiq(name)
    await asyncio.sleep(pause)
    await broker.shutdown()
    server.shutdown()
    return server.sent

results = []
for batching, pause in ((False, 0.5), (True, 2), (True, 0.5)):
    results.append(asyncio.run(send(batching, pause)))
    print(f"{'with' if batching else 'without'} batching, shutdown after {pause} s: sent", *results[-1] or ["nothing"])
sys.exit(results != [NAMES, NAMES, []])
PYTHON
venv/bin/python main.py
