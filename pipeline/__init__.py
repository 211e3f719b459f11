"""Data pipeline: Apache Spark jobs that read Marq's topics, audit, measure, plan, and repair in bulk.

``python -m pipeline`` lists the jobs. By default, Spark runs on this machine without configuration, in a Java process
that lives as long as the job. Spark's own settings choose any other master (``--master``, ``--conf``,
spark-defaults.conf, spark-submit).

Transformations are functions from DataFrame to DataFrame, without I/O. Jobs (``pipeline/jobs``) are thin: they parse
arguments, connect, and print. The pipeline shares names and formats with the rest (``marq.core``), but no rules: an
audit that used the rules it checks would prove nothing.
"""
