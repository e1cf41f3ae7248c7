-- The ledger in PostgreSQL: its schema, and every statement it sends. The contract is in base.py.
--
-- Each part begins with a line "-- name: ...". Parts called "schema N" are migrations: run once, in order, and never edited
-- after their release; a change is a new part. Words in braces are constants of base.py.
--
-- Times are read from clock_timestamp(), because now() stands still within a transaction. Everything is named with its
-- schema, so that no search_path leads astray. A lease or retention of "forever" (null in JSON) is 1e10 seconds.

-- name: schema 1
CREATE SEQUENCE wirecall.fence;

CREATE TABLE wirecall.ledger (
    -- COLLATE "C" compares bytes: in UTF-8 that is the order of code points, as in Python.
    caller       text COLLATE "C" NOT NULL,
    method       text COLLATE "C" NOT NULL,
    key          text COLLATE "C" NOT NULL,
    fingerprint  bytea NOT NULL,
    state        text NOT NULL,
    fence        bigint NOT NULL,
    nonce        bytea NOT NULL,
    committed    boolean NOT NULL,
    attempts     integer NOT NULL,
    started_at   timestamptz NOT NULL,
    lease_until  timestamptz NOT NULL,
    retention    interval NOT NULL,
    expires_at   timestamptz NOT NULL, -- when the sweep looks at it next
    completed_at timestamptz,
    kind         text,
    payload      bytea,
    digest       bytea,
    PRIMARY KEY (caller, method, key),
    -- One constraint, because each one is prepared anew for every statement.
    CONSTRAINT shape CHECK (
        length(key) BETWEEN 1 AND 255
        AND CASE state
            WHEN 'running' THEN kind IS NULL AND completed_at IS NULL AND payload IS NULL
            WHEN 'unknown' THEN kind IS NULL AND completed_at IS NULL AND payload IS NULL
            WHEN 'waiting' THEN kind IS NOT NULL AND completed_at IS NULL
            WHEN 'done' THEN kind IS NOT NULL AND completed_at IS NOT NULL
            WHEN 'tombstone' THEN kind IS NOT NULL AND completed_at IS NOT NULL AND payload IS NULL
            ELSE false
        END
        AND (kind IS NULL OR kind IN ('result', 'error')) AND (kind IS NULL) = (digest IS NULL)
    )
);

CREATE INDEX ledger_expires_at ON wirecall.ledger (expires_at);

CREATE TYPE wirecall.record AS (
    caller text, method text, key text, fingerprint bytea, state text, fence bigint, nonce bytea, committed boolean,
    attempts integer, lease_left float8, started_at float8, completed_at float8, kind text, payload bytea, digest bytea
);

-- A row as the library reads it: how much of the lease is left, instead of when it ends.
CREATE FUNCTION wirecall.seen(l wirecall.ledger) RETURNS wirecall.record LANGUAGE sql AS $$
    SELECT ROW(
        l.caller, l.method, l.key, l.fingerprint, l.state, l.fence, l.nonce, l.committed, l.attempts,
        greatest(0, extract(epoch FROM l.lease_until - clock_timestamp())),
        extract(epoch FROM l.started_at), extract(epoch FROM l.completed_at), l.kind, l.payload, l.digest
    )::wirecall.record
$$;

CREATE FUNCTION wirecall.seconds(amount float8) RETURNS interval LANGUAGE sql IMMUTABLE AS $$
    SELECT make_interval(secs => least(amount, 1e10))
$$;

CREATE TYPE wirecall.wish AS (
    caller text COLLATE "C", method text COLLATE "C", key text COLLATE "C", fingerprint bytea, nonce bytea, lease interval,
    retention interval, on_crash text, committed boolean, continues boolean
);

-- name: schema 2
-- The functions. Each is replaced as a whole, so a change of one moves this part to the next number.

