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
    -- One constraint, because every statement prepares each of them again.
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
)
-- partitioned
;

CREATE INDEX ledger_expires_at ON wirecall.ledger (expires_at);

CREATE TYPE wirecall.record AS (
    caller text, method text, key text, fingerprint bytea, state text, fence bigint, nonce bytea, committed boolean,
    attempts integer, lease_left float8, started_at float8, completed_at float8, kind text, payload bytea, digest bytea
);

-- A row as the library reads it: the rest of the lease in seconds, instead of its end.
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
-- The functions were here; schema 4 has them.

-- name: schema 3
-- The delivery of the answer to a call without a key. The constraint is not proved for the rows that there are: they met the
-- old one, and have none of this.
ALTER TABLE wirecall.ledger
    ADD COLUMN delivery  text,
    ADD COLUMN deliverer bytea, -- the nonce of the claim whose caller gets the answer
    ADD COLUMN lost_at   timestamptz, -- of an answer that is undelivered
    ADD COLUMN likeness  bytea, -- as long as an equal call may be a repetition of this one
    ADD COLUMN taken_at  timestamptz, -- when the last repetition took the answer over
    DROP CONSTRAINT shape,
    ADD CONSTRAINT shape CHECK (
        length(key) BETWEEN 1 AND 255
        AND CASE state
            WHEN 'running' THEN kind IS NULL AND completed_at IS NULL AND payload IS NULL
            WHEN 'unknown' THEN kind IS NULL AND completed_at IS NULL AND payload IS NULL
            WHEN 'waiting' THEN kind IS NOT NULL AND completed_at IS NULL
            WHEN 'done' THEN kind IS NOT NULL AND completed_at IS NOT NULL
            WHEN 'tombstone' THEN kind IS NOT NULL AND completed_at IS NOT NULL AND payload IS NULL AND likeness IS NULL
            ELSE false
        END
        AND (kind IS NULL OR kind IN ('result', 'error')) AND (kind IS NULL) = (digest IS NULL)
        AND CASE
            WHEN delivery IS NULL THEN deliverer IS NULL AND lost_at IS NULL AND likeness IS NULL
            WHEN delivery = 'pending' THEN deliverer IS NOT NULL AND lost_at IS NULL
            WHEN delivery = 'undelivered' THEN deliverer IS NOT NULL AND lost_at IS NOT NULL
            WHEN delivery = 'written' THEN deliverer IS NOT NULL AND lost_at IS NULL AND likeness IS NULL
            ELSE false
        END
    ) NOT VALID;

CREATE INDEX ledger_likeness ON wirecall.ledger (likeness) WHERE likeness IS NOT NULL;

ALTER TYPE wirecall.record ADD ATTRIBUTE delivery text, ADD ATTRIBUTE deliverer bytea;

-- The claim of a call without a key, the nth of a list. `is_new`: it is known that it repeats no other; or, where it is
-- false, that an equal one stands before it in the list.
CREATE TYPE wirecall.keyless AS (
    nth integer, caller text COLLATE "C", method text COLLATE "C", key text COLLATE "C", fingerprint bytea, nonce bytea,
    lease interval, retention interval, committed boolean, likeness bytea, loss_window interval, beside text[], is_new boolean
);

-- name: schema 4
-- The functions were here; schema 6 has them.

-- name: schema 5
-- Tasks. The record has no foreign key: it may go before its task, and another may come under its id.
CREATE TABLE wirecall.tasks (
    id         text COLLATE "C" PRIMARY KEY,
    nth        bigint GENERATED ALWAYS AS IDENTITY, -- the order of beginning
    caller     text COLLATE "C" NOT NULL,
    method     text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    started_at timestamptz NOT NULL, -- of the record
    version    bigint NOT NULL,
    document   bytea NOT NULL,
    is_ready   boolean NOT NULL,
    is_over    boolean NOT NULL,
    expires_at timestamptz NOT NULL
);

CREATE INDEX tasks_record ON wirecall.tasks (caller, method, key, nth);
CREATE INDEX tasks_open ON wirecall.tasks (nth) WHERE NOT is_over; -- few, however many there are
CREATE INDEX tasks_expires_at ON wirecall.tasks (expires_at);

-- name: schema 6
-- What a method with record_params shows of a call; and whether a retry may run the command again after the end of its lease
-- (NULL: only a person can tell how it ended). The sweep looks at a run of the second kind soon after its lease.
ALTER TABLE wirecall.ledger ADD COLUMN params bytea, ADD COLUMN may_rerun boolean;
ALTER TYPE wirecall.record ADD ATTRIBUTE params bytea;
ALTER TYPE wirecall.wish ADD ATTRIBUTE params bytea;
ALTER TYPE wirecall.keyless ADD ATTRIBUTE on_crash text, ADD ATTRIBUTE params bytea;

-- How long after the end of its lease the sweep looks at a run.
CREATE FUNCTION wirecall.sweeps_after(committed boolean, may_rerun boolean, retention interval) RETURNS interval
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN committed AND may_rerun IS NOT TRUE THEN least(make_interval(secs => {unknown_after}), retention)
        ELSE retention END
$$;

-- The state that counts: a committed run whose lease is over is unknown.
CREATE FUNCTION wirecall.standing(l wirecall.ledger) RETURNS text LANGUAGE sql AS $$
    SELECT CASE WHEN l.state = 'running' AND l.committed AND l.lease_until <= clock_timestamp() THEN 'unknown' ELSE l.state END
$$;

UPDATE wirecall.ledger SET expires_at = lease_until + wirecall.sweeps_after(committed, may_rerun, retention)
WHERE state = 'running' AND committed;

-- The functions. Each is replaced as a whole, so a change of one moves this part to the next number.

CREATE OR REPLACE FUNCTION wirecall.seen(l wirecall.ledger) RETURNS wirecall.record LANGUAGE sql AS $$
    SELECT ROW(
        l.caller, l.method, l.key, l.fingerprint, l.state, l.fence, l.nonce, l.committed, l.attempts,
        greatest(0, extract(epoch FROM l.lease_until - clock_timestamp())),
        extract(epoch FROM l.started_at), extract(epoch FROM l.completed_at), l.kind, l.payload, l.digest,
        l.delivery, l.deliverer, l.params
    )::wirecall.record
$$;

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
            wirecall.seconds(lease), wirecall.seconds(retention), on_crash, committed, continues, decode(params, 'base64')
        )::wirecall.wish
        FROM json_to_recordset(claims) AS j (
            id json, fingerprint text, nonce text, lease float8, retention float8, on_crash text, committed boolean,
            continues boolean, params text
        )
    );
    inserted integer;
    pair record;
    c wirecall.wish;
    l wirecall.ledger;
    settled boolean;
