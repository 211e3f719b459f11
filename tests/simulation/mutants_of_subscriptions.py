"""Mutants of the code that distinguishes several queues' messages with one topic, partition and offset."""

from __future__ import annotations

from tests.simulation.mutant import SUBSCRIPTIONS, Mutant, mutant

_CORE, _STORAGE = "marq.core.", "marq.core.storage."
_LEASES = _CORE + "lease_book"
_ROWS, _TABLE_IMAGE = _STORAGE + "rows", _STORAGE + "table_image"
_HELD = "marq.leases.held"
_DELAYING, _WRITING = "tests.simulation.delaying", "tests.simulation.writing"

#: Acknowledges messages of an own topic without their queue, as only those of the messages topic may be.
_NO_QUEUE = (
    "        alone = batches[0].queue if len({batch.queue for batch in batches}) == 1 else queue\n",
    '        alone = ""\n',
)

SUBSCRIPTION_MUTANTS: tuple[Mutant, ...] = (
    # --- the lease table ----------------------------------------------------------------------------------------------
    mutant(
        SUBSCRIPTIONS,
        "the row key omits the queue",
        _ROWS,
        "table-differs book-differs raised no-row rows-left fidelity",
        ('return b"r" + _queue_bytes(queue, source)', 'return b"r" + _queue_bytes("", source)'),
        ("    prefix = kind + _queue_bytes(queue, source)\n", '    prefix = kind + _queue_bytes("", source)\n'),
    ),
    mutant(
        SUBSCRIPTIONS,
        "restored messages of one source are those of one queue",
        _TABLE_IMAGE,
        "table-differs book-differs raised",
        (
            "            return self.leases.setdefault(rows.parse_queue(prefix[1:]), {})\n",
            (
                "            name, source = rows.parse_queue(prefix[1:])\n"
                "            names = [each for each, other in self.leases if other == source]\n"
                "            return self.leases.setdefault((*names, name)[0:1] + (source,), {})\n"
            ),
        ),
    ),
    mutant(
        SUBSCRIPTIONS,
        "queues share their acquired ranges",
        _LEASES,
        "book-differs table-differs lost not-drained",
        (
            "opened, acquired = self._of(batch.queue, source), self._acquired_of(batch.queue, source)",
            'opened, acquired = self._of(batch.queue, source), self._acquired_of("", source)',
        ),
    ),
    # --- markers ------------------------------------------------------------------------------------------------------
    Mutant(
        SUBSCRIPTIONS,
        "an ACK without a queue ends the message of another queue's consumer",
        {
            _LEASES: (("offset not in shared or opened.leases[offset].holder == batch.holder", "True"),),
            # Marq's own consumers name the queue there.
            _HELD: (_NO_QUEUE,),
        },
        frozenset({"book-differs", "from-nowhere"}),
    ),
    mutant(
        SUBSCRIPTIONS,
        "consumers acknowledge messages of an own topic without their queue",
        _HELD,
        "lost not-drained from-nowhere",
        _NO_QUEUE,
    ),
    mutant(
        SUBSCRIPTIONS,
        "a fact finishes the other queue's message",
        _LEASES,
        "book-differs lost not-drained",
        (
            "        closed = self._close(opened, batch.offsets, _FACT)\n",
            (
                "        every = self._all_of(ANY_QUEUE, batch.source)\n"
                "        closed = sum([self._close(each, batch.offsets, _FACT) for each in every])\n"
            ),
        ),
    ),
    # --- answers ------------------------------------------------------------------------------------------------------
    mutant(
        SUBSCRIPTIONS,
        "the answer to a RESUME has the other queue's messages",
        _LEASES,
        "order exclusion attempts unexplained lost not-drained stuck concurrent",
        ("    leases = book.open_in(queue, source)\n", '    leases = book.open_in("", source)\n'),
    ),
    mutant(
        SUBSCRIPTIONS,
        "a moved message that left is taken for the other queue's, which stays",
        _LEASES,
        "answered",
        ("offset not in book.open_in(lease.queue, source)", 'offset not in book.open_in("", source)'),
        slow_commit=0.8,
        late_read=0.5,
        consumer_pause=0.03,
        consumer_crash=0.02,
    ),
    mutant(
        SUBSCRIPTIONS,
        "a sender takes another queue's fact for its answer",
        _DELAYING,
        "answered cancelled",
        (
            "        if batch.queue != question.queue and (question.queue != ANY_QUEUE or not cancelled):\n",
            "        if question.queue == ANY_QUEUE and not cancelled:\n",
        ),
        slow_commit=0.5,
        late_read=0.3,
        forgotten=0.3,
    ),
    # --- redeliveries -------------------------------------------------------------------------------------------------
    mutant(
        SUBSCRIPTIONS,
        "a redelivery goes to the topic of its queue",
        _WRITING,
        "misplaced transaction fidelity",
        (
            "queue, topic = fire.lease.queue, world.names.messages",
            "queue, topic = fire.lease.queue, settings.topic or world.names.messages",
        ),
        (
            "target = world.messages[world.ordering.source(world, queue, topic, ordering_key, copy=True)]",
            (
                "target = world.messages[world.ordering.source(world, queue, topic, ordering_key,"
                " copy=topic == world.names.messages)]"
            ),
        ),
    ),
)
