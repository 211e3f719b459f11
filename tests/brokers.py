"""Settings of the brokers that tests start."""

#: The controller must not fence the only broker when the machine stalls for seconds.
UNFENCED = {"broker.session.timeout.ms": "30000"}