BEGIN
    RETURN QUERY WITH fresh AS (
        INSERT INTO wirecall.ledger (
            caller, method, key, fingerprint, state, fence, nonce, committed, attempts, started_at, lease_until, retention,
            expires_at, params, may_rerun
        )
        SELECT caller, method, key, fingerprint, 'running', nextval('wirecall.fence'), nonce, committed, 1, clock_timestamp(),
            clock_timestamp() + lease, retention,
            clock_timestamp() + lease + wirecall.sweeps_after(committed, on_crash <> 'unknown', retention),
            params, nullif(on_crash <> 'unknown', false)
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
                INSERT INTO wirecall.ledger (
                    caller, method, key, fingerprint, state, fence, nonce, committed, attempts, started_at, lease_until,
                    retention, expires_at, params, may_rerun
                ) VALUES (
                    c.caller, c.method, c.key, c.fingerprint, 'running', nextval('wirecall.fence'), c.nonce, c.committed, 1,
                    clock_timestamp(), clock_timestamp() + c.lease, c.retention,
                    clock_timestamp() + c.lease + wirecall.sweeps_after(c.committed, c.on_crash <> 'unknown', c.retention),
                    c.params, nullif(c.on_crash <> 'unknown', false)
                ) ON CONFLICT DO NOTHING RETURNING * INTO l;
                settled := FOUND;
            ELSIF l.fingerprint <> c.fingerprint THEN
                settled := true;
            ELSIF l.nonce = c.nonce AND l.state IN ('running', 'unknown') THEN
                UPDATE wirecall.ledger
                SET state = 'running', lease_until = clock_timestamp() + c.lease,
                    expires_at = clock_timestamp() + c.lease + wirecall.sweeps_after(committed, may_rerun, c.retention)
                WHERE caller = c.caller AND method = c.method AND key = c.key
                    AND state = l.state AND fence = l.fence AND nonce = l.nonce
                RETURNING * INTO l;
                settled := FOUND;
            ELSIF l.state = 'done' AND l.expires_at <= clock_timestamp() THEN
                UPDATE wirecall.ledger
                SET state = 'tombstone', payload = NULL, likeness = NULL, params = NULL,
                    expires_at = clock_timestamp() + burial * retention
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
                    may_rerun = nullif(c.on_crash <> 'unknown', false), lease_until = clock_timestamp() + c.lease,
                    expires_at = clock_timestamp() + c.lease
                        + wirecall.sweeps_after(c.committed OR committed, c.on_crash <> 'unknown', c.retention),
                    kind = NULL, payload = NULL, digest = NULL
                WHERE caller = c.caller AND method = c.method AND key = c.key
                    AND state = l.state AND fence = l.fence AND nonce = l.nonce AND lease_until = l.lease_until
                RETURNING * INTO l;
                settled := FOUND;
            ELSIF l.state = 'running' AND l.lease_until <= clock_timestamp() THEN
                UPDATE wirecall.ledger
                SET state = 'unknown', expires_at = clock_timestamp() + unknown_kept, taken_at = greatest(taken_at, lease_until)
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

-- base.recognise, for a record and the claim of a call without a key that have one likeness.
CREATE OR REPLACE FUNCTION wirecall.recognise(l wirecall.ledger, c wirecall.keyless) RETURNS text LANGUAGE sql AS $$
    SELECT CASE
        WHEN l.deliverer = c.nonce THEN 'match'
        WHEN l.state = 'unknown' THEN
            CASE WHEN clock_timestamp() <= greatest(l.lost_at, l.taken_at) + c.loss_window THEN 'match' ELSE 'pass' END
        WHEN l.delivery = 'undelivered' THEN
            CASE WHEN l.state = 'running' OR clock_timestamp() <= l.lost_at + c.loss_window THEN 'match' ELSE 'pass' END
        WHEN l.delivery <> 'pending' OR l.key = ANY (c.beside) THEN 'pass'
        WHEN l.state = 'running' THEN CASE
            WHEN clock_timestamp() < l.lease_until THEN 'wait'
            WHEN clock_timestamp() <= l.lease_until + c.loss_window THEN 'match'
            ELSE 'pass'
        END
        WHEN l.state = 'done' THEN CASE
            WHEN clock_timestamp() < greatest(l.completed_at, l.taken_at) + c.lease THEN 'wait'
            WHEN clock_timestamp() <= greatest(l.completed_at, l.taken_at) + c.lease + c.loss_window THEN 'match'
            ELSE 'pass'
        END
        ELSE 'pass'
    END
$$;

-- A list of claims without a key, as the library sends it. Equal calls stand together, in the order of their arrival.
CREATE OR REPLACE FUNCTION wirecall.keyless_of(claims json) RETURNS wirecall.keyless[] LANGUAGE sql AS $$
    SELECT ARRAY(
        SELECT ROW(
            row_number() OVER (), id->>'caller', id->>'method', id->>'key', decode(fingerprint, 'base64'),
            decode(nonce, 'base64'), wirecall.seconds(lease), wirecall.seconds(retention), committed,
            decode(keyless->>'likeness', 'base64'), wirecall.seconds((keyless->>'window')::float8),
            ARRAY(SELECT json_array_elements_text(keyless->'beside')),
            CASE
                WHEN keyless->>'likeness' IS NULL THEN true
                WHEN keyless->>'likeness' = lag(keyless->>'likeness') OVER () THEN false
            END,
            on_crash, decode(params, 'base64')
        )::wirecall.keyless
        FROM json_to_recordset(claims) AS j (
            id json, fingerprint text, nonce text, lease float8, retention float8, on_crash text, committed boolean,
            keyless json, params text
        )
    )
$$;

-- Insert the calls that repeat no other. From here to the end of the transaction no other claim looks for a call of the same
-- likeness, so none can appear in the table that it does not see.
CREATE OR REPLACE FUNCTION wirecall.insert_keyless(calls wirecall.keyless[]) RETURNS SETOF wirecall.ledger LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(encode(likeness, 'hex'), 0)) FROM unnest(calls) WHERE likeness IS NOT NULL;
    RETURN QUERY INSERT INTO wirecall.ledger (
        caller, method, key, fingerprint, state, fence, nonce, committed, attempts, started_at, lease_until, retention,
        expires_at, delivery, deliverer, likeness, params, may_rerun
    )
    SELECT caller, method, key, fingerprint, 'running', nextval('wirecall.fence'), nonce, committed, 1, clock_timestamp(),
        clock_timestamp() + lease, retention,
        clock_timestamp() + lease + wirecall.sweeps_after(committed, on_crash <> 'unknown', retention),
        'pending', nonce, likeness, params, nullif(on_crash <> 'unknown', false)
    FROM unnest(calls) AS c
    WHERE CASE WHEN is_new THEN true ELSE
        (is_new IS NULL OR NOT EXISTS (
            SELECT FROM unnest(calls) AS e WHERE e.likeness = c.likeness AND e.nth < c.nth AND e.key <> ALL (c.beside)
        )) AND NOT EXISTS (
            SELECT FROM wirecall.ledger AS l WHERE l.likeness = c.likeness AND wirecall.recognise(l, c) <> 'pass' OFFSET 0
        )
    END
    ON CONFLICT DO NOTHING RETURNING *;
END $$;

-- Find the record that a call without a key repeats, and lock it; or the one that it has to wait for.
CREATE OR REPLACE FUNCTION wirecall.match(c wirecall.keyless, OUT verdict text, OUT earlier wirecall.ledger) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    pair record;
BEGIN
    FOR look IN 1..100 LOOP
        SELECT l, v.verdict INTO pair FROM wirecall.ledger AS l, LATERAL (SELECT wirecall.recognise(l, c) OFFSET 0) AS v (verdict)
        WHERE l.likeness = c.likeness AND v.verdict <> 'pass'
        -- "match" stands before "wait", and what an earlier sending of this claim took before all others.
        ORDER BY v.verdict, l.deliverer <> c.nonce, l.delivery <> 'undelivered', l.state <> 'unknown', l.fence LIMIT 1;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        verdict := pair.verdict;
        earlier := pair.l;
        IF verdict = 'wait' THEN
            RETURN;
        END IF;
        -- If it has changed since the look, it may match no more.
        PERFORM FROM wirecall.ledger AS l
        WHERE l.caller = earlier.caller AND l.method = earlier.method AND l.key = earlier.key AND l = earlier FOR UPDATE;
        IF FOUND THEN
            RETURN;
        END IF;
    END LOOP;
    RAISE lock_not_available USING MESSAGE = 'the record changed 100 times while it was looked at';
END $$;

-- The answer of a record goes to the caller of this claim from now on.
CREATE OR REPLACE FUNCTION wirecall.take_answer(l wirecall.ledger, c wirecall.keyless) RETURNS wirecall.ledger LANGUAGE sql AS $$
    UPDATE wirecall.ledger SET delivery = 'pending', deliverer = c.nonce, lost_at = NULL, taken_at = clock_timestamp()
    WHERE caller = l.caller AND method = l.method AND key = l.key RETURNING *
$$;

-- What a list of claims without a key does: the id of each, and its record, which may be that of an earlier call.
--
-- First all that repeat no other are inserted; then each of the others is looked at. Its equals may have come in with it.
CREATE OR REPLACE FUNCTION wirecall.claim_keyless(claims json, max_attempts integer, unknown_kept interval, burial integer)
RETURNS TABLE (caller text, method text, key text, entry wirecall.record) LANGUAGE plpgsql
SET lock_timeout = '2s' SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    calls wirecall.keyless[] := wirecall.keyless_of(claims);
    inserted integer;
    c wirecall.keyless;
    l wirecall.ledger;
    m record;
