"""The application that ``faust -A app`` finds."""

from app.application import create_app

app = create_app()