-- What a list of claims does: base.decide for each, and its record. No two of them have the same id.
--
-- First all that are new are inserted; then each of the others is looked at. A row may change or go between the look and the
-- write: the write then finds nothing, and we look again. What changes nothing writes nothing, so a replay costs no disk.
--
-- Here and below, plans are made once for lists of any length, and kept while the table grows. So none may walk through it,
-- however small it was: enable_seqscan is off, and OFFSET 0 and LIMIT keep joins from being turned round.
CREATE OR REPLACE FUNCTION wirecall.claim(claims json, max_attempts integer, unknown_kept interval, burial integer)
RETURNS SETOF wirecall.record LANGUAGE plpgsql
SET lock_timeout = '2s' SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    wishes wirecall.wish[] := ARRAY(
        SELECT ROW(
            id->>'caller', id->>'method', id->>'key', decode(fingerprint, 'base64'), decode(nonce, 'base64'),
            wirecall.seconds(lease), wirecall.seconds(retention), on_crash, committed, continues
        )::wirecall.wish
        FROM json_to_recordset(claims) AS j (
            id json, fingerprint text, nonce text, lease float8, retention float8, on_crash text, committed boolean,
            continues boolean
        )
    );
    inserted integer;
    pair record;
    c wirecall.wish;
    l wirecall.ledger;
    settled boolean;
BEGIN
    RETURN QUERY WITH fresh AS (
        INSERT INTO wirecall.ledger
        SELECT caller, method, key, fingerprint, 'running', nextval('wirecall.fence'), nonce, committed, 1, clock_timestamp(),
            clock_timestamp() + lease, retention, clock_timestamp() + lease + retention
        FROM unnest(wishes) AS w
        WHERE NOT EXISTS (
            SELECT FROM wirecall.ledger AS o WHERE o.caller = w.caller AND o.method = w.method AND o.key = w.key OFFSET 0
        )
        ON CONFLICT DO NOTHING RETURNING *
    ) SELECT seen.* FROM fresh, wirecall.seen(fresh) AS seen;
    GET DIAGNOSTICS inserted = ROW_COUNT;
    IF inserted = cardinality(wishes) THEN
        RETURN;
    END IF;

    FOR pair IN
        SELECT w AS wish, o.old FROM unnest(wishes) AS w LEFT JOIN LATERAL (
            SELECT o AS old, o.nonce = w.nonce AND o.xmin = pg_current_xact_id_if_assigned()::xid AS is_fresh
            FROM wirecall.ledger AS o WHERE o.caller = w.caller AND o.method = w.method AND o.key = w.key LIMIT 1
        ) AS o ON true
        WHERE o.is_fresh IS NOT TRUE
    LOOP
        c := pair.wish;
        l := pair.old;
        FOR look IN 1..100 LOOP
            IF l.key IS NULL THEN
                INSERT INTO wirecall.ledger VALUES (
                    c.caller, c.method, c.key, c.fingerprint, 'running', nextval('wirecall.fence'), c.nonce, c.committed, 1,
                    clock_timestamp(), clock_timestamp() + c.lease, c.retention, clock_timestamp() + c.lease + c.retention
                ) ON CONFLICT DO NOTHING RETURNING * INTO l;
                settled := FOUND;
            ELSIF l.fingerprint <> c.fingerprint THEN
                settled := true;
            ELSIF l.nonce = c.nonce AND l.state IN ('running', 'unknown') THEN
                UPDATE wirecall.ledger
                SET state = 'running', lease_until = clock_timestamp() + c.lease,
                    expires_at = clock_timestamp() + c.lease + c.retention
                WHERE caller = c.caller AND method = c.method AND key = c.key
                    AND state = l.state AND fence = l.fence AND nonce = l.nonce
                RETURNING * INTO l;
                settled := FOUND;
            ELSIF l.state = 'done' AND l.expires_at <= clock_timestamp() THEN
                UPDATE wirecall.ledger
                SET state = 'tombstone', payload = NULL, expires_at = clock_timestamp() + burial * retention
                WHERE caller = c.caller AND method = c.method AND key = c.key
                    AND state = l.state AND fence = l.fence AND nonce = l.nonce
                RETURNING * INTO l;
                settled := FOUND;
            ELSIF (l.state = 'waiting' AND c.continues) OR (
                l.state = 'running' AND l.lease_until <= clock_timestamp()
                AND (NOT l.committed OR (c.on_crash <> 'unknown' AND l.attempts < max_attempts))
            ) THEN
                UPDATE wirecall.ledger
                SET state = 'running', fence = nextval('wirecall.fence'), nonce = c.nonce,
                    committed = c.committed OR committed, attempts = attempts + 1, retention = c.retention,
                    lease_until = clock_timestamp() + c.lease, expires_at = clock_timestamp() + c.lease + c.retention,
                    kind = NULL, payload = NULL, digest = NULL
                WHERE caller = c.caller AND method = c.method AND key = c.key
                    AND state = l.state AND fence = l.fence AND nonce = l.nonce AND lease_until = l.lease_until
                RETURNING * INTO l;
                settled := FOUND;
            ELSIF l.state = 'running' AND l.lease_until <= clock_timestamp() THEN
                UPDATE wirecall.ledger SET state = 'unknown', expires_at = clock_timestamp() + unknown_kept
                WHERE caller = c.caller AND method = c.method AND key = c.key
                    AND state = l.state AND fence = l.fence AND nonce = l.nonce AND lease_until = l.lease_until
                RETURNING * INTO l;
                settled := FOUND;
            ELSE
                settled := true;
            END IF;
            EXIT WHEN settled;
            SELECT * INTO l FROM wirecall.ledger WHERE caller = c.caller AND method = c.method AND key = c.key;
        END LOOP;
        IF NOT settled THEN
            RAISE lock_not_available USING MESSAGE = 'the record changed 100 times while it was looked at';
        END IF;
        RETURN NEXT wirecall.seen(l);
    END LOOP;