BEGIN
    RETURN QUERY SELECT fresh.caller, fresh.method, fresh.key, wirecall.seen(fresh) FROM wirecall.insert_keyless(calls) AS fresh;
    GET DIAGNOSTICS inserted = ROW_COUNT;
    IF inserted = cardinality(calls) THEN
        RETURN;
    END IF;

    FOR c IN
        SELECT w.* FROM unnest(calls) AS w WHERE NOT EXISTS (
            SELECT FROM wirecall.ledger AS o
            WHERE o.caller = w.caller AND o.method = w.method AND o.key = w.key
                AND o.nonce = w.nonce AND o.xmin = pg_current_xact_id_if_assigned()::xid OFFSET 0
        )
    LOOP
        SELECT * INTO m FROM wirecall.match(c);
        IF m.verdict = 'wait' THEN
            l := m.earlier;
        ELSIF m.verdict = 'match' THEN
            -- In this order: if this transaction wrote a record with its nonce before, `claim` would take that record for its own.
            PERFORM FROM wirecall.claim(
                json_build_array(jsonb_set((claims->(c.nth - 1))::jsonb, '{id,key}', to_jsonb((m.earlier).key))),
                max_attempts, unknown_kept, burial
            );
            l := wirecall.take_answer(m.earlier, c);
        ELSE
            c.is_new := true;
            SELECT * INTO l FROM wirecall.insert_keyless(ARRAY[c]);
            IF NOT FOUND THEN -- it is there under its own key: the claim is sent again
                RETURN QUERY SELECT c.caller, c.method, c.key, own::wirecall.record
                FROM wirecall.claim(json_build_array(claims->(c.nth - 1)), max_attempts, unknown_kept, burial) AS own;
                CONTINUE;
            END IF;
        END IF;
        RETURN QUERY SELECT c.caller, c.method, c.key, wirecall.seen(l);
    END LOOP;
END $$;

-- The same for one claim that begins a transaction. As another transaction would, a record that it has to wait for holds it
-- up; so does one that runs under a lease, whose answer it could not give.
CREATE OR REPLACE FUNCTION wirecall.enter_keyless(claims json, OUT entry wirecall.record, OUT is_new boolean, OUT expired boolean)
LANGUAGE plpgsql AS $$
DECLARE
    c wirecall.keyless := (wirecall.keyless_of(claims))[1];
    l wirecall.ledger;
    m record;
BEGIN
    FOR look IN 1..100 LOOP
        SELECT * INTO l FROM wirecall.insert_keyless(ARRAY[c]);
        is_new := FOUND;
        EXIT WHEN FOUND;
        SELECT * INTO m FROM wirecall.match(c);
        IF m.verdict = 'wait' OR (m.earlier).state = 'running' AND (m.earlier).lease_until > clock_timestamp() THEN
            RAISE lock_not_available USING MESSAGE = 'an equal call is in progress';
        ELSIF m.verdict = 'match' THEN
            l := wirecall.take_answer(m.earlier, c);
            EXIT;
        END IF;
        -- Either it is there under its own key, or the record that it resembled has changed.
        SELECT * INTO l FROM wirecall.ledger AS o WHERE o.caller = c.caller AND o.method = c.method AND o.key = c.key;
        EXIT WHEN FOUND;
    END LOOP;
    IF l.key IS NULL THEN
        RAISE lock_not_available USING MESSAGE = 'equal calls changed 100 times while they were looked at';
    END IF;
    entry := wirecall.seen(l);
    expired := l.expires_at <= clock_timestamp();
END $$;

-- What became of a list of answers; none is there twice.
CREATE OR REPLACE FUNCTION wirecall.deliver(ends json) RETURNS void LANGUAGE plpgsql
SET lock_timeout = '2s' SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_indexscan = off
SET enable_indexonlyscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    UPDATE wirecall.ledger AS l
    SET delivery = e.delivery, lost_at = CASE e.delivery WHEN 'undelivered' THEN clock_timestamp() END,
        likeness = CASE e.delivery WHEN 'undelivered' THEN l.likeness END
    FROM json_to_recordset(ends) AS e (id json, deliverer text, delivery text)
    WHERE l.caller = id->>'caller' AND l.method = id->>'method' AND l.key = id->>'key'
        AND l.deliverer = decode(e.deliverer, 'base64') AND l.delivery IN ('pending', 'undelivered');
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

-- name: schema 7
-- From here on, a part only adds, so that processes of the version before continue to work: columns of tables come last,
-- a function keeps its arguments, and a type that functions return stays as it is: open sessions have it in their plans. In the table of versions the number of such a part is negative, and
-- the highest number is the least version that a process must know.
--
-- Parts called "index N ..." belong to it. In a ledger that is in use they are built while commands run. The part itself may
-- then be executed twice.

-- A page of records for operators, the newest first. `stored` are states, and `dead` says of each whether its runs must be
-- committed and without a lease (NULL: that does not matter). Methods are few: the index finds one after another, and the
-- newest records of each. A caller with few records is found by the primary key. Plans that walk through the table are closed.
CREATE OR REPLACE FUNCTION wirecall.page(
    stored text[], dead boolean[], of_method text, of_caller text, since timestamptz, until timestamptz, last_at timestamptz,
    last_caller text, last_method text, last_key text, most integer
) RETURNS SETOF wirecall.record LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    number integer;
    is_wanted text := 'l.started_at >= $5 AND l.started_at < $6 AND l.started_at <= $7
        AND (l.started_at, l.caller, l.method, l.key) < ($7, $8, $9, $10)';
    newest text := 'ORDER BY l.started_at DESC, l.caller DESC, l.method DESC, l.key DESC LIMIT $11';
BEGIN
    IF of_caller IS NOT NULL THEN
        SELECT count(*) INTO number FROM (SELECT FROM wirecall.ledger AS l WHERE l.caller = of_caller LIMIT 2001) AS l;
        IF number <= 2000 THEN
            RETURN QUERY EXECUTE
                'SELECT seen.* FROM (
                    SELECT l AS found FROM wirecall.ledger AS l JOIN unnest($1, $2) AS s (state, is_dead) ON l.state = s.state
                    WHERE l.caller = $4 AND ($3 IS NULL OR l.method = $3) AND ' || is_wanted || '
                        AND (s.is_dead IS NULL OR s.is_dead = (l.committed AND l.lease_until <= clock_timestamp())) ' || newest || '
                ) AS l, wirecall.seen(l.found) AS seen'
                USING stored, dead, of_method, of_caller, since, until, last_at, last_caller, last_method, last_key, most;
            RETURN;
        END IF;
        is_wanted := is_wanted || ' AND l.caller = $4';
    END IF;
    RETURN QUERY EXECUTE
        'WITH RECURSIVE steps (state, is_dead, method) AS (
            SELECT s.state, s.is_dead, coalesce($3, (
                SELECT o.method FROM wirecall.ledger AS o WHERE o.state = s.state ORDER BY o.method LIMIT 1
            )) COLLATE "C"
            FROM unnest($1, $2) AS s (state, is_dead)
            UNION ALL
            SELECT s.state, s.is_dead, (
                SELECT o.method FROM wirecall.ledger AS o WHERE o.state = s.state AND o.method > s.method ORDER BY o.method LIMIT 1
            )
            FROM steps AS s WHERE $3 IS NULL AND s.method IS NOT NULL
        )
        SELECT seen.* FROM (
            SELECT l.found FROM steps AS s, LATERAL (
                SELECT l.started_at, l.caller, l.method, l.key, l AS found FROM wirecall.ledger AS l
                WHERE l.state = s.state AND l.method = s.method AND ' || is_wanted || '
                    AND (s.is_dead IS NULL OR s.is_dead = (l.committed AND l.lease_until <= clock_timestamp()))
                ORDER BY l.started_at DESC, l.caller DESC, l.key DESC LIMIT $11
            ) AS l ' || newest || '
        ) AS l, wirecall.seen(l.found) AS seen'
        USING stored, dead, of_method, of_caller, since, until, last_at, last_caller, last_method, last_key, most;
