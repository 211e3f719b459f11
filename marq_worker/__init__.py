"""The worker, as installed: its folders are at the top level of the repository, and linked here.

Imports nothing, because the embedded broker runs before any package is installed.
"""