END $$;

-- RUNNING or UNKNOWN to DONE, for a list of tokens; gives the ids of those that were current. `again` says that this may have
-- happened before, the answer having been lost: then a record that is already done under the same token counts.
--
-- An UPDATE can be turned round in spite of LIMIT, so every way but one is closed to it: look up each record, by its key.
CREATE OR REPLACE FUNCTION wirecall.complete(completions json, again boolean)
RETURNS TABLE (caller text, method text, key text) LANGUAGE plpgsql
SET lock_timeout = '2s' SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_indexscan = off
SET enable_indexonlyscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY UPDATE wirecall.ledger AS l
    SET state = 'done', lease_until = clock_timestamp(), retention = wirecall.seconds(c.retention),
        expires_at = clock_timestamp() + wirecall.seconds(c.retention), completed_at = clock_timestamp(),
        kind = outcome->>'kind', payload = decode(outcome->>'payload', 'base64'), digest = decode(outcome->>'digest', 'base64')
    FROM json_to_recordset(completions) AS c (id json, fence bigint, nonce text, outcome json, retention float8)
    WHERE l.caller = id->>'caller' AND l.method = id->>'method' AND l.key = id->>'key'
        AND l.fence = c.fence AND l.nonce = decode(c.nonce, 'base64') AND l.state IN ('running', 'unknown')
    RETURNING l.caller, l.method, l.key;

    IF again THEN
        RETURN QUERY SELECT l.caller, l.method, l.key
        FROM wirecall.ledger AS l, json_to_recordset(completions) AS c (id json, fence bigint, nonce text, outcome json)
        WHERE l.caller = id->>'caller' AND l.method = id->>'method' AND l.key = id->>'key'
            AND l.fence = c.fence AND l.nonce = decode(c.nonce, 'base64')
            AND l.state = 'done' AND l.digest = decode(outcome->>'digest', 'base64');
    END IF;
END $$;

-- The same in the transaction of a handler, before its commit: without its record there must be none.
CREATE OR REPLACE FUNCTION wirecall.finish(completions json) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM wirecall.complete(completions, false);
    IF NOT FOUND THEN
        RAISE SQLSTATE 'WC001' USING MESSAGE = 'the record of the command is gone';
    END IF;
END $$;

-- name: opened
SELECT current_setting('synchronous_commit'), current_setting('fsync'), to_regclass('wirecall.version') IS NOT NULL

-- name: version
SELECT coalesce(max(number), 0) FROM wirecall.version

-- name: lock schema
SELECT pg_advisory_xact_lock(hashtextextended('wirecall schema', 0))

