"""The dashboard: pages of the worker's web server for operators.

The server renders each page, so that it works without JavaScript; its data is also available as JSON below ``/api``.
Changes are POSTs to ``/actions/…``, confirmed by a second request and written to the audit log.
"""