END $$;

-- name: index 7 ledger_newest
CREATE INDEX ledger_newest ON wirecall.ledger (state, method, started_at, caller)

-- name: index 7 tasks_newest
CREATE INDEX tasks_newest ON wirecall.tasks (started_at)

-- name: schema 8
-- Messages to all processes of a channel. The store does not read them.
CREATE TABLE IF NOT EXISTS wirecall.marks (
    channel    text        COLLATE "C" NOT NULL,
    name       text        COLLATE "C" NOT NULL,
    content    bytea       NOT NULL,
    made_at    timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (channel, name)
);

CREATE INDEX IF NOT EXISTS marks_made_at ON wirecall.marks (channel, made_at);
CREATE INDEX IF NOT EXISTS marks_expires_at ON wirecall.marks (expires_at);

-- name: schema 9
-- From here on, what a command changes in its record is in no index: its state and the time of its sweep are in none (only the
-- likeness of a call without a key is). So its commit point and its outcome write to the table alone (HOT). Only the primary
-- key has a part of the id as it is: a plan that was made while the table was small would look records up in another one.
--
-- The sweep looks at a record when it is `due`. If that is too early, it writes there when to look again.
--
-- Records that run, wait or are unknown are few. Those that began before the front of their method are named in `open`, and it
-- may name others: the sweep moves the fronts, and forgets them. The others are behind the front in the order of time.
--
-- While another process builds the indexes, the table must not be altered a second time.
DO $$ BEGIN
    IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'wirecall.ledger'::regclass AND attname = 'due') THEN
        RETURN;
    END IF;
    -- Most records that there are will be due in a day. The table is not written for that.
    EXECUTE format('ALTER TABLE wirecall.ledger ADD COLUMN due timestamptz DEFAULT %L', clock_timestamp() + interval '1 day');
    -- `buried`: it is a tombstone; of one that the version before has buried, the sweep notes it later. What that version writes
    -- in a transaction is looked at by the next sweep.
    ALTER TABLE wirecall.ledger ADD COLUMN buried boolean NOT NULL DEFAULT false, ALTER COLUMN due SET DEFAULT '-infinity';
    -- Partitions have it from their beginning.
    IF EXISTS (SELECT FROM pg_class WHERE oid = 'wirecall.ledger'::regclass AND relkind = 'r') THEN
        ALTER TABLE wirecall.ledger SET (fillfactor = 60);
    END IF;
END $$;

CREATE TABLE IF NOT EXISTS wirecall.open (
    caller text COLLATE "C" NOT NULL, method text COLLATE "C" NOT NULL, key text COLLATE "C" NOT NULL,
    PRIMARY KEY (caller, method, key)
);

CREATE TABLE IF NOT EXISTS wirecall.fronts (method text COLLATE "C" PRIMARY KEY, reached timestamptz NOT NULL);

INSERT INTO wirecall.open SELECT caller, method, key FROM wirecall.ledger WHERE state IN ('running', 'unknown', 'waiting')
ON CONFLICT DO NOTHING;

-- A record that is being written at this moment is not seen here; it began later than that.
INSERT INTO wirecall.fronts
WITH RECURSIVE steps (method) AS (
    (SELECT method FROM wirecall.ledger ORDER BY method LIMIT 1)
    UNION ALL
    SELECT (SELECT o.method FROM wirecall.ledger AS o WHERE o.method > s.method ORDER BY o.method LIMIT 1)
    FROM steps AS s WHERE s.method IS NOT NULL
)
SELECT method, clock_timestamp() - interval '10 minutes' FROM steps WHERE method IS NOT NULL
ON CONFLICT DO NOTHING;

CREATE OR REPLACE FUNCTION wirecall.claim(claims json, max_attempts integer, unknown_kept interval, burial integer)
RETURNS SETOF wirecall.record LANGUAGE plpgsql
SET lock_timeout = '2s' SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    wishes wirecall.wish[] := ARRAY(
        SELECT ROW(
            id->>'caller', id->>'method', id->>'key', decode(fingerprint, 'base64'), decode(nonce, 'base64'),
            wirecall.seconds(lease), wirecall.seconds(retention), on_crash, committed, continues, decode(params, 'base64')
        )::wirecall.wish
        FROM json_to_recordset(claims) AS j (
            id json, fingerprint text, nonce text, lease float8, retention float8, on_crash text, committed boolean,
            continues boolean, params text
        )
    );
    inserted integer;
    pair record;
    c wirecall.wish;
    l wirecall.ledger;
    settled boolean;
BEGIN
    RETURN QUERY WITH fresh AS (
        INSERT INTO wirecall.ledger (
            caller, method, key, fingerprint, state, fence, nonce, committed, attempts, started_at, lease_until, retention,
            expires_at, params, may_rerun, due
        )
        SELECT caller, method, key, fingerprint, 'running', nextval('wirecall.fence'), nonce, committed, 1, clock_timestamp(),
            clock_timestamp() + lease, retention,
            clock_timestamp() + lease + wirecall.sweeps_after(committed, on_crash <> 'unknown', retention),
            params, nullif(on_crash <> 'unknown', false), clock_timestamp() + retention
        FROM unnest(wishes) AS w
        WHERE NOT EXISTS (
            SELECT FROM wirecall.ledger AS o WHERE o.caller = w.caller AND o.method = w.method AND o.key = w.key OFFSET 0
        )
        ON CONFLICT DO NOTHING RETURNING *
    )
    SELECT caller, method, key, fingerprint, state, fence, nonce, committed, attempts,
        greatest(0, extract(epoch FROM lease_until - clock_timestamp()))::float8, extract(epoch FROM started_at)::float8,
        NULL::float8, kind, payload, digest, delivery, deliverer, params
    FROM fresh;
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
                INSERT INTO wirecall.ledger (
                    caller, method, key, fingerprint, state, fence, nonce, committed, attempts, started_at, lease_until,
                    retention, expires_at, params, may_rerun, due
                ) VALUES (
                    c.caller, c.method, c.key, c.fingerprint, 'running', nextval('wirecall.fence'), c.nonce, c.committed, 1,
                    clock_timestamp(), clock_timestamp() + c.lease, c.retention,
                    clock_timestamp() + c.lease + wirecall.sweeps_after(c.committed, c.on_crash <> 'unknown', c.retention),
                    c.params, nullif(c.on_crash <> 'unknown', false), clock_timestamp() + c.retention
                ) ON CONFLICT DO NOTHING RETURNING * INTO l;
                settled := FOUND;
            ELSIF l.fingerprint <> c.fingerprint THEN
                settled := true;
            ELSIF l.nonce = c.nonce AND l.state IN ('running', 'unknown') THEN
                UPDATE wirecall.ledger
                SET state = 'running', lease_until = clock_timestamp() + c.lease,
                    expires_at = clock_timestamp() + c.lease + wirecall.sweeps_after(committed, may_rerun, c.retention)
                WHERE caller = c.caller AND method = c.method AND key = c.key
                    AND state = l.state AND fence = l.fence AND nonce = l.nonce
                RETURNING * INTO l;
                settled := FOUND;
            ELSIF l.state = 'done' AND l.expires_at <= clock_timestamp() THEN
                UPDATE wirecall.ledger
                SET state = 'tombstone', buried = true, payload = NULL, likeness = NULL, params = NULL,
                    expires_at = clock_timestamp() + burial * retention, due = clock_timestamp() + burial * retention
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
                    may_rerun = nullif(c.on_crash <> 'unknown', false), lease_until = clock_timestamp() + c.lease,
                    expires_at = clock_timestamp() + c.lease
                        + wirecall.sweeps_after(c.committed OR committed, c.on_crash <> 'unknown', c.retention),
                    kind = NULL, payload = NULL, digest = NULL
                WHERE caller = c.caller AND method = c.method AND key = c.key
                    AND state = l.state AND fence = l.fence AND nonce = l.nonce AND lease_until = l.lease_until
                RETURNING * INTO l;
                settled := FOUND;
            ELSIF l.state = 'running' AND l.lease_until <= clock_timestamp() THEN
                UPDATE wirecall.ledger
                SET state = 'unknown', expires_at = clock_timestamp() + unknown_kept, taken_at = greatest(taken_at, lease_until)
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

