"""Each page and each action from the browser to the log and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from lab.demo.run import DemoPlan
from marq_worker.broker import EmbeddedBroker
from tests.browser.serving import Background
from tests.browser.tour.stage import Stage, staged
from tests.browser.tour.steps import STEPS, Step

pytestmark = pytest.mark.verify

SMALL = DemoPlan(messages=200, queues=2, consumers=1, lease_seconds=2.0)


@pytest.fixture(scope="module")
def stage(background: Background, broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(background, broker.bootstrap_servers, tmp_path_factory.mktemp("tour"), SMALL) as made:
        yield made


@pytest.mark.parametrize("step", STEPS, ids=lambda step: " ".join(step.name.split()))
def test_the_tour(stage: Stage, page: Page, step: Step) -> None:
    step.check(stage, page)
