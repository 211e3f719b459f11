"""Lifespans: the resources of a worker's handlers are open from before the first message until after the last one."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.backend import Backend


async def test_resources_are_open_around_the_handlers_of_a_process(backend: Backend, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    handler = "tests.conformance.handlers_with_resources:handle"
    queue = await backend.new_queue("resources", handler=handler, group=backend.new_name("group"))

    def lines() -> list[str]:
        return journal.read_text().splitlines() if journal.exists() else []

    async with backend.handlers(queue):
        await backend.producer.send(queue, str(tmp_path).encode())
        await backend.until(lambda: bool(lines()))
        (tmp_path / "go").touch()
        await backend.statistics(queue, acked=1)

    await backend.until(lambda: len(lines()) == 3)
    assert lines() == ["begun pool cache", "handled of the lifespan pool cache", "pool closed"]


async def test_resources_are_closed_after_the_handlers_that_a_stop_interrupts(backend: Backend, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    handler = "tests.conformance.handlers_with_resources:handle"
    queue = await backend.new_queue("resources", handler=handler, group=backend.new_name("group"))

    async with backend.handlers(queue):
        await backend.producer.send(queue, str(tmp_path).encode())
        await backend.until(journal.exists)

    await backend.until(lambda: len(journal.read_text().splitlines()) == 3)
    assert journal.read_text().splitlines()[1:] == ["handled of the lifespan pool cache", "pool closed"]
