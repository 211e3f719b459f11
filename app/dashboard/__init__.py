"""The dashboard: pages of the worker's web server, for whoever looks after queues.

Each page is made on the server and can be read without JavaScript; what it shows is to be had as JSON below ``/api``.
What changes something is a POST to ``/actions/…``, asked once more before it is done, and written to the audit log.
"""
