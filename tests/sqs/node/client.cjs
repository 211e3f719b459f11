// Uses an endpoint as programs on Node do: the AWS SDK, and sqs-consumer with single messages and with batches.
//
// Variables: ENDPOINT, a URL. Prints one line of JSON with the number of messages per queue. Fails on the first
// difference; the SDK itself compares the MD5 sums of sent and received bodies.

"use strict";

const assert = require("node:assert/strict");
const sdk = require("@aws-sdk/client-sqs");
const { Consumer } = require("sqs-consumer");

const MESSAGES = 40;
const VISIBILITY_S = 20;
const HEARTBEAT_S = 2;
// Longer than the visibility timeout: without the heartbeat the message would be delivered again.
const SLOW_MS = 24_000;
const LIMIT_MS = 180_000;

const client = new sdk.SQSClient({
  endpoint: process.env.ENDPOINT,
  region: "us-east-1",
  credentials: { accessKeyId: "any", secretAccessKey: "any" },
  maxAttempts: 1,
});
const call = (name, input) => client.send(new sdk[`${name}Command`](input));

const ATTRIBUTES = {
  text: { DataType: "String", StringValue: "grüße 🚀" },
  label: { DataType: "String.color", StringValue: "blue" },
  number: { DataType: "Number", StringValue: "-12.5e3" },
  integer: { DataType: "Number.int", StringValue: "42" },
  bytes: { DataType: "Binary", BinaryValue: Uint8Array.from([0, 1, 254, 255]) },
  "image.small": { DataType: "Binary.png", BinaryValue: Uint8Array.from([137, 80]) },
};

async function createQueue(name, timeout) {
  const input = { QueueName: name, Attributes: { VisibilityTimeout: String(timeout) }, tags: { client: "node" } };
  const { QueueUrl } = await call("CreateQueue", input);
  assert.equal((await call("GetQueueUrl", { QueueName: name })).QueueUrl, QueueUrl);
  assert.deepEqual((await call("ListQueueTags", { QueueUrl })).Tags, { client: "node" });
  const answer = await call("GetQueueAttributes", { QueueUrl, AttributeNames: ["VisibilityTimeout", "QueueArn"] });
  assert.equal(answer.Attributes.VisibilityTimeout, String(timeout));
  assert.match(answer.Attributes.QueueArn, new RegExp(`:${name}$`));
  return QueueUrl;
}

// Half of the messages one by one, the others in batches, each of which has an entry that fails.
async function send(QueueUrl) {
  const bodies = Array.from({ length: MESSAGES }, (_, number) => `${number} \u00e9\t"\\ 🚀`);
  const half = bodies.slice(0, MESSAGES / 2);
  const sending = half.map((MessageBody) => call("SendMessage", { QueueUrl, MessageBody, MessageAttributes: ATTRIBUTES }));
  const ids = (await Promise.all(sending)).map(({ MessageId }) => MessageId);
  for (let first = MESSAGES / 2; first < MESSAGES; first += 5) {
    const Entries = bodies
      .slice(first, first + 5)
      .map((MessageBody, index) => ({ Id: `m-${index}`, MessageBody, MessageAttributes: ATTRIBUTES }));
    Entries.push({ Id: "bad", MessageBody: "\u0001" });
    const answer = await call("SendMessageBatch", { QueueUrl, Entries });
    assert.deepEqual(answer.Failed.map(({ Id, Code, SenderFault }) => [Id, Code, SenderFault]), [
      ["bad", "InvalidMessageContents", true],
    ]);
    ids.push(...answer.Successful.map(({ MessageId }) => MessageId));
  }
  assert.equal(new Set(ids).size, MESSAGES);
  return new Set(bodies);
}

