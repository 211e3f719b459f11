"""What the queues did, as data: jobs on Apache Spark that read Marq's topics, prove, count, plan and repair in bulk.

``python -m pipeline`` lists the jobs. One machine is the default, and nothing has to be configured for it: Spark runs
in a Java of its own for as long as the job does. Any other master is chosen by Spark's own settings (``--master``,
``--conf``, spark-defaults.conf, spark-submit); no job names one.

Transformations are functions from DataFrame to DataFrame, without I/O; jobs (``pipeline/jobs``) are thin: they read
arguments, connect, and print. The pipeline shares names and formats with the rest (``marq.core``), and no rules: the
audit would prove nothing if it believed what it judges.
"""
