"""An example of a service whose handlers run in workers."""
