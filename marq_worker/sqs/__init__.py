"""The SQS endpoint: the AWS JSON protocol of SQS, served on Marq's queues."""
