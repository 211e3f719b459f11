// Uses an endpoint as programs with gocloud.dev/pubsub do: topics and subscriptions, acks and nacks.
//
// Variables: ENDPOINT, a URL. Prints one line of JSON with the number of messages per queue. Panics at the first
// difference.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"gocloud.dev/pubsub"
	"gocloud.dev/pubsub/awssnssqs"
)

const (
	queue    = "gocloud"
	messages = 60
	limit    = 120 * time.Second
)

var metadata = map[string]string{"text": "grüße 🚀", "a b/c": "1", "..": "two\nlines"}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	client := sqs.New(sqs.Options{
		BaseEndpoint: aws.String(os.Getenv("ENDPOINT")),
		Region:       "us-east-1",
		Credentials:  credentials.NewStaticCredentialsProvider("any", "any", ""),
	})
	created, err := client.CreateQueue(ctx, &sqs.CreateQueueInput{
		QueueName: aws.String(queue), Attributes: map[string]string{"VisibilityTimeout": "600"},
	})
	check(err)
	topic := awssnssqs.OpenSQSTopic(ctx, client, *created.QueueUrl, nil)
	subscription := awssnssqs.OpenSubscription(ctx, client, *created.QueueUrl, &awssnssqs.SubscriptionOptions{
		WaitTime: 5 * time.Second,
	})
	sendAll(ctx, topic)
	receiveAll(ctx, subscription)
	checkVisibility(ctx, client, *created.QueueUrl, topic, subscription)
	// Deletes are sent in the background.
	check(subscription.Shutdown(ctx))
	check(topic.Shutdown(ctx))
	check(json.NewEncoder(os.Stdout).Encode(map[string]int{queue: messages + 1}))
}

// body returns text, or bytes that are no text.
func body(number int) []byte {
	if number%2 == 0 {
		return fmt.Appendf(nil, "message %d é\t\"\\ 🚀", number)
	}
	return []byte{0, 255, 254, byte(number)}
}

// sendAll sends at the same time, so the library makes batches.
func sendAll(ctx context.Context, topic *pubsub.Topic) {
	var sending sync.WaitGroup
	for number := range messages {
		sending.Go(func() {
			check(topic.Send(ctx, &pubsub.Message{Body: body(number), Metadata: metadata}))
		})
	}
	sending.Wait()
}

// receiveAll returns each message to the queue once, and acknowledges its second delivery.
func receiveAll(ctx context.Context, subscription *pubsub.Subscription) {
	deliveries := map[string]int{}
	ids := map[string]string{}
	for done := 0; done < messages; {
		message, err := subscription.Receive(ctx)
		check(err)
		var native types.Message
		if !message.As(&native) {
			panic("no message of the SDK")
		}
		key := string(message.Body)
		deliveries[key]++
		if deliveries[key] == 1 {
			ids[key] = *native.MessageId
			message.Nack()
			continue
		}
		if deliveries[key] > 2 || ids[key] != *native.MessageId || message.LoggableID != *native.MessageId {
			panic(fmt.Sprintf("%q: %d deliveries, %s after %s", key, deliveries[key], *native.MessageId, ids[key]))
		}
		if !maps.Equal(message.Metadata, metadata) {
			panic(fmt.Sprintf("expected %v, got %v", metadata, message.Metadata))
		}
		message.Ack()
		done++
	}
	for number := range messages {
		if deliveries[string(body(number))] != 2 {
			panic(fmt.Sprintf("%q was not delivered", body(number)))
		}
	}
}

// checkVisibility lets the lease of a message end: it is delivered again.
func checkVisibility(
	ctx context.Context, client *sqs.Client, url string, topic *pubsub.Topic, subscription *pubsub.Subscription,
) {
	_, err := client.SetQueueAttributes(ctx, &sqs.SetQueueAttributesInput{
		QueueUrl: &url, Attributes: map[string]string{"VisibilityTimeout": "1"},
	})
	check(err)
	check(topic.Send(ctx, &pubsub.Message{Body: []byte("again")}))
	for delivery := 1; delivery <= 2; delivery++ {
		message, err := subscription.Receive(ctx)
		check(err)
		if !bytes.Equal(message.Body, []byte("again")) {
			panic(fmt.Sprintf("%q was delivered after its ack", message.Body))
		}
		if delivery == 2 {
			message.Ack()
		}
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
