// Command client uses an endpoint as programs in Go do, with aws-sdk-go-v2.
//
// Variables: ENDPOINT, a URL. It prints one line of JSON with the number of messages per queue, and panics on the first
// difference. The SDK itself compares the MD5 sums of sent and received bodies.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/aws/smithy-go"
)

const (
	queue    = "go-messages"
	messages = 60
	pollers  = 4
	limit    = 180 * time.Second
)

var attributes = map[string]types.MessageAttributeValue{
	"text":        {DataType: aws.String("String"), StringValue: aws.String("grüße 🚀")},
	"label":       {DataType: aws.String("String.color"), StringValue: aws.String("blue")},
	"number":      {DataType: aws.String("Number"), StringValue: aws.String("-12.5e3")},
	"integer":     {DataType: aws.String("Number.int"), StringValue: aws.String("42")},
	"bytes":       {DataType: aws.String("Binary"), BinaryValue: []byte{0, 1, 254, 255}},
	"image.small": {DataType: aws.String("Binary.png"), BinaryValue: []byte{137, 80}},
}

// credentials is a provider of static ones; the module of that name would bring the SDK's configuration with it.
var credentials = aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
	return aws.Credentials{AccessKeyID: "any", SecretAccessKey: "any"}, nil
})

// client is an SQS client and the URL of the queue.
type client struct {
	*sqs.Client
	queueURL *string
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c := newClient(ctx)
	c.checkErrors(ctx)
	c.checkCanceledPoll(ctx)
	c.checkMessages(ctx)
	c.checkVisibility(ctx)
	_, err := c.PurgeQueue(ctx, &sqs.PurgeQueueInput{QueueUrl: c.queueURL})
	check(err)
	// The messages of checkCanceledPoll and checkVisibility, and those of checkMessages.
	check(json.NewEncoder(os.Stdout).Encode(map[string]int{queue: messages + 2}))
}

func newClient(ctx context.Context) *client {
	c := &client{Client: sqs.New(sqs.Options{
		BaseEndpoint: aws.String(os.Getenv("ENDPOINT")),
		Region:       "us-east-1",
		Credentials:  credentials,
		Retryer:      aws.NopRetryer{},
	})}
	created, err := c.CreateQueue(ctx, &sqs.CreateQueueInput{
		QueueName:  aws.String(queue),
		Attributes: map[string]string{"VisibilityTimeout": "600", "ReceiveMessageWaitTimeSeconds": "1"},
		Tags:       map[string]string{"client": "go"},
	})
	check(err)
	c.queueURL = created.QueueUrl
	listed, err := c.ListQueues(ctx, &sqs.ListQueuesInput{QueueNamePrefix: aws.String(queue)})
	check(err)
	equal(listed.QueueUrls, []string{*c.queueURL})
	found, err := c.GetQueueAttributes(ctx, &sqs.GetQueueAttributesInput{
		QueueUrl:       c.queueURL,
		AttributeNames: []types.QueueAttributeName{types.QueueAttributeNameVisibilityTimeout},
	})
	check(err)
	equal(found.Attributes, map[string]string{"VisibilityTimeout": "600"})
	return c
}

// checkErrors compares types and codes of errors.
func (c *client) checkErrors(ctx context.Context) {
	_, err := c.GetQueueUrl(ctx, &sqs.GetQueueUrlInput{QueueName: aws.String("missing")})
	refused[*types.QueueDoesNotExist](err, "AWS.SimpleQueueService.NonExistentQueue")
	_, err = c.CreateQueue(ctx, &sqs.CreateQueueInput{
		QueueName: aws.String(queue), Attributes: map[string]string{"VisibilityTimeout": "1"},
	})
	refused[*types.QueueNameExists](err, "QueueAlreadyExists")
	_, err = c.SetQueueAttributes(ctx, &sqs.SetQueueAttributesInput{
		QueueUrl: c.queueURL, Attributes: map[string]string{"Unknown": "1"},
	})
	refused[*types.InvalidAttributeName](err, "InvalidAttributeName")
	_, err = c.DeleteMessage(ctx, &sqs.DeleteMessageInput{QueueUrl: c.queueURL, ReceiptHandle: aws.String("nonsense")})
	refused[*types.ReceiptHandleIsInvalid](err, "ReceiptHandleIsInvalid")
	_, err = c.SendMessage(ctx, &sqs.SendMessageInput{QueueUrl: c.queueURL, MessageBody: aws.String("\x01")})
	refused[*types.InvalidMessageContents](err, "InvalidMessageContents")
	_, err = c.SendMessageBatch(ctx, &sqs.SendMessageBatchInput{
		QueueUrl: c.queueURL, Entries: []types.SendMessageBatchRequestEntry{},
	})
	refused[*types.EmptyBatchRequest](err, "AWS.SimpleQueueService.EmptyBatchRequest")
	_, err = c.AddPermission(ctx, &sqs.AddPermissionInput{
		QueueUrl: c.queueURL, Label: aws.String("a"), AWSAccountIds: []string{"1"}, Actions: []string{"*"},
	})
	refused[*types.UnsupportedOperation](err, "AWS.SimpleQueueService.UnsupportedOperation")
	_, err = c.ReceiveMessage(ctx, &sqs.ReceiveMessageInput{QueueUrl: c.queueURL, MaxNumberOfMessages: 11})
	refused[smithy.APIError](err, "InvalidParameterValue")
}