CREATE OR REPLACE FUNCTION wirecall.insert_keyless(calls wirecall.keyless[]) RETURNS SETOF wirecall.ledger LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(encode(likeness, 'hex'), 0)) FROM unnest(calls) WHERE likeness IS NOT NULL;
    RETURN QUERY INSERT INTO wirecall.ledger (
        caller, method, key, fingerprint, state, fence, nonce, committed, attempts, started_at, lease_until, retention,
        expires_at, delivery, deliverer, likeness, params, may_rerun, due
    )
    SELECT caller, method, key, fingerprint, 'running', nextval('wirecall.fence'), nonce, committed, 1, clock_timestamp(),
        clock_timestamp() + lease, retention,
        clock_timestamp() + lease + wirecall.sweeps_after(committed, on_crash <> 'unknown', retention),
        'pending', nonce, likeness, params, nullif(on_crash <> 'unknown', false), clock_timestamp() + retention
    FROM unnest(calls) AS c
    WHERE CASE WHEN is_new THEN true ELSE
        (is_new IS NULL OR NOT EXISTS (
            SELECT FROM unnest(calls) AS e WHERE e.likeness = c.likeness AND e.nth < c.nth AND e.key <> ALL (c.beside)
        )) AND NOT EXISTS (
            SELECT FROM wirecall.ledger AS l WHERE l.likeness = c.likeness AND wirecall.recognise(l, c) <> 'pass' OFFSET 0
        )
    END
    ON CONFLICT DO NOTHING RETURNING *;
END $$;

CREATE OR REPLACE FUNCTION wirecall.complete(completions json, again boolean)
RETURNS TABLE (caller text, method text, key text) LANGUAGE plpgsql
SET lock_timeout = '2s' SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_indexscan = off
SET enable_indexonlyscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY UPDATE wirecall.ledger AS l
    SET state = 'done', lease_until = clock_timestamp(), retention = wirecall.seconds(c.retention),
        expires_at = clock_timestamp() + wirecall.seconds(c.retention), completed_at = clock_timestamp(),
        due = least(l.due, clock_timestamp() + wirecall.seconds(c.retention)),
        kind = outcome->>'kind', payload = decode(outcome->>'payload', 'base64'), digest = decode(outcome->>'digest', 'base64')
    FROM json_to_recordset(completions) AS c (id json, fence bigint, nonce text, outcome json, retention float8)
    WHERE l.caller = id->>'caller' AND l.method = id->>'method' AND l.key = id->>'key'
        AND l.fence = c.fence AND l.nonce = decode(c.nonce, 'base64')
        AND l.state IN ('running', 'unknown')
    RETURNING l.caller, l.method, l.key;

    IF again THEN
        RETURN QUERY SELECT l.caller, l.method, l.key
        FROM wirecall.ledger AS l, json_to_recordset(completions) AS c (id json, fence bigint, nonce text, outcome json)
        WHERE l.caller = id->>'caller' AND l.method = id->>'method' AND l.key = id->>'key'
            AND l.fence = c.fence AND l.nonce = decode(c.nonce, 'base64')
            AND l.state = 'done' AND l.digest = decode(outcome->>'digest', 'base64');
    END IF;
END $$;

-- Mark a list of RUNNING records as committed and renew their leases; gives the ids of those whose leases were not over.
CREATE OR REPLACE FUNCTION wirecall.commit_points(points json)
RETURNS TABLE (caller text, method text, key text) LANGUAGE plpgsql
SET lock_timeout = '2s' SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_indexscan = off
SET enable_indexonlyscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY UPDATE wirecall.ledger AS l
    SET committed = true, lease_until = clock_timestamp() + wirecall.seconds(c.lease),
        expires_at = clock_timestamp() + wirecall.seconds(c.lease) + wirecall.sweeps_after(true, l.may_rerun, l.retention)
    FROM json_to_recordset(points) AS c (id json, fence bigint, nonce text, lease float8)
    WHERE l.caller = id->>'caller' AND l.method = id->>'method' AND l.key = id->>'key'
        AND l.fence = c.fence AND l.nonce = decode(c.nonce, 'base64')
        AND l.state = 'running' AND l.lease_until > clock_timestamp()
    RETURNING l.caller, l.method, l.key;
END $$;

-- Move the fronts of the methods: note which records are open still, a minute after their beginning. Gives how many records it
-- has looked at, at least `most` if there may be more. One process does that at a time.
CREATE OR REPLACE FUNCTION wirecall.advance(most integer) RETURNS integer LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    looked integer := 0;
    number integer;
    name text;
    last_at timestamptz;
    until timestamptz := clock_timestamp() - make_interval(secs => {unknown_after});
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('wirecall front', 0)) THEN
        RETURN 0;
    END IF;
    name := (SELECT l.method || '' FROM wirecall.ledger AS l ORDER BY l.method || '' LIMIT 1);
    WHILE name IS NOT NULL AND looked < most LOOP
        WITH page AS (
            SELECT l.caller, l.method, l.key, l.state, l.started_at FROM wirecall.ledger AS l
            WHERE l.method || '' = name AND l.started_at <= until
                AND l.started_at > coalesce((SELECT f.reached FROM wirecall.fronts AS f WHERE f.method = name), '-infinity')
            ORDER BY l.started_at FETCH FIRST (most - looked) ROWS WITH TIES
        ), noted AS (
            INSERT INTO wirecall.open SELECT p.caller, p.method, p.key FROM page AS p
            WHERE p.state IN ('running', 'unknown', 'waiting') ON CONFLICT DO NOTHING
        )
        SELECT count(*), max(p.started_at) INTO number, last_at FROM page AS p;
        IF number > 0 THEN
            INSERT INTO wirecall.fronts VALUES (name, last_at) ON CONFLICT (method) DO UPDATE SET reached = excluded.reached;
        END IF;
        looked := looked + number;
        name := (SELECT l.method || '' FROM wirecall.ledger AS l WHERE l.method || '' > name ORDER BY l.method || '' LIMIT 1);
    END LOOP;
    IF looked < most THEN
        DELETE FROM wirecall.open AS o WHERE NOT EXISTS (
            SELECT FROM wirecall.ledger AS l WHERE l.caller = o.caller AND l.method = o.method AND l.key = o.key
                AND l.state IN ('running', 'unknown', 'waiting') OFFSET 0
        );
    END IF;
    RETURN looked;
END $$;

-- All records that run, wait or are unknown.
CREATE OR REPLACE FUNCTION wirecall.all_open() RETURNS SETOF wirecall.ledger LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
BEGIN
    RETURN QUERY
    SELECT (l.found).* FROM wirecall.open AS o, LATERAL (
        SELECT l AS found FROM wirecall.ledger AS l
        WHERE l.caller = o.caller AND l.method = o.method AND l.key = o.key LIMIT 1
    ) AS l
    WHERE (l.found).state IN ('running', 'unknown', 'waiting')
        AND (l.found).started_at <= (SELECT f.reached FROM wirecall.fronts AS f WHERE f.method = o.method);

    RETURN QUERY
    WITH RECURSIVE steps (method) AS (
        (SELECT o.method || '' FROM wirecall.ledger AS o ORDER BY o.method || '' LIMIT 1)
        UNION ALL
        SELECT (SELECT o.method || '' FROM wirecall.ledger AS o WHERE o.method || '' > s.method ORDER BY o.method || '' LIMIT 1)
        FROM steps AS s WHERE s.method IS NOT NULL
    )
    SELECT (l.found).* FROM steps AS s, LATERAL (
        SELECT l AS found FROM wirecall.ledger AS l
        WHERE l.method || '' = s.method AND l.state IN ('running', 'unknown', 'waiting')
            AND l.started_at > coalesce((SELECT f.reached FROM wirecall.fronts AS f WHERE f.method = s.method), '-infinity')
        OFFSET 0
    ) AS l;
