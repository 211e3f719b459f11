"""The settings of all queues, and the schedules: followed and changed at run time."""
