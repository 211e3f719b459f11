"""Real Apache Kafka as a child process: one node, KRaft, nothing to install by hand.

`marq` itself never imports this package: it serves `make`, the demo, the benchmarks and the tests.
"""

from marq_worker.broker.embedded import EmbeddedBroker
from marq_worker.broker.errors import BrokerError
from marq_worker.broker.security import Certificates, Security

__all__ = ["BrokerError", "Certificates", "EmbeddedBroker", "Security"]