END $$;

-- Record that the outcomes of committed runs are unknown whose holders are dead; gives how many.
CREATE OR REPLACE FUNCTION wirecall.lose(most integer, unknown_kept interval) RETURNS integer LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    changed integer;
BEGIN
    UPDATE wirecall.ledger AS l
    SET state = 'unknown', lease_until = clock_timestamp(), taken_at = greatest(l.taken_at, l.lease_until),
        expires_at = clock_timestamp() + unknown_kept, due = clock_timestamp() + unknown_kept
    FROM (
        SELECT o.caller, o.method, o.key FROM wirecall.all_open() AS o
        WHERE o.state = 'running' AND o.committed AND o.expires_at <= clock_timestamp()
        ORDER BY o.caller, o.method, o.key LIMIT most
    ) AS o
    WHERE l.caller = o.caller AND l.method = o.method AND l.key = o.key
        AND l.state = 'running' AND l.committed AND l.expires_at <= clock_timestamp();
    GET DIAGNOSTICS changed = ROW_COUNT;
    RETURN changed;
END $$;

-- A page of records for operators, the newest first. `stored` are states, and `dead` says of each whether its runs must be
-- committed and without a lease (NULL: that does not matter). A caller with few records is found by the primary key; open
-- records are few; for others, methods are few: the index finds one after another, and the newest records of each.
CREATE OR REPLACE FUNCTION wirecall.page(
    stored text[], dead boolean[], of_method text, of_caller text, since timestamptz, until timestamptz, last_at timestamptz,
    last_caller text, last_method text, last_key text, most integer
) RETURNS SETOF wirecall.record LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    number integer;
    is_wanted text := 'l.started_at >= $5 AND l.started_at < $6 AND l.started_at <= $7
        AND (l.started_at, l.caller, l.method, l.key) < ($7, $8, $9, $10) AND l.state = ANY ($1)';
    newest text := 'ORDER BY l.started_at DESC, l.caller DESC, l.method DESC, l.key DESC LIMIT $11';
    is_so_dead text := ' AND EXISTS (
            SELECT FROM unnest($1, $2) AS s (state, is_dead) WHERE s.state = l.state
                AND (s.is_dead IS NULL OR s.is_dead = (l.committed AND l.lease_until <= clock_timestamp()))
        ) ';
    place text;