-- name: create schema
DO $$ BEGIN
    -- Even IF NOT EXISTS asks for the right to create a schema, which a careful owner may have kept.
    IF to_regnamespace('wirecall') IS NULL THEN
        CREATE SCHEMA wirecall;
    END IF;
    CREATE TABLE IF NOT EXISTS wirecall.version (
        number integer PRIMARY KEY, migrated_at timestamptz NOT NULL DEFAULT clock_timestamp()
    );
END $$

-- name: migrated
INSERT INTO wirecall.version (number) VALUES (%(number)s)

-- name: claim
SELECT * FROM wirecall.claim(%(items)s::json, {max_attempts}, make_interval(secs => {forever}), {burial})

-- name: complete
SELECT * FROM wirecall.complete(%(items)s::json, %(again)s)

-- name: heartbeat
UPDATE wirecall.ledger
SET lease_until = clock_timestamp() + wirecall.seconds(%(lease)s),
    expires_at = clock_timestamp() + wirecall.seconds(%(lease)s) + retention
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND fence = %(fence)s AND nonce = %(nonce)s
    AND state = 'running'
RETURNING true

-- name: commit_point
UPDATE wirecall.ledger
SET committed = true, lease_until = clock_timestamp() + wirecall.seconds(%(lease)s),
    expires_at = clock_timestamp() + wirecall.seconds(%(lease)s) + retention
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND fence = %(fence)s AND nonce = %(nonce)s
    AND state = 'running' AND lease_until > clock_timestamp()
RETURNING true

-- name: suspend
UPDATE wirecall.ledger
SET state = 'waiting', attempts = 0,
    lease_until = clock_timestamp(), expires_at = clock_timestamp() + wirecall.seconds(%(retention)s),
    kind = %(kind)s, payload = %(payload)s, digest = %(digest)s
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND fence = %(fence)s AND nonce = %(nonce)s
    AND state = 'running'
RETURNING true

-- name: release
DELETE FROM wirecall.ledger
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND fence = %(fence)s AND nonce = %(nonce)s
    AND state = 'running'
RETURNING true

-- name: abandon
UPDATE wirecall.ledger
SET state = 'unknown', lease_until = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => {forever})
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND fence = %(fence)s AND nonce = %(nonce)s
    AND state = 'running'
RETURNING true

-- name: lapse
UPDATE wirecall.ledger
SET lease_until = clock_timestamp(), expires_at = clock_timestamp() + retention
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND fence = %(fence)s AND nonce = %(nonce)s
    AND state = 'running'
RETURNING true

-- name: resolve done
UPDATE wirecall.ledger
SET state = 'done', lease_until = clock_timestamp(), retention = wirecall.seconds(%(retention)s),
    expires_at = clock_timestamp() + wirecall.seconds(%(retention)s), completed_at = clock_timestamp(),
    kind = %(kind)s, payload = %(payload)s, digest = %(digest)s
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND state = 'unknown'
RETURNING true

-- name: resolve not done
DELETE FROM wirecall.ledger
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND state = 'unknown'
RETURNING true

-- name: get
SELECT seen.* FROM json_to_recordset(%(items)s::json) AS w (caller text, method text, key text), LATERAL (
    SELECT o AS found FROM wirecall.ledger AS o WHERE o.caller = w.caller AND o.method = w.method AND o.key = w.key LIMIT 1
) AS l, wirecall.seen(l.found) AS seen

-- name: list
SELECT seen.* FROM wirecall.ledger AS l, wirecall.seen(l) AS seen
WHERE (l.caller, l.method, l.key) > (%(caller)s, %(method)s, %(key)s) AND l.state = coalesce(%(state)s, l.state)
ORDER BY l.caller, l.method, l.key LIMIT %(limit)s

-- name: counts
SELECT state, count(*) FROM wirecall.ledger GROUP BY state

