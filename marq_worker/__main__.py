"""`python -m marq_worker`: the command `marq`."""

from marq_worker.cli import main

if __name__ == "__main__":
    main()
