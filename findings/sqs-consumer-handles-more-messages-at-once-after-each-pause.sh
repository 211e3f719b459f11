#!/usr/bin/env bash
# Shows that sqs-consumer handles one message more at once after each stop() and start(), although it has one at a time.
#
# sqs-consumer 15.0.3, @aws-sdk/client-sqs 3.1175.0, Node 24.6.0. The script's own endpoint answers ReceiveMessage and
# DeleteMessage. It holds a poll while the queue is empty, as SQS does for waitTimeSeconds (20 s by default). A program
# pauses its consumer, as a circuit breaker or a flag does: it calls stop(), waits for the event "stopped", and calls
# start(). The consumer has its default batchSize of 1, so it handles one message, deletes it, and polls again.
# Expected: one message at a time, also after a pause. Issue 234 is about a second poll after stop() and start(), and is
# closed: since 2022, stop() and a poll's end clear the timer of the next poll.
# Seen: stop() leaves a poll that is on its way, which is documented, and "stopped" comes at once. If start() follows
# within the 20 s, the old poll goes on beside the new one: when it ends, the consumer runs, so it polls again. The
# consumer has one timer for all its polls, so two loops become one if they end at the same moment, but loops that wait
# for handlers do not. Each pause adds a loop, without an event or a log line, and status describes one consumer that
# runs. With abort: true, the aborted polls end together, so only one loop is added. A service with a limit of its own
# gets more and more messages at once, the most after an outage in which the breaker opened often. A consumer with
# pollingCompleteWaitTimeMs has "stopped" wait for the poll, and keeps one loop. A message queue's consumer should end a
# loop by a token of that loop, not by a flag that the next start() resets.
# Output seen:
#   no pause: 1 open polls, at once 1 1 1 1
#   1 pause: 2 open polls, at once 2 2 2 2
#   5 pauses: 6 open polls, at once 6 6 6 6
#   5 pauses with abort: 2 open polls, at once 2 2 2 2
#   5 pauses with abort, wait for polling: 1 open polls, at once 1 1 1 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund node@24.6.0 sqs-consumer@15.0.3 @aws-sdk/client-sqs@3.1175.0 >/dev/null
cat >main.mjs <<'JAVASCRIPT'
import { createHash } from "node:crypto"
import { once } from "node:events"
import { readFileSync } from "node:fs"
import { createServer } from "node:http"
import { SQSClient } from "@aws-sdk/client-sqs"
import { Consumer } from "sqs-consumer"

for (const name of ["sqs-consumer", "@aws-sdk/client-sqs"])
  console.log(name, JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version)
console.log("Node", process.version)
const ROUNDS = 4, SPARE = 20, LIMIT_MS = 60_000, BODY = "body", CHECKSUM = createHash("md5").update(BODY).digest("hex")

/** Wait until a condition holds. */
async function until(condition, name) {
  const end = Date.now() + LIMIT_MS
  while (!condition()) {
    if (Date.now() > end) throw new Error(`timed out: ${name}`)
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
}

/** Return a server with a queue that holds polls while the queue is empty. */
async function endpoint() {
  const polls = new Set(), deleted = new Set()
  let waiting = 0, number = 0, polled = 0
  function deliver() {
    for (const answer of polls) {
      if (waiting === 0) return
      waiting -= 1
      polls.delete(answer)
      const id = String(++number)
      answer({ Messages: [{ MessageId: id, ReceiptHandle: id, Body: BODY, MD5OfBody: CHECKSUM }] })
    }
  }
  const server = createServer(async (request, response) => {
    let text = ""
    for await (const chunk of request) text += chunk
    const answer = (body) => {
      response.setHeader("Content-Type", "application/x-amz-json-1.0")
      response.end(JSON.stringify(body))
    }
    if (request.headers["x-amz-target"] === "AmazonSQS.ReceiveMessage") {
      polled += 1
      polls.add(answer)
      response.on("close", () => polls.delete(answer))
      deliver()
    } else {
      deleted.add(JSON.parse(text).ReceiptHandle)
      answer({})
    }
  })
  server.listen(0, "127.0.0.1")
  await once(server, "listening")
  const send = (count) => { waiting += count; deliver() }
  return { server, polls, polled: () => polled, deleted, send, url: `http://127.0.0.1:${server.address().port}` }
}

/** Pause a consumer so many times; return its open polls, and how many messages it handles at once in each round. */
async function run(pauses, stopOptions, consumerOptions, expected) {
  const { server, polls, polled, deleted, send, url } = await endpoint()
  const credentials = { accessKeyId: "key", secretAccessKey: "secret" }
  const sqs = new SQSClient({ endpoint: url, region: "eu-west-1", credentials })
  const handled = new Map()
  const consumer = Consumer.create({
    queueUrl: `${url}/000000000000/q`, sqs, ...consumerOptions,
    handleMessage: (message) => new Promise((resolve) => handled.set(message.MessageId, () => resolve(message))),
  })
  consumer.on("error", (error) => { if (error.code !== "AbortError") throw error })
  consumer.start()
  await until(() => polls.size === 1, "first poll")
  for (let pause = 1; pause <= pauses; pause++) {
    const before = [...polls], count = polled(), stopped = new Promise((resolve) => consumer.once("stopped", resolve))
    consumer.stop(stopOptions)
    await stopped
    consumer.start()
    const open = Math.min(1 + pause, expected)
    const aborted = () => !stopOptions.abort || !before.some((poll) => polls.has(poll))
    await until(() => polls.size >= open && polled() > count && aborted(), `${open} polls after ${pause} pauses`)
  }
  const open = polls.size
  send(ROUNDS * expected + SPARE)
  const atOnce = []
  for (let round = 1; round <= ROUNDS; round++) {
    await until(() => handled.size >= expected, `${expected} messages at once`)
    atOnce.push(handled.size)
    for (const [id, finish] of [...handled]) {
      handled.delete(id)
      finish()
      await until(() => deleted.has(id) && handled.size >= expected, "the next message")
    }
  }
  consumer.stop({ abort: true })
  server.closeAllConnections()
  server.close()
  return { open, atOnce }
}

const wait = { pollingCompleteWaitTimeMs: LIMIT_MS }
const cases = [
  ["no pause", 0, {}, {}, 1],
  ["1 pause", 1, {}, {}, 2],
  ["5 pauses", 5, {}, {}, 6],
  ["5 pauses with abort", 5, { abort: true }, {}, 2],
  ["5 pauses with abort, wait for polling", 5, { abort: true }, wait, 1],
]
let same = true
for (const [name, pauses, stopOptions, consumerOptions, expected] of cases) {
  const { open, atOnce } = await run(pauses, stopOptions, consumerOptions, expected)
  console.log(`${name}: ${open} open polls, at once ${atOnce.join(" ")}`)
  same &&= [open, ...atOnce].every((number) => number === expected)
}
process.exit(same ? 0 : 1)
JAVASCRIPT
node_modules/.bin/node main.mjs