-- name: sweep
-- The clock is read in a subquery: as a volatile function in the condition itself it would keep the index out.
WITH due AS (
    SELECT caller, method, key, CASE WHEN state = 'running' AND NOT committed THEN 'released' ELSE state END AS state
    FROM wirecall.ledger WHERE expires_at <= (SELECT clock_timestamp()) AND state <> 'unknown'
    ORDER BY expires_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM wirecall.ledger AS l USING due
    WHERE (l.caller, l.method, l.key) = (due.caller, due.method, due.key) AND due.state IN ('tombstone', 'waiting', 'released')
    RETURNING 1
), buried AS (
    UPDATE wirecall.ledger AS l
    SET state = 'tombstone', payload = NULL, expires_at = clock_timestamp() + {burial} * l.retention
    FROM due
    WHERE (l.caller, l.method, l.key) = (due.caller, due.method, due.key) AND due.state = 'done'
    RETURNING 1
), lost AS (
    UPDATE wirecall.ledger AS l
    SET state = 'unknown', lease_until = clock_timestamp(),
        expires_at = clock_timestamp() + make_interval(secs => {forever})
    FROM due
    WHERE (l.caller, l.method, l.key) = (due.caller, due.method, due.key) AND due.state = 'running'
    RETURNING 1
)
SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM buried) + (SELECT count(*) FROM lost)

-- name: ping
-- Both statements are one transaction, so the row is seen nowhere; but it takes its room, and its commit goes to the disk.
INSERT INTO wirecall.ledger VALUES (
    '', 'wirecall.ping', %(key)s, '', 'running', 0, '', false, 1, clock_timestamp(), clock_timestamp(), '0', clock_timestamp()
);
DELETE FROM wirecall.ledger WHERE caller = '' AND method = 'wirecall.ping' AND key = %(key)s

-- name: enter
-- First the timeouts: for another transaction with the same record, for a handler that is silent, and for a host that has
-- vanished without a word, also in the middle of one of the handler's own statements.
BEGIN;
SELECT set_config('lock_timeout', %(turn)s, true), set_config('idle_in_transaction_session_timeout', %(silence)s, true),
    set_config('tcp_keepalives_idle', '10', true), set_config('tcp_keepalives_interval', '3', true),
    set_config('tcp_keepalives_count', '3', true), set_config('tcp_user_timeout', '20s', true);
INSERT INTO wirecall.ledger VALUES (
    %(caller)s, %(method)s, %(key)s, %(fingerprint)s, 'running', nextval('wirecall.fence'), %(nonce)s, %(committed)s, 1,
    clock_timestamp(), clock_timestamp() + wirecall.seconds(%(lease)s), wirecall.seconds(%(retention)s),
    clock_timestamp() + wirecall.seconds(%(lease)s) + wirecall.seconds(%(retention)s)
) ON CONFLICT DO NOTHING
RETURNING fence, extract(epoch FROM started_at)::float8, pg_current_xact_id()::text, pg_backend_pid(),
    set_config('lock_timeout', '3s', true); -- from here on, for the statements of the handler, which may set another
SAVEPOINT wirecall

-- name: found
SELECT seen.*, l.expires_at <= clock_timestamp() FROM wirecall.ledger AS l, wirecall.seen(l) AS seen
WHERE l.caller = %(caller)s AND l.method = %(method)s AND l.key = %(key)s

-- name: finish
SELECT wirecall.finish(%(items)s::json);
COMMIT

-- name: is ours
SELECT pg_current_xact_id_if_assigned() = %(xid)s::xid8;
ROLLBACK

-- name: fate
SELECT pg_xact_status(%(xid)s::xid8)

-- name: settle
-- What became of a transaction whose commit nobody confirmed: its status, and whether a row with its nonce is there. The row
-- proves the commit. The status alone does not: after a crash or a failover its number may be given to another transaction.
-- A number that was not given out at all has not committed here. A session that still holds the transaction is ended: it
-- waits for a client that is gone.
SELECT CASE WHEN t.xid < pg_current_xact_id() THEN pg_xact_status(t.xid) ELSE 'aborted' END,
    EXISTS (
        SELECT FROM wirecall.ledger
        WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND nonce = %(nonce)s
    ),
    (SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid = %(pid)s AND backend_xid = t.xid::xid)
FROM (SELECT %(xid)s::xid8 AS xid) AS t
