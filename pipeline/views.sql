-- Views over a data directory for DuckDB (1.4 or newer):
--
--     SET VARIABLE data = '.marq/pipeline';
--     .read pipeline/views.sql
--     FROM queue_times;
--
-- The script looks up the current files of each table. Read it again after a job has run.
--
-- Tables, with the columns of pipeline/tables.py and pipeline/lifecycle.py:
--     markers, messages, dead_letters    what ingest read
--     lifecycle, audit, stats            the last result of each job
-- Views that are computed from them:
--     deliveries       one row for each delivery of a message
--     per_minute       events, wait and run times of each queue and minute
--     queue_times      wait and run times of each queue
--     failures         deliveries that failed, with the kind of their error
--     failure_kinds    failures by queue and kind
--     repeats          messages that were delivered more than once, and the reasons
--     duplicates       repeated deliveries that were not requested, by the audit
--     late_deliveries  deliveries that the tracker sent after their due time
--     open_messages    messages that have not ended
--
-- All times are TIMESTAMPTZ.

SET TimeZone = 'UTC';

-- 1. The directory.

SET VARIABLE data = coalesce(
    rtrim(getvariable('data'), '/'), error('SET VARIABLE data = ''DIRECTORY'' before you read views.sql')
);

SELECT CASE
    WHEN regexp_matches(getvariable('data'), '[*?\[\]{}]')
        THEN error(getvariable('data') || ': expected a path without *?[]{}, which are patterns')
    WHEN count(*) = 0 THEN error(getvariable('data') || ' is not a data directory: it has no about.json')
END AS checked
FROM glob(getvariable('data') || '/about.json');

SELECT CASE
    WHEN (content::JSON ->> 'format')::INTEGER <> 3
        THEN error(getvariable('data') || ' has format ' || (content::JSON ->> 'format') || ', and views.sql needs 3')
END AS checked
FROM read_text(getvariable('data') || '/about.json');

-- The last commit of maintain is open until its files are in their places.
SET VARIABLE last_exchange = (
    SELECT coalesce(max(file), getvariable('data') || '/about.json')
    FROM glob(getvariable('data') || '/_commits/maintain/*.json')
);

SELECT CASE
    WHEN (content::JSON ->> 'open')::BOOLEAN
        THEN error('maintain exchanges files, or was interrupted: run `python -m pipeline maintain` again')
END AS checked
FROM read_text(getvariable('last_exchange'));

-- The number of a batch or a commit.
CREATE OR REPLACE MACRO batch_number(file) AS
    coalesce(
        nullif(regexp_extract(file, 'batch=(\d+)', 1), ''), nullif(regexp_extract(file, '(\d+)\.json$', 1), '')
    )::BIGINT;

-- The last commit of each stream, and the directories that it names.
CREATE OR REPLACE TEMP TABLE last_commits AS
SELECT split_part(file, '/', -2) AS stream, max(batch_number(file)) AS batch, max(file) AS file
FROM glob(getvariable('data') || '/_commits/*/*.json')
GROUP BY stream;

CREATE OR REPLACE TEMP TABLE committed_places AS
SELECT
    split_part(filename, '/', -2) AS stream,
    unnest(CAST(content::JSON -> 'places' AS VARCHAR[])) AS place
FROM read_text(getvariable('data') || '/_commits/*/*.json')
WHERE filename IN (SELECT file FROM last_commits) AND split_part(filename, '/', -2) IN ('lifecycle', 'audit', 'stats');

-- The Parquet files that count: batches up to the last commit, and the directories that a commit names.
CREATE OR REPLACE TEMP TABLE table_files AS
WITH all_files AS (
    SELECT split_part(file[len(getvariable('data')) + 2 :], '/', 1) AS stream, file
    FROM glob(getvariable('data') || '/*/**/*.parquet')
)
SELECT all_files.stream, list(all_files.file ORDER BY all_files.file) AS files
FROM all_files JOIN last_commits USING (stream)
WHERE
    CASE
        WHEN all_files.stream IN ('lifecycle', 'audit', 'stats') THEN EXISTS (
            FROM committed_places AS places
            WHERE
                places.stream = all_files.stream
                AND starts_with(all_files.file, getvariable('data') || '/' || places.place || '/')
        )
        ELSE batch_number(all_files.file) <= last_commits.batch
    END