// Consume until each body was handled; return how often each was delivered.
function consume(queueUrl, bodies, options, handler) {
  const deliveries = new Map();
  const handled = new Set();
  const errors = [];
  const note = (message) => {
    assert.ok(bodies.has(message.Body), message.Body);
    assert.deepEqual(Object.keys(message.MessageAttributes).sort(), Object.keys(ATTRIBUTES).sort());
    for (const [name, { DataType, StringValue, BinaryValue }] of Object.entries(ATTRIBUTES)) {
      const received = message.MessageAttributes[name];
      assert.deepEqual([received.DataType, received.StringValue], [DataType, StringValue]);
      assert.deepEqual(received.BinaryValue && [...received.BinaryValue], BinaryValue && [...BinaryValue]);
    }
    deliveries.set(message.Body, (deliveries.get(message.Body) ?? 0) + 1);
    assert.equal(message.Attributes.ApproximateReceiveCount, String(deliveries.get(message.Body)));
  };
  return new Promise((resolve, reject) => {
    const consumer = Consumer.create({
      queueUrl, sqs: client, waitTimeSeconds: 5, batchSize: 10, terminateVisibilityTimeout: true,
      messageAttributeNames: ["All"], messageSystemAttributeNames: ["All"],
      ...handler(note), ...options,
    });
    const finish = (settle, value) => {
      clearTimeout(timer);
      consumer.once("stopped", () => settle(value));
      consumer.stop();
    };
    const timer = setTimeout(() => finish(reject, new Error(`${handled.size} of ${bodies.size} handled`)), LIMIT_MS);
    consumer.on("message_processed", ({ Body }) => {
      handled.add(Body);
      if (handled.size === bodies.size) finish(resolve, { deliveries, errors });
    });
    for (const event of ["error", "processing_error"]) consumer.on(event, (error) => {
      errors.push(error.message);
      if (!error.message.endsWith(": handler")) finish(reject, error);
    });
    consumer.start();
  });
}

// The first message of the queue takes long, and the second one fails once.
const single = (note) => ({
  handleMessage: async (message) => {
    note(message);
    if (message.Body.startsWith("0 ")) await new Promise((resolve) => setTimeout(resolve, SLOW_MS));
    if (message.Body.startsWith("1 ") && message.Attributes.ApproximateReceiveCount === "1") throw new Error("handler");
    return message;
  },
});

// The first batch fails, and its messages come once more.
function batch(note) {
  let first = true;
  return {
    handleMessageBatch: async (messages) => {
      messages.forEach(note);
      if (first) {
        first = false;
        throw new Error("handler");
      }
      return messages;
    },
  };
}

async function refused(name, input, kind, code) {
  await assert.rejects(call(name, input), (error) => {
    assert.ok(error instanceof kind, error);
    assert.equal(error.Code, code);
    assert.ok(error.$metadata.requestId);
    return true;
  });
}

async function refusals(QueueUrl) {
  const missing = QueueUrl.replace(/[^/]+$/, "missing");
  const nonexistent = "AWS.SimpleQueueService.NonExistentQueue";
  await refused("GetQueueUrl", { QueueName: "missing" }, sdk.QueueDoesNotExist, nonexistent);
  await refused("SendMessage", { QueueUrl: missing, MessageBody: "x" }, sdk.QueueDoesNotExist, nonexistent);
  const handle = { QueueUrl, ReceiptHandle: "nonsense" };
  await refused("DeleteMessage", handle, sdk.ReceiptHandleIsInvalid, "ReceiptHandleIsInvalid");
  const twice = ["a", "a"].map((Id) => ({ Id, MessageBody: "x" }));
  await refused(
    "SendMessageBatch", { QueueUrl, Entries: twice },
    sdk.BatchEntryIdsNotDistinct, "AWS.SimpleQueueService.BatchEntryIdsNotDistinct",
  );
  await refused("SendMessage", { QueueUrl, MessageBody: "\u0001" }, sdk.InvalidMessageContents, "InvalidMessageContents");
}

async function main() {
  const singles = await createQueue("node-single", VISIBILITY_S);
  const batches = await createQueue("node-batch", 600);
  const bodies = await Promise.all([send(singles), send(batches)]);
  const options = { visibilityTimeout: VISIBILITY_S, heartbeatInterval: HEARTBEAT_S };
  const [ofSingles, ofBatches] = await Promise.all([
    consume(singles, bodies[0], options, single),
    consume(batches, bodies[1], {}, batch),
    refusals(singles),
  ]);
  const repeated = ({ deliveries }) => [...deliveries].filter(([, count]) => count > 1).map(([body]) => body.split(" ")[0]);
  assert.deepEqual(repeated(ofSingles), ["1"]);
  assert.deepEqual(ofSingles.errors, ["Unexpected message handler failure: handler"]);
  assert.equal(ofBatches.errors.length, 1);
  assert.ok(repeated(ofBatches).length > 0);
  process.stdout.write(`${JSON.stringify({ "node-single": MESSAGES, "node-batch": MESSAGES })}\n`);
}

main().then(() => client.destroy());
