"""Starts systems, applies load and faults, records, judges and reports.

- :mod:`lab.program` starts and observes programs; :mod:`lab.consumer` and :mod:`lab.worker` are such programs, which
  write a history of what they do (:mod:`lab.recorder`) and can die at each step.
- :mod:`lab.stage` has the programs of one namespace, their load and faults, and reads the topics (:mod:`lab.topics`).
- :mod:`lab.proof` judges the history, and :mod:`lab.audit` lets the data pipeline judge the topics.
- :mod:`lab.faults`, :mod:`lab.demo` and :mod:`lab.bench` use them: scenarios, the scenario that people see, and rows.
"""