GROUP BY ALL;

-- 2. The tables.

-- The query for a table: its files, or no rows if it has none. Tables of a job that has not run raise an error.
CREATE OR REPLACE MACRO table_query(name, columns) AS (
    SELECT CASE
        WHEN len(any_value(files)) > 0 THEN
            'SELECT COLUMNS(lambda name: name <> ''parts'') FROM read_parquet(['
            || list_aggregate(['''' || replace(file, '''', '''''') || '''' FOR file IN any_value(files)], 'string_agg', ', ')
            || '], union_by_name = true, hive_partitioning = false)'
        WHEN name IN ('markers', 'messages', 'dead_letters') OR name IN (SELECT stream FROM last_commits) THEN
            'SELECT unnest(NULL::STRUCT(' || columns || ')[], max_depth := 2)'
        ELSE
            'SELECT unnest([NULL::STRUCT(' || columns || ')], max_depth := 2) WHERE error('''
            || replace(getvariable('data'), '''', '''''') || ' has no table ' || name
            || ': run `python -m pipeline ' || name || '`, then read views.sql again'') IS NULL'
    END
    FROM table_files
    WHERE stream = name
);

SET VARIABLE markers_query = table_query('markers', '
    log_partition INTEGER, log_offset BIGINT, "index" INTEGER, logged_at TIMESTAMPTZ,
    version INTEGER, kind VARCHAR, queue VARCHAR, holder VARCHAR,
    topic VARCHAR, "partition" BIGINT, "offset" BIGINT,
    attempt INTEGER, lease_ms BIGINT, from_offset BIGINT, due_at TIMESTAMPTZ,
    delay_ms BIGINT, counted BOOLEAN, text VARCHAR, cause VARCHAR, outcome VARCHAR,
    record_at TIMESTAMPTZ, id VARCHAR, size INTEGER, in_order BOOLEAN, line BIGINT
');
CREATE OR REPLACE VIEW markers AS FROM query(getvariable('markers_query'));

SET VARIABLE messages_query = table_query('messages', '
    topic VARCHAR, "partition" INTEGER, "offset" BIGINT, sent_at TIMESTAMPTZ, queue VARCHAR, size INTEGER,
    id VARCHAR, attempt INTEGER, first_sent_at TIMESTAMPTZ, deliver_at TIMESTAMPTZ, error VARCHAR
');
CREATE OR REPLACE VIEW messages AS FROM query(getvariable('messages_query'));

SET VARIABLE dead_letters_query = table_query('dead_letters', '
    topic VARCHAR, "partition" INTEGER, "offset" BIGINT, sent_at TIMESTAMPTZ, queue VARCHAR, size INTEGER,
    id VARCHAR, attempt INTEGER, first_sent_at TIMESTAMPTZ, dead_lettered_at TIMESTAMPTZ, reason VARCHAR,
    error VARCHAR, origin_topic VARCHAR, origin_partition BIGINT, origin_offset BIGINT
');
CREATE OR REPLACE VIEW dead_letters AS FROM query(getvariable('dead_letters_query'));

SET VARIABLE lifecycle_query = table_query('lifecycle', '
    id VARCHAR, queue VARCHAR, sent_at TIMESTAMPTZ, due_at TIMESTAMPTZ, state VARCHAR, "open" BOOLEAN,
    ended_at TIMESTAMPTZ, last_at TIMESTAMPTZ, attempts INTEGER, size INTEGER, redeliveries INTEGER,
    redrives INTEGER, dead_letters INTEGER, acked BOOLEAN, known BOOLEAN, reason VARCHAR,
    deliveries STRUCT(
        topic VARCHAR, "partition" BIGINT, "offset" BIGINT, attempt INTEGER, available_at TIMESTAMPTZ,
        holder VARCHAR, acquired_at TIMESTAMPTZ, lease_ms BIGINT, renewals BIGINT, acquisitions BIGINT,
        outcome VARCHAR, settled_at TIMESTAMPTZ, due_at TIMESTAMPTZ, ended_at TIMESTAMPTZ, error VARCHAR,
        wait_ms BIGINT, run_ms BIGINT, late_ms BIGINT, acked_at TIMESTAMPTZ, handed_out BOOLEAN,
        redriven BOOLEAN, committed BOOLEAN, copied BOOLEAN, expirations BIGINT
    )[],
    differences VARCHAR[], pending VARCHAR[]
');
CREATE OR REPLACE VIEW lifecycle AS FROM query(getvariable('lifecycle_query'));

SET VARIABLE audit_query = table_query('audit', '
    queue VARCHAR, sent_at TIMESTAMPTZ, id VARCHAR, state VARCHAR, unfinished BOOLEAN, why VARCHAR[],
    may_be VARCHAR[], causes VARCHAR[], sent BIGINT, acked BIGINT, dead BIGINT, acked_and_dead BIGINT,
    "open" BIGINT, delayed BIGINT, cancelled BIGINT, deduplicated BIGINT, abandoned BIGINT,
    message_expired BIGINT, expired_unread BIGINT, lost BIGINT, redelivered BIGINT, redriven BIGINT, duplicates BIGINT,
    differences BIGINT, pending BIGINT, unknown BIGINT, untimed BIGINT
');
CREATE OR REPLACE VIEW audit AS FROM query(getvariable('audit_query'));

SET VARIABLE stats_query = table_query('stats', '
    queue VARCHAR, scope VARCHAR, starts_at TIMESTAMPTZ, ends_at TIMESTAMPTZ, seconds DOUBLE,
    sent BIGINT, delivered BIGINT, acked BIGINT, released BIGINT, rejected BIGINT, expired BIGINT, dead BIGINT,
    cancelled BIGINT, abandoned BIGINT, message_expired BIGINT,
    sent_per_second DOUBLE, delivered_per_second DOUBLE, acked_per_second DOUBLE, released_per_second DOUBLE,
    rejected_per_second DOUBLE, expired_per_second DOUBLE, dead_per_second DOUBLE, cancelled_per_second DOUBLE,
    abandoned_per_second DOUBLE, message_expired_per_second DOUBLE,
    wait_p50_ms BIGINT, wait_p95_ms BIGINT, wait_p99_ms BIGINT, wait_max_ms BIGINT,
    run_p50_ms BIGINT, run_p95_ms BIGINT, run_p99_ms BIGINT, run_max_ms BIGINT,
    late_redelivery_p50_ms BIGINT, late_redelivery_p99_ms BIGINT, late_redelivery_max_ms BIGINT,
    late_delivery_p50_ms BIGINT, late_delivery_p99_ms BIGINT, late_delivery_max_ms BIGINT,
    attempts MAP(INTEGER, BIGINT), attempts_max INTEGER, "open" BIGINT, delayed BIGINT, oldest_open_ms BIGINT,
    size_mean_bytes DOUBLE, size_p99_bytes BIGINT, "key" VARCHAR
');
CREATE OR REPLACE VIEW stats AS FROM query(getvariable('stats_query'));

-- 3. Views.

-- ``received``: a consumer received it, unlike a delivery that only waited for its time. The attempt of an ordered
-- message that was delivered again in its place is in ``attempt``; ``expirations`` has those after an expired lease.
CREATE OR REPLACE VIEW deliveries AS
WITH numbered AS (
    SELECT id, queue, sent_at, state, unnest(range(1, len(deliveries) + 1)) AS number, unnest(deliveries) AS delivery
    FROM lifecycle
)
SELECT
    id, queue, sent_at, state, number, unnest(delivery),
    coalesce(
        delivery.holder IS NOT NULL AND delivery.acquired_at IS NOT NULL AND NOT starts_with(delivery.topic, '~'), false
    ) AS received
FROM numbered;

-- Counts events as the job stats does: each in the minute in which it happened.
CREATE OR REPLACE VIEW per_minute AS
WITH events AS (
    SELECT queue, 'sent' AS kind, sent_at AS happened_at, NULL::BIGINT AS ms FROM lifecycle
    UNION ALL
    SELECT queue, state, ended_at, NULL FROM lifecycle
    WHERE state IN ('dead', 'cancelled', 'abandoned', 'message_expired')
    UNION ALL
    -- A message that was acknowledged after its dead letter is both.
    SELECT queue, 'dead', ended_at, NULL FROM lifecycle WHERE state = 'acked' AND dead_letters > redrives
    UNION ALL
    -- Its ack came after the end of the delivery.
    SELECT queue, 'acked', list_max([d.acked_at FOR d IN deliveries]), NULL
    FROM lifecycle
    WHERE state = 'acked' AND NOT list_contains([d.outcome FOR d IN deliveries], 'acked')
    UNION ALL
    SELECT queue, 'delivered', acquired_at, wait_ms FROM deliveries WHERE received
    UNION ALL
    SELECT queue, outcome, coalesce(settled_at, ended_at), run_ms
    FROM deliveries
    WHERE outcome IN ('acked', 'released', 'rejected')
    UNION ALL
    SELECT queue, outcome, coalesce(ended_at, due_at), NULL FROM deliveries WHERE outcome = 'expired'
)
SELECT
    coalesce(queue, '(unknown)') AS queue,
    date_trunc('minute', happened_at) AS minute,
    count(*) FILTER (kind = 'sent') AS sent,
    count(*) FILTER (kind = 'delivered') AS delivered,
    count(*) FILTER (kind = 'acked') AS acked,
    count(*) FILTER (kind = 'released') AS released,
    count(*) FILTER (kind = 'rejected') AS rejected,
    count(*) FILTER (kind = 'expired') AS expired,
    count(*) FILTER (kind = 'dead') AS dead,
    count(*) FILTER (kind = 'cancelled') AS cancelled,
    count(*) FILTER (kind = 'abandoned') AS abandoned,
    count(*) FILTER (kind = 'message_expired') AS message_expired,
    quantile_disc(ms, 0.5) FILTER (kind = 'delivered') AS wait_p50_ms,
    quantile_disc(ms, 0.95) FILTER (kind = 'delivered') AS wait_p95_ms,
    quantile_disc(ms, 0.99) FILTER (kind = 'delivered') AS wait_p99_ms,
    quantile_disc(ms, 0.5) FILTER (kind <> 'delivered') AS run_p50_ms,
    quantile_disc(ms, 0.95) FILTER (kind <> 'delivered') AS run_p95_ms,
    quantile_disc(ms, 0.99) FILTER (kind <> 'delivered') AS run_p99_ms
FROM events
WHERE happened_at IS NOT NULL
GROUP BY ALL;

-- The sums show where a queue loses most of its time.
CREATE OR REPLACE VIEW queue_times AS
SELECT
    coalesce(queue, '(unknown)') AS queue,
    count(*) FILTER (received) AS deliveries,
    quantile_disc(wait_ms, 0.5) FILTER (received) AS wait_p50_ms,
    quantile_disc(wait_ms, 0.95) FILTER (received) AS wait_p95_ms,
    quantile_disc(wait_ms, 0.99) FILTER (received) AS wait_p99_ms,
    quantile_disc(run_ms, 0.5) FILTER (settled) AS run_p50_ms,
    quantile_disc(run_ms, 0.95) FILTER (settled) AS run_p95_ms,
    quantile_disc(run_ms, 0.99) FILTER (settled) AS run_p99_ms,
    coalesce(sum(wait_ms) FILTER (received), 0)::BIGINT AS wait_sum_ms,
    coalesce(sum(run_ms) FILTER (settled), 0)::BIGINT AS run_sum_ms
FROM (SELECT *, coalesce(outcome IN ('acked', 'released', 'rejected'), false) AS settled FROM deliveries)
GROUP BY ALL;

-- The kind of an error: its first line, with N in place of numbers and long hexadecimal words, as in `DeadLetters.kinds`.
CREATE OR REPLACE MACRO error_kind(error) AS
    trim(left(regexp_replace(
        left(split_part(regexp_replace(error, '^\s+|\s+$', '', 'g'), chr(10), 1), 800),
        '\b(?:' || (
            SELECT string_agg(format('[a-f-]{{{}}}\d[\da-f-]{{{},}}', n, 7 - n), '|' ORDER BY n) FROM range(7) AS r(n)
        ) || '|[a-f-]{7,}\d[\da-f-]*)\b|\d+(?:\.\d+)*',
        'N', 'gi'
    ), 200));

CREATE OR REPLACE VIEW failures AS
SELECT
    id, queue, number, attempt, holder, coalesce(outcome, state) AS outcome,
    coalesce(settled_at, ended_at, due_at) AS failed_at,
    state AS message_state,
    coalesce(error_kind(error), outcome) AS kind,
    error
FROM deliveries
WHERE error IS NOT NULL OR outcome IN ('rejected', 'expired', 'abandoned', 'too_large', 'gone', 'message_expired');

CREATE OR REPLACE VIEW failure_kinds AS
SELECT
    queue, outcome, kind,
    count(*) AS failures,
    count(DISTINCT id) AS messages,
    count(DISTINCT id) FILTER (message_state = 'dead') AS dead,
    min(failed_at) AS first_at,
    max(failed_at) AS last_at,
    arg_max(id, failed_at) AS last_id
FROM failures
GROUP BY ALL;

-- ``reasons`` are the ends of all deliveries but the last one, with the kinds of errors. ``in place``: the table
-- combines the deliveries of an ordered message into one. ``earlier attempts`` were also in place, or are not in the
-- data.
CREATE OR REPLACE VIEW repeats AS
WITH counted AS (
    SELECT
        id, queue,
        any_value(sent_at) AS sent_at,
        any_value(state) AS state,
        count(*) FILTER (received) + sum(expirations) AS deliveries,
        max(attempt) FILTER (received) AS attempts,
        list(
            CASE WHEN redriven THEN 'redriven' ELSE outcome || coalesce(': ' || error_kind(error), '') END
            ORDER BY number
        ) FILTER (received OR redriven) AS ends,
        sum(expirations) AS expirations
    FROM deliveries
    GROUP BY id, queue
)
SELECT
    id, queue, sent_at, state, greatest(deliveries, attempts)::BIGINT AS deliveries,
    list_concat(
        list_concat(
            CASE WHEN attempts > deliveries THEN ['earlier attempts'] ELSE [] END,
            CASE WHEN expirations > 0 THEN ['expired in place'] ELSE [] END
        ),
        ends[:-2]
    ) AS reasons
FROM counted
WHERE greatest(deliveries, attempts) > 1;

CREATE OR REPLACE VIEW duplicates AS
SELECT id, queue, sent_at, state, duplicates, causes FROM audit WHERE duplicates > 0;

-- ``kind`` is ``delayed`` for the first delivery of a delayed message.
CREATE OR REPLACE VIEW late_deliveries AS
SELECT
    id, queue, number,
    CASE WHEN outcome <> 'delivered' THEN 'redelivery' WHEN redriven THEN 'redrive' ELSE 'delayed' END AS kind,
    outcome, due_at,
    ended_at AS sent_again_at,
    late_ms
FROM deliveries
WHERE late_ms > 0 AND outcome IN ('released', 'expired', 'delivered');

-- ``age_ms`` and ``overdue_ms`` are those at the time of the newest event of the data. ``due_at`` of a leased message is
-- the end of its lease.
CREATE OR REPLACE VIEW open_messages AS
WITH newest AS (SELECT max(last_at) AS at FROM lifecycle)
SELECT
    id, queue, state, sent_at,
    deliveries[-1].due_at AS due_at,
    date_diff('millisecond', sent_at, newest.at) AS age_ms,
    greatest(0, date_diff('millisecond', deliveries[-1].due_at, newest.at)) AS overdue_ms,
    deliveries[-1].holder AS holder,
    attempts,
    list_last([d.error FOR d IN deliveries IF d.error IS NOT NULL]) AS last_error,
    differences
FROM lifecycle CROSS JOIN newest
WHERE "open";