BEGIN
    IF of_caller IS NOT NULL THEN
        SELECT count(*) INTO number FROM (SELECT FROM wirecall.ledger AS l WHERE l.caller = of_caller LIMIT 2001) AS l;
    END IF;
    IF number <= 2000 THEN
        place := 'wirecall.ledger AS l WHERE l.caller = $4 AND ($3 IS NULL OR l.method = $3) AND ';
    ELSIF stored <@ ARRAY['running', 'unknown', 'waiting'] THEN
        place := 'wirecall.all_open() AS l WHERE ($4 IS NULL OR l.caller = $4) AND ($3 IS NULL OR l.method = $3) AND ';
    END IF;
    IF place IS NOT NULL THEN
        RETURN QUERY EXECUTE 'SELECT seen.* FROM (SELECT l AS found FROM ' || place || is_wanted || is_so_dead || newest
            || ') AS l, wirecall.seen(l.found) AS seen'
            USING stored, dead, of_method, of_caller, since, until, last_at, last_caller, last_method, last_key, most;
        RETURN;
    END IF;
    IF of_caller IS NOT NULL THEN
        is_wanted := 'l.caller || '''' = $4 AND ' || is_wanted;
    END IF;
    -- Here none of the states asks whether a run is dead.
    RETURN QUERY EXECUTE
        'WITH RECURSIVE steps (method) AS (
            SELECT coalesce($3, (SELECT o.method || '''' FROM wirecall.ledger AS o ORDER BY o.method || '''' LIMIT 1)) COLLATE "C"
            UNION ALL
            SELECT (
                SELECT o.method || '''' FROM wirecall.ledger AS o WHERE o.method || '''' > s.method ORDER BY o.method || '''' LIMIT 1
            )
            FROM steps AS s WHERE $3 IS NULL AND s.method IS NOT NULL
        )
        SELECT seen.* FROM (
            SELECT l.found FROM steps AS s, LATERAL (
                SELECT l.started_at, l.caller, l.method, l.key, l AS found FROM wirecall.ledger AS l
                WHERE l.method || '''' = s.method AND ' || is_wanted || '
                ORDER BY l.started_at DESC, l.caller DESC, l.key DESC LIMIT $11
            ) AS l ' || newest || '
        ) AS l, wirecall.seen(l.found) AS seen'
        USING stored, dead, of_method, of_caller, since, until, last_at, last_caller, last_method, last_key, most;
END $$;

-- name: index 9 ledger_begun
CREATE INDEX ledger_begun ON wirecall.ledger ((method || ''), started_at, (caller || ''))

-- name: index 9 ledger_due
CREATE INDEX ledger_due ON wirecall.ledger (due)

-- name: index 9 ledger_buried
CREATE INDEX ledger_buried ON wirecall.ledger (due) WHERE buried

-- name: unused 9 ledger_newest
DROP INDEX IF EXISTS wirecall.ledger_newest

-- name: unused 9 ledger_expires_at
DROP INDEX IF EXISTS wirecall.ledger_expires_at

-- name: opened
SELECT current_setting('synchronous_commit'), current_setting('fsync'), to_regclass('wirecall.version') IS NOT NULL

-- name: risks
SELECT current_setting('synchronous_commit'), current_setting('fsync'), current_setting('synchronous_standby_names'),
    (SELECT count(*) FROM pg_stat_replication WHERE application_name NOT LIKE 'pg_%%')

-- name: version
SELECT coalesce(greatest(max(number), -min(number)), 0), coalesce(max(number), 0) FROM wirecall.version

-- name: is valid
-- Whether an index can be used; no row if there is none. The second: a session builds it now.
SELECT i.indisvalid, EXISTS (SELECT FROM pg_stat_progress_create_index AS p WHERE p.index_relid = i.indexrelid)
FROM pg_index AS i WHERE i.indexrelid = to_regclass(%(name)s)

-- name: lock schema
SELECT pg_advisory_xact_lock(hashtextextended('wirecall schema', 0))

-- name: no timeouts
-- An operator sets them for commands. PostgreSQL 17 and later have the last one.
SELECT set_config(name, '0', %(is_local)s) FROM pg_settings
WHERE name IN ('statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')

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

-- name: partition
-- One of the parts of a new table.
CREATE TABLE wirecall.ledger_%(nth)s PARTITION OF wirecall.ledger
FOR VALUES WITH (MODULUS %(of)s, REMAINDER %(nth)s) WITH (fillfactor = 60)

-- name: partitions
SELECT count(*) FROM pg_inherits WHERE inhparent = to_regclass('wirecall.ledger')

-- name: migrated
INSERT INTO wirecall.version (number) VALUES (%(number)s) ON CONFLICT DO NOTHING

-- name: claim
SELECT * FROM wirecall.claim(%(items)s::json, {max_attempts}, make_interval(secs => {forever}), {burial})

-- name: claim keyless
SELECT caller, method, key, (entry).*
FROM wirecall.claim_keyless(%(items)s::json, {max_attempts}, make_interval(secs => {forever}), {burial})

-- name: deliver
SELECT wirecall.deliver(%(items)s::json)

-- name: complete
SELECT * FROM wirecall.complete(%(items)s::json, %(again)s)

-- name: begin_task
-- The record is locked, so that its holder does not change. A task that exists already is written as it is, because
-- a row that is not written is not returned.
INSERT INTO wirecall.tasks (id, caller, method, key, started_at, version, document, is_ready, is_over, expires_at)
SELECT %(id)s, caller, method, key, started_at, 1, %(document)s, false, false,
    clock_timestamp() + wirecall.seconds(%(ttl)s)
FROM wirecall.ledger
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND fence = %(fence)s AND nonce = %(nonce)s
    AND state = 'running'
FOR UPDATE
ON CONFLICT (id) DO UPDATE SET version = tasks.version
WHERE (tasks.caller, tasks.method, tasks.key, tasks.started_at)
    = (excluded.caller, excluded.method, excluded.key, excluded.started_at)
RETURNING true

-- name: task
SELECT t.id, t.caller, t.method, t.key, t.version, t.document, t.is_ready, t.is_over,
    extract(epoch FROM t.expires_at - clock_timestamp())::float8, now.*
FROM wirecall.tasks AS t LEFT JOIN LATERAL (
    SELECT seen.* FROM wirecall.ledger AS l, wirecall.seen(l) AS seen
    WHERE l.caller = t.caller AND l.method = t.method AND l.key = t.key AND l.started_at = t.started_at LIMIT 1
) AS now ON true
WHERE t.id = %(id)s AND t.expires_at > clock_timestamp()

-- name: task_of
SELECT t.id, t.caller, t.method, t.key, t.version, t.document, t.is_ready, t.is_over,
    extract(epoch FROM t.expires_at - clock_timestamp())::float8, seen.*
FROM wirecall.ledger AS l, wirecall.seen(l) AS seen, LATERAL (
    SELECT * FROM wirecall.tasks AS t
    WHERE t.caller = l.caller AND t.method = l.method AND t.key = l.key AND t.started_at = l.started_at
    ORDER BY t.nth DESC LIMIT 1
) AS t
WHERE l.caller = %(caller)s AND l.method = %(method)s AND l.key = %(key)s AND t.expires_at > clock_timestamp()

-- name: change_task
UPDATE wirecall.tasks
SET version = version + 1, document = %(document)s, is_ready = %(is_ready)s, is_over = %(is_over)s
WHERE id = %(id)s AND version = %(version)s AND expires_at > clock_timestamp()
RETURNING true

-- name: orphans
SELECT t.id FROM wirecall.tasks AS t
WHERE NOT t.is_over AND t.expires_at > clock_timestamp() AND EXISTS (
    SELECT FROM wirecall.ledger AS l
    WHERE l.caller = t.caller AND l.method = t.method AND l.key = t.key AND l.started_at = t.started_at
        AND CASE l.state WHEN 'running' THEN l.lease_until <= clock_timestamp() WHEN 'waiting' THEN t.is_ready END
    OFFSET 0
)
ORDER BY t.nth LIMIT %(limit)s

-- name: heartbeat
UPDATE wirecall.ledger
SET lease_until = clock_timestamp() + wirecall.seconds(%(lease)s),
    expires_at = clock_timestamp() + wirecall.seconds(%(lease)s) + wirecall.sweeps_after(committed, may_rerun, retention)
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND fence = %(fence)s AND nonce = %(nonce)s
    AND state = 'running'
RETURNING true

-- name: commit_point
SELECT * FROM wirecall.commit_points(%(items)s::json)

-- name: suspend
UPDATE wirecall.ledger
SET state = 'waiting', attempts = 0, committed = false,
    lease_until = clock_timestamp(), expires_at = clock_timestamp() + wirecall.seconds(%(retention)s),
    kind = %(kind)s, payload = %(payload)s, digest = %(digest)s,
    due = least(due, clock_timestamp() + wirecall.seconds(%(retention)s))
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
SET state = 'unknown', lease_until = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => {forever}),
    taken_at = clock_timestamp()
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND fence = %(fence)s AND nonce = %(nonce)s
    AND state = 'running'
RETURNING true

-- name: lapse
UPDATE wirecall.ledger
SET lease_until = clock_timestamp(),
    expires_at = clock_timestamp() + wirecall.sweeps_after(committed, may_rerun, retention)
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND fence = %(fence)s AND nonce = %(nonce)s
    AND state = 'running'
RETURNING true

-- name: resolve done
UPDATE wirecall.ledger AS l
SET state = 'done', lease_until = clock_timestamp(), retention = wirecall.seconds(%(retention)s),
    expires_at = clock_timestamp() + wirecall.seconds(%(retention)s), completed_at = clock_timestamp(),
    kind = %(kind)s, payload = %(payload)s, digest = %(digest)s,
    due = least(due, clock_timestamp() + wirecall.seconds(%(retention)s))
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND wirecall.standing(l) = 'unknown'
    AND (%(seen)s::bigint IS NULL OR fence = %(seen)s::bigint)
RETURNING true

-- name: resolve not done
DELETE FROM wirecall.ledger AS l
WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND wirecall.standing(l) = 'unknown'
    AND (%(seen)s::bigint IS NULL OR fence = %(seen)s::bigint)
RETURNING true

-- name: get
SELECT seen.* FROM json_to_recordset(%(items)s::json) AS w (caller text, method text, key text), LATERAL (
    SELECT o AS found FROM wirecall.ledger AS o WHERE o.caller = w.caller AND o.method = w.method AND o.key = w.key LIMIT 1
) AS l, wirecall.seen(l.found) AS seen

-- name: list
SELECT * FROM wirecall.page(
    %(stored)s::text[], %(dead)s::boolean[], %(of_method)s, %(of_caller)s, coalesce(to_timestamp(%(since)s), '-infinity'),
    coalesce(to_timestamp(%(until)s), 'infinity'), coalesce(to_timestamp(%(at)s), 'infinity'), %(caller)s, %(method)s, %(key)s,
    %(limit)s
)

-- name: list tasks
-- The newest tasks, the last one of each record.
SELECT t.id, t.caller, t.method, t.key, t.version, t.document, t.is_ready, t.is_over,
    extract(epoch FROM t.expires_at - clock_timestamp())::float8, seen.*
FROM (SELECT t.* FROM wirecall.tasks AS t ORDER BY t.started_at DESC, t.caller DESC, t.method DESC, t.key DESC) AS t, LATERAL (
    SELECT l AS found FROM wirecall.ledger AS l
    WHERE l.caller = t.caller AND l.method = t.method AND l.key = t.key AND l.started_at = t.started_at LIMIT 1
) AS l, wirecall.seen(l.found) AS seen
WHERE t.started_at >= coalesce(to_timestamp(%(since)s), '-infinity') AND t.started_at < coalesce(to_timestamp(%(until)s), 'infinity')
    AND t.started_at <= coalesce(to_timestamp(%(at)s), 'infinity')
    AND (t.started_at, t.caller, t.method, t.key)
        < (coalesce(to_timestamp(%(at)s), 'infinity'), %(caller)s, %(method)s, %(key)s)
    AND (%(of_method)s::text IS NULL OR t.method = %(of_method)s) AND (%(of_caller)s::text IS NULL OR t.caller = %(of_caller)s)
    AND t.expires_at > clock_timestamp()
    AND NOT EXISTS (
        SELECT FROM wirecall.tasks AS o
        WHERE o.caller = t.caller AND o.method = t.method AND o.key = t.key AND o.started_at = t.started_at AND o.nth > t.nth
    )
    AND (%(state)s::text IS NULL OR wirecall.standing(l.found) = %(state)s)
ORDER BY t.started_at DESC, t.caller DESC, t.method DESC, t.key DESC -- a join need not keep the order of its parts
LIMIT %(limit)s

-- name: counts
SELECT state, count(*) FROM wirecall.all_open() GROUP BY state
UNION ALL SELECT 'dead', count(*) FROM wirecall.all_open()
    WHERE state = 'running' AND committed AND lease_until <= clock_timestamp()
UNION ALL SELECT 'tombstone', count(*) FROM wirecall.ledger WHERE buried
UNION ALL SELECT 'all', count(*) FROM wirecall.ledger

-- name: advance
-- A front that is too late shows that the clock was set back. Records begin before it again: it goes back too, further than
-- two sweeps are apart.
UPDATE wirecall.fronts SET reached = clock_timestamp() - interval '10 minutes'
WHERE reached > clock_timestamp() - make_interval(secs => {unknown_after});
SELECT wirecall.advance(%(most)s)

-- name: lose
SELECT wirecall.lose(%(limit)s, make_interval(secs => {forever}))

-- name: sweep
-- The clock is read in a subquery: as a volatile function in the condition itself it would keep the index out. A list with a
-- limit is a separate query: inside another one it may be evaluated again for each row, and then it has no limit.
WITH due AS (
    SELECT caller, method, key, CASE WHEN state = 'running' AND NOT committed THEN 'released' ELSE state END AS state,
        expires_at <= clock_timestamp() AS is_over
    FROM wirecall.ledger AS l WHERE due <= (SELECT clock_timestamp())
    ORDER BY due LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), later AS (
    UPDATE wirecall.ledger AS l SET due = l.expires_at, buried = l.state = 'tombstone' FROM due
    WHERE (l.caller, l.method, l.key) = (due.caller, due.method, due.key) AND NOT due.is_over
    RETURNING 1
), gone AS (
    DELETE FROM wirecall.ledger AS l USING due
    WHERE (l.caller, l.method, l.key) = (due.caller, due.method, due.key) AND due.is_over
        AND due.state IN ('tombstone', 'waiting', 'released')
    RETURNING 1
), buried AS (
    UPDATE wirecall.ledger AS l
    SET state = 'tombstone', buried = true, payload = NULL, likeness = NULL, params = NULL, expires_at = clock_timestamp() + {burial} * l.retention,
        due = clock_timestamp() + {burial} * l.retention
    FROM due
    WHERE (l.caller, l.method, l.key) = (due.caller, due.method, due.key) AND due.is_over AND due.state = 'done'
    RETURNING 1
), lost AS (
    UPDATE wirecall.ledger AS l
    SET state = 'unknown', lease_until = clock_timestamp(), taken_at = greatest(l.taken_at, l.lease_until),
        expires_at = clock_timestamp() + make_interval(secs => {forever}), due = clock_timestamp() + make_interval(secs => {forever})
    FROM due
    WHERE (l.caller, l.method, l.key) = (due.caller, due.method, due.key) AND due.is_over AND due.state = 'running'
    RETURNING 1
), noted AS (
    -- Nearly all are there. A record whose commit took long may have become visible behind the front.
    INSERT INTO wirecall.open SELECT caller, method, key FROM due
    WHERE state IN ('running', 'unknown') OR (state IN ('released', 'waiting') AND NOT is_over)
    ON CONFLICT DO NOTHING
), over AS (
    SELECT id FROM wirecall.tasks WHERE expires_at <= (SELECT clock_timestamp())
    ORDER BY expires_at LIMIT %(limit)s - (SELECT count(*) FROM due) FOR UPDATE SKIP LOCKED
), forgotten AS (
    DELETE FROM wirecall.tasks AS t USING over WHERE t.id = over.id RETURNING 1
)
SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM buried) + (SELECT count(*) FROM lost)
    + (SELECT count(*) FROM forgotten), (SELECT count(*) FROM later)

-- name: mark
-- Each mark removes some that have expired.
WITH over AS (
    SELECT channel, name FROM wirecall.marks
    WHERE expires_at <= (SELECT clock_timestamp()) AND (channel, name) <> (%(channel)s, %(name)s)
    ORDER BY expires_at LIMIT 10 FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM wirecall.marks AS m USING over WHERE (m.channel, m.name) = (over.channel, over.name)
)
INSERT INTO wirecall.marks VALUES (
    %(channel)s, %(name)s, %(content)s, clock_timestamp(), clock_timestamp() + wirecall.seconds(%(ttl)s)
)
ON CONFLICT (channel, name) DO UPDATE
SET content = excluded.content, made_at = excluded.made_at, expires_at = excluded.expires_at

-- name: marked
SELECT content FROM wirecall.marks WHERE channel = %(channel)s AND name = %(name)s AND expires_at > clock_timestamp()

-- name: marks
SELECT name, content FROM wirecall.marks
WHERE channel = %(channel)s AND made_at > (SELECT clock_timestamp()) - wirecall.seconds(%(within)s)
    AND expires_at > clock_timestamp()
ORDER BY made_at

-- name: identify
-- A mark that does not expire, unless there is one.
INSERT INTO wirecall.marks VALUES (%(channel)s, %(name)s, %(content)s, clock_timestamp(), 'infinity')
ON CONFLICT (channel, name) DO NOTHING

-- name: see
-- The identity, the highest fence, and which server answers.
SELECT (SELECT content FROM wirecall.marks WHERE channel = %(channel)s AND name = %(name)s),
    coalesce(pg_sequence_last_value('wirecall.fence'), 0), {history}

-- name: history
SELECT {history}

-- name: send
SELECT pg_notify(%(channel)s, %(message)s)

-- name: ping
-- Both statements are one transaction, so the row is seen nowhere; but it takes its room, and its commit goes to the disk.
INSERT INTO wirecall.ledger VALUES (
    '', 'wirecall.ping', %(key)s, '', 'running', 0, '', false, 1, clock_timestamp(), clock_timestamp(), '0', clock_timestamp()
);
DELETE FROM wirecall.ledger WHERE caller = '' AND method = 'wirecall.ping' AND key = %(key)s

-- name: begin
-- First the timeouts: for another transaction with the same record, for a handler that is silent, and for a host that has
-- vanished without a word, also in the middle of one of the handler's own statements.
BEGIN;
SELECT set_config('lock_timeout', %(turn)s, true), set_config('idle_in_transaction_session_timeout', %(silence)s, true),
    set_config('tcp_keepalives_idle', '10', true), set_config('tcp_keepalives_interval', '3', true),
    set_config('tcp_keepalives_count', '3', true), set_config('tcp_user_timeout', '20s', true);

-- name: enter
INSERT INTO wirecall.ledger (
    caller, method, key, fingerprint, state, fence, nonce, committed, attempts, started_at, lease_until, retention, expires_at,
    params, due
) VALUES (
    %(caller)s, %(method)s, %(key)s, %(fingerprint)s, 'running', nextval('wirecall.fence'), %(nonce)s, %(committed)s, 1,
    clock_timestamp(), clock_timestamp() + wirecall.seconds(%(lease)s), wirecall.seconds(%(retention)s),
    clock_timestamp() + wirecall.seconds(%(lease)s) + wirecall.seconds(%(retention)s), %(params)s,
    clock_timestamp() + wirecall.seconds(%(retention)s)
) ON CONFLICT DO NOTHING
RETURNING fence, extract(epoch FROM started_at)::float8, pg_current_xact_id()::text, pg_backend_pid(),
    set_config('lock_timeout', '3s', true); -- from here on, for the statements of the handler, which may set another
SAVEPOINT wirecall

-- name: enter keyless
SELECT pg_current_xact_id()::text, pg_backend_pid(), set_config('lock_timeout', '3s', true), is_new, expired, (entry).*
FROM wirecall.enter_keyless(%(items)s::json);
SAVEPOINT wirecall

-- name: stay
-- The record runs under a lease of this claim: the transaction stays open. Nothing is written and nothing locked as yet, so
-- it asks for its number.
SELECT pg_current_xact_id()::text, pg_backend_pid(), set_config('lock_timeout', '3s', true)

-- name: found
SELECT l.expires_at <= clock_timestamp(), seen.* FROM wirecall.ledger AS l, wirecall.seen(l) AS seen
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
-- The fate of a transaction whose commit was not confirmed: its status, and whether a record with its nonce is done. That
-- proves the commit. The status alone does not: after a crash or a failover its number may be given to another transaction.
-- A number that was not given out at all has not committed here. A session that still holds the transaction is ended: it
-- waits for a client that is gone.
SELECT CASE WHEN t.xid < pg_current_xact_id() THEN pg_xact_status(t.xid) ELSE 'aborted' END,
    EXISTS (
        SELECT FROM wirecall.ledger
        WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s AND nonce = %(nonce)s
            AND state IN ('done', 'tombstone')
    ),
    (SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid = %(pid)s AND backend_xid = t.xid::xid)
FROM (SELECT %(xid)s::xid8 AS xid) AS t
