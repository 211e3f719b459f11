"""The worker, as installed: its folders stand at the top level of the repository, and here as links.

Imports nothing, because the embedded broker runs before any package is installed.
"""
