"""A Django shop that sends a message after a transaction has committed.

``python -m examples.recipes.django_shop setup``, then ``... runserver 8000 --noreload``, and
``curl -d customer=ann -d amount=30 127.0.0.1:8000/orders``. DATABASE_NAME, DATABASE_HOST and DATABASE_USER name the
database.
"""

import logging
import os
import sys
from functools import partial

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import connection, models, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

import marq

if not settings.configured:  # a Django project has a settings module instead
    database = {name: os.environ.get(f"DATABASE_{name}", "") for name in ("NAME", "HOST", "USER")}
    settings.configure(
        ALLOWED_HOSTS=["127.0.0.1"],
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **database}},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        ROOT_URLCONF=__name__,
        SECRET_KEY="for this example only",
    )
    django.setup()

log = logging.getLogger(__name__)
# Not started yet: web servers fork, and each process needs its own connections.
producer = marq.SyncProducer(codec=marq.JSON, connect_timeout=5, request_timeout=5)


class Order(models.Model):
    customer = models.TextField()
    amount = models.PositiveIntegerField()

    class Meta:
        app_label = "shop"


def send_invoice(order_id: int) -> None:
    try:
        producer.start()  # does nothing if this process has started it
        producer.send("invoices", {"order_id": order_id})
    except marq.MarqError:
        # The order exists. If the request failed, its client might order again.
        log.exception("no message was confirmed for order %s", order_id)


def place_order(request: HttpRequest) -> HttpResponse:
    with transaction.atomic():
        order = Order.objects.create(customer=request.POST["customer"], amount=int(request.POST["amount"]))
        transaction.on_commit(partial(send_invoice, order.pk))
        if order.amount > 1_000:
            raise ValueError("too much for one order")  # rolls back, so nothing is sent
    return JsonResponse({"order_id": order.pk}, status=201)


urlpatterns = [path("orders", place_order)]


if __name__ == "__main__":
    if sys.argv[1:] == ["setup"]:  # a Django project has migrations instead
        with connection.schema_editor() as schema:
            schema.create_model(Order)
    else:
        execute_from_command_line(sys.argv)
