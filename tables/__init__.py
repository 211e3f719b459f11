"""The application's tables: declared here, written by their agents only."""
