"""The owners of markers partitions: the shell around :mod:`marq.owner`."""