// checkCanceledPoll hangs up during a long poll: the next poll gets the message, as its first delivery.
func (c *client) checkCanceledPoll(ctx context.Context) {
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err := c.ReceiveMessage(short, &sqs.ReceiveMessageInput{QueueUrl: c.queueURL, WaitTimeSeconds: 20})
	if !errors.Is(err, context.DeadlineExceeded) {
		panic(fmt.Sprintf("expected a canceled poll, got %v", err))
	}
	_, err = c.SendMessage(ctx, &sqs.SendMessageInput{QueueUrl: c.queueURL, MessageBody: aws.String("canceled")})
	check(err)
	message := c.receiveOne(ctx)
	equal([]string{*message.Body, message.Attributes["ApproximateReceiveCount"]}, []string{"canceled", "1"})
	_, err = c.DeleteMessage(ctx, &sqs.DeleteMessageInput{QueueUrl: c.queueURL, ReceiptHandle: message.ReceiptHandle})
	check(err)
}

// checkMessages sends single messages and batches while pollers wait, which delete in batches.
func (c *client) checkMessages(ctx context.Context) {
	polling, stop := context.WithCancel(ctx)
	defer stop()
	deliveries := make(chan types.Message)
	var waiting sync.WaitGroup
	for range pollers {
		waiting.Add(1)
		go func() {
			defer waiting.Done()
			c.poll(polling, deliveries)
		}()
	}
	sent := map[string]string{}
	for number := range messages / 2 {
		body := fmt.Sprintf("single %d é\t\"\\ 🚀", number)
		answer, err := c.SendMessage(ctx, &sqs.SendMessageInput{
			QueueUrl: c.queueURL, MessageBody: &body, MessageAttributes: attributes,
		})
		check(err)
		sent[*answer.MessageId] = body
	}
	for number := 0; number < messages/2; number += 10 {
		c.sendBatch(ctx, number, sent)
	}
	equal(len(sent), messages)
	for len(sent) > 0 {
		var message types.Message
		select {
		case message = <-deliveries:
		case <-ctx.Done():
			panic(fmt.Sprintf("%d messages were not delivered", len(sent)))
		}
		equal(*message.Body, sent[*message.MessageId])
		equal(message.MessageAttributes, attributes)
		delete(sent, *message.MessageId)
	}
	stop()
	waiting.Wait()
}

func (c *client) sendBatch(ctx context.Context, first int, sent map[string]string) {
	bodies := map[string]string{}
	entries := []types.SendMessageBatchRequestEntry{}
	for number := first; number < first+10; number++ {
		id := fmt.Sprint("m-", number)
		bodies[id] = fmt.Sprintf("batch %d", number)
		entries = append(entries, types.SendMessageBatchRequestEntry{
			Id: &id, MessageBody: aws.String(bodies[id]), MessageAttributes: attributes,
		})
	}
	answer, err := c.SendMessageBatch(ctx, &sqs.SendMessageBatchInput{QueueUrl: c.queueURL, Entries: entries})
	check(err)
	equal(len(answer.Failed), 0)
	for _, result := range answer.Successful {
		sent[*result.MessageId] = bodies[*result.Id]
	}
}

// poll receives until its context ends, and passes messages on after it has deleted them.
func (c *client) poll(ctx context.Context, deliveries chan<- types.Message) {
	for {
		answer, err := c.ReceiveMessage(ctx, &sqs.ReceiveMessageInput{
			QueueUrl: c.queueURL, MaxNumberOfMessages: 10, WaitTimeSeconds: 20, MessageAttributeNames: []string{"All"},
		})
		if ctx.Err() != nil {
			return
		}
		check(err)
		if len(answer.Messages) == 0 {
			continue
		}
		entries := []types.DeleteMessageBatchRequestEntry{}
		for _, message := range answer.Messages {
			entries = append(entries, types.DeleteMessageBatchRequestEntry{
				Id: message.MessageId, ReceiptHandle: message.ReceiptHandle,
			})
		}
		deleted, err := c.DeleteMessageBatch(ctx, &sqs.DeleteMessageBatchInput{QueueUrl: c.queueURL, Entries: entries})
		check(err)
		equal(len(deleted.Successful), len(entries))
		for _, message := range answer.Messages {
			deliveries <- message
		}
	}
}

// checkVisibility returns a message to the queue, and deletes its second delivery.
func (c *client) checkVisibility(ctx context.Context) {
	_, err := c.SendMessage(ctx, &sqs.SendMessageInput{QueueUrl: c.queueURL, MessageBody: aws.String("again")})
	check(err)
	message := c.receiveOne(ctx)
	_, err = c.ChangeMessageVisibility(ctx, &sqs.ChangeMessageVisibilityInput{
		QueueUrl: c.queueURL, ReceiptHandle: message.ReceiptHandle, VisibilityTimeout: 0,
	})
	check(err)
	message = c.receiveOne(ctx)
	equal([]string{*message.Body, message.Attributes["ApproximateReceiveCount"]}, []string{"again", "2"})
	_, err = c.DeleteMessage(ctx, &sqs.DeleteMessageInput{QueueUrl: c.queueURL, ReceiptHandle: message.ReceiptHandle})
	check(err)
}

func (c *client) receiveOne(ctx context.Context) types.Message {
	for {
		answer, err := c.ReceiveMessage(ctx, &sqs.ReceiveMessageInput{
			QueueUrl:                    c.queueURL,
			MessageSystemAttributeNames: []types.MessageSystemAttributeName{types.MessageSystemAttributeNameAll},
		})
		check(err)
		if len(answer.Messages) == 1 {
			return answer.Messages[0]
		}
	}
}

// refused panics unless an error is of a type, and has a code.
func refused[E smithy.APIError](err error, code string) {
	var expected E
	if !errors.As(err, &expected) {
		panic(fmt.Sprintf("expected %T, got %v", expected, err))
	}
	equal(expected.ErrorCode(), code)
}

func equal[T any](actual, expected T) {
	if !reflect.DeepEqual(actual, expected) {
		panic(fmt.Sprintf("expected %v, got %v", expected, actual))
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
