"""The jobs: each module is one, called by its own name, with ``arguments(parser)`` and ``run(arguments) -> int``."""
