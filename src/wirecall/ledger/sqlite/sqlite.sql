-- The SQL of the SQLite ledger. `file.py` takes every statement by the name above it, up to the next name.
--
-- The file may be the user's own, so all names begin with wirecall_, and nothing needs an SQLite newer than 3.9 to be
-- read: no STRICT. RETURNING is avoided too: it costs five times the statement it is attached to.

-- A statement names its columns, {columns}, because a newer wirecall may have added others.

-- name: schema 1
-- Parts called "schema N" are run once, in order, and never edited after their release; a change is a new part.
CREATE TABLE wirecall_meta (
    only    INTEGER PRIMARY KEY CHECK (only = 1),
    version INTEGER NOT NULL,  -- of these tables; PRAGMA user_version belongs to the user
    fence   INTEGER NOT NULL   -- the last one that is taken; it never goes back, so no token is ever made twice
);
INSERT INTO wirecall_meta VALUES (1, 1, 0);

-- The rules about state are one CASE: as a CHECK for each column they cost a third of an insert.
CREATE TABLE wirecall_commands (
    caller       TEXT    NOT NULL,
    method       TEXT    NOT NULL,
    key          TEXT    NOT NULL CHECK (length(key) BETWEEN 1 AND 255),
    fingerprint  BLOB    NOT NULL,
    state        TEXT    NOT NULL,
    fence        INTEGER NOT NULL,
    nonce        BLOB    NOT NULL,
    committed    INTEGER NOT NULL CHECK (committed IN (0, 1)),
    attempts     INTEGER NOT NULL CHECK (attempts >= 0),
    lease        REAL    NOT NULL,  -- how long the lease of a running record is; the retention of one that has ended
    lease_until  REAL    NOT NULL,  -- when that is over, by the clock that counts from boot
    boot         BLOB    NOT NULL,  -- which boot that was; empty where the system does not tell
    due          REAL    NOT NULL,  -- until when it is kept, at least: its retention after started_at
    expires_at   REAL    NOT NULL,  -- when its retention is over, or its lease and that; like the others, by the wall clock
    started_at   REAL    NOT NULL,
    completed_at REAL,
    outcome_kind TEXT    CHECK (outcome_kind IN ('result', 'error')),
    payload      BLOB,
    digest       BLOB,
    CHECK (CASE state
        WHEN 'running'   THEN coalesce(completed_at, outcome_kind, payload, digest) IS NULL
        WHEN 'done'      THEN outcome_kind IS NOT NULL AND digest IS NOT NULL
        WHEN 'waiting'   THEN outcome_kind IS NOT NULL AND digest IS NOT NULL AND completed_at IS NULL
        WHEN 'tombstone' THEN outcome_kind IS NOT NULL AND digest IS NOT NULL AND payload IS NULL
        WHEN 'unknown'   THEN coalesce(completed_at, outcome_kind, payload, digest) IS NULL
        ELSE 0 END),
    PRIMARY KEY (due, fence)
) WITHOUT ROWID;

-- Commands that arrive together lie together in the table, and so do those that the sweep finds. Only in this index does
-- each lie elsewhere. A command writes to this index when it begins, and not when it is done.
CREATE UNIQUE INDEX wirecall_commands_id ON wirecall_commands (caller, method, key);

-- For operators: they look for a few among very many. No other command is in it.
CREATE INDEX wirecall_commands_open ON wirecall_commands (state) WHERE state IN ('unknown', 'waiting');

-- name: schema 2
-- The delivery of the answer to a call without a key; all NULL where there is one. The rules about it are one CHECK: in three,
-- they cost a command with a key a third of its insert.
ALTER TABLE wirecall_commands ADD COLUMN delivery TEXT;
-- The nonce of the claim whose caller gets the answer.
ALTER TABLE wirecall_commands ADD COLUMN deliverer BLOB;
-- By the clock that counts from boot, and in which one: when the answer was lost or, while it is pending, since when it is
-- there for its deliverer.
ALTER TABLE wirecall_commands ADD COLUMN answer_at REAL;
ALTER TABLE wirecall_commands ADD COLUMN answer_boot BLOB;
-- As long as an equal call may be a repetition of this one.
ALTER TABLE wirecall_commands ADD COLUMN likeness BLOB CHECK (CASE
    WHEN delivery IS NULL THEN coalesce(deliverer, answer_at, answer_boot, likeness) IS NULL
    ELSE deliverer IS NOT NULL AND CASE delivery
        WHEN 'pending'     THEN likeness IS NULL OR state <> 'tombstone'
        WHEN 'undelivered' THEN (likeness IS NULL OR state <> 'tombstone') AND answer_at IS NOT NULL
        WHEN 'written'     THEN likeness IS NULL
        ELSE 0 END
    END);

CREATE INDEX wirecall_commands_likeness ON wirecall_commands (likeness) WHERE likeness IS NOT NULL;

UPDATE wirecall_meta SET version = 2;

-- name: schema 3
-- Tasks. A record may go before its task, and another may come under its id.
CREATE TABLE wirecall_tasks (
    nth        INTEGER PRIMARY KEY,  -- the order of beginning
    id         TEXT    NOT NULL UNIQUE,
    caller     TEXT    NOT NULL,
    method     TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    started_at REAL    NOT NULL,  -- of the record
    version    INTEGER NOT NULL,
    document   BLOB    NOT NULL,
    is_ready   INTEGER NOT NULL CHECK (is_ready IN (0, 1)),
    is_over    INTEGER NOT NULL CHECK (is_over IN (0, 1)),
    ttl        REAL    NOT NULL,
    until      REAL    NOT NULL,  -- when the ttl is over, by the clock that counts from boot
    boot       BLOB    NOT NULL,  -- which boot that was; empty where the system does not tell
    expires_at REAL    NOT NULL   -- the same by the wall clock
);

CREATE INDEX wirecall_tasks_record ON wirecall_tasks (caller, method, key);
CREATE INDEX wirecall_tasks_open ON wirecall_tasks (is_over) WHERE is_over = 0;  -- few, however many there are
CREATE INDEX wirecall_tasks_expires_at ON wirecall_tasks (expires_at);

UPDATE wirecall_meta SET version = 3;

-- name: schema 4
-- What a method with record_params shows of a call.
ALTER TABLE wirecall_commands ADD COLUMN params BLOB;
-- 1 where a retry may run the command again after the end of its lease, NULL where only a person can tell how it ended.
ALTER TABLE wirecall_commands ADD COLUMN may_rerun INTEGER;

-- Running commands are few as well: the sweep finds those whose process has died, and the operator sees them as unknown.
DROP INDEX wirecall_commands_open;
CREATE INDEX wirecall_commands_open ON wirecall_commands (state) WHERE state IN ('running', 'unknown', 'waiting');

UPDATE wirecall_meta SET version = 4;

-- name: schema 5
-- From here on, a part only adds, so that processes of the version before continue to work: `level` is the version of the
-- tables, and `version` the least one that a process must know. A column that is added comes last and may be NULL: a process
-- that does not know it drops its value when it writes the row.
ALTER TABLE wirecall_meta ADD COLUMN level INTEGER;

-- For operators: each state in the order of time, for every method; methods are few. A command is put into it twice. The
-- name stays, because the version before names it.
DROP INDEX wirecall_commands_open;
CREATE INDEX wirecall_commands_open ON wirecall_commands (state, method, started_at, caller, key);
CREATE INDEX wirecall_tasks_started_at ON wirecall_tasks (started_at);

UPDATE wirecall_meta SET level = 5;

-- name: schema 6
-- Messages to all processes of a channel. The times are those of the wall clock.
CREATE TABLE wirecall_marks (
    nth        INTEGER PRIMARY KEY,  -- the order in which they were made
    channel    TEXT    NOT NULL,
    name       TEXT    NOT NULL,
    content    BLOB    NOT NULL,
    made_at    REAL    NOT NULL,
    expires_at REAL    NOT NULL,
    UNIQUE (channel, name)
);

CREATE INDEX wirecall_marks_made_at ON wirecall_marks (channel, made_at);
CREATE INDEX wirecall_marks_expires_at ON wirecall_marks (expires_at);

UPDATE wirecall_meta SET level = 6;

-- name: is_empty
SELECT NOT EXISTS (SELECT 1 FROM sqlite_master);

-- name: has_ledger
SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'wirecall_commands');

-- name: columns
SELECT name FROM pragma_table_info('wirecall_commands') ORDER BY cid;

-- name: least
SELECT version FROM wirecall_meta;

-- name: has_level
SELECT EXISTS (SELECT 1 FROM pragma_table_info('wirecall_meta') WHERE name = 'level');

-- name: level
SELECT level FROM wirecall_meta;

-- name: begin
BEGIN IMMEDIATE;

-- name: commit
COMMIT;

-- name: rollback
ROLLBACK;

-- name: before_handler
SAVEPOINT wirecall_handler;

-- name: undo_handler
ROLLBACK TO wirecall_handler;

-- name: take_fences
UPDATE wirecall_meta SET fence = fence + ?;
SELECT fence FROM wirecall_meta;

-- name: find
SELECT {columns} FROM wirecall_commands WHERE caller = ? AND method = ? AND key = ?;

-- name: alike
-- The calls that one without a key may repeat. They are few: to have them sorted here costs more than the insert of one.
SELECT {columns} FROM wirecall_commands WHERE likeness = ?;

-- name: put
REPLACE INTO wirecall_commands ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: put_new
INSERT INTO wirecall_commands ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING;

-- name: remove
DELETE FROM wirecall_commands WHERE caller = ? AND method = ? AND key = ?;

-- name: heartbeat
-- From here to `lapse`: what a token allows. Each is one compare-and-set; no row changed means that the token is old.
UPDATE wirecall_commands
SET lease = :lease, lease_until = :clock + :lease, boot = :boot, expires_at = :wall + :lease + (due - started_at)
WHERE caller = :caller AND method = :method AND key = :key AND fence = :fence AND nonce = :nonce AND state = 'running';

-- name: commit_point
UPDATE wirecall_commands
SET committed = 1, lease = :lease, lease_until = :clock + :lease, expires_at = :wall + :lease + (due - started_at)
WHERE caller = :caller AND method = :method AND key = :key AND fence = :fence AND nonce = :nonce AND state = 'running'
    AND lease_until > :clock AND boot = :boot;

-- name: complete
-- The common case, in which the retention stays as it is, and with it the place in the table.
UPDATE wirecall_commands
SET state = 'done', lease = :retention, lease_until = :clock + :retention, boot = :boot,
    expires_at = :wall + :retention, completed_at = :wall,
    outcome_kind = :kind, payload = :payload, digest = :digest,
    answer_at = CASE delivery WHEN 'pending' THEN :clock ELSE answer_at END,
    answer_boot = CASE delivery WHEN 'pending' THEN :boot ELSE answer_boot END
WHERE caller = :caller AND method = :method AND key = :key AND fence = :fence AND nonce = :nonce
    AND state = 'running' AND due = started_at + :retention;

-- name: complete_late
-- All others: its end was unknown until now, or the method's declaration has changed since.
UPDATE wirecall_commands
SET state = 'done', lease = :retention, lease_until = :clock + :retention, boot = :boot,
    due = started_at + :retention, expires_at = :wall + :retention, completed_at = :wall,
    outcome_kind = :kind, payload = :payload, digest = :digest,
    answer_at = CASE delivery WHEN 'pending' THEN :clock ELSE answer_at END,
    answer_boot = CASE delivery WHEN 'pending' THEN :boot ELSE answer_boot END
WHERE caller = :caller AND method = :method AND key = :key AND fence = :fence AND nonce = :nonce
    AND state IN ('running', 'unknown');

-- name: suspend
UPDATE wirecall_commands
SET state = 'waiting', attempts = 0, committed = 0, lease = :retention, lease_until = :clock + :retention, boot = :boot,
    due = started_at + :retention, expires_at = :wall + :retention,
    outcome_kind = :kind, payload = :payload, digest = :digest
WHERE caller = :caller AND method = :method AND key = :key AND fence = :fence AND nonce = :nonce AND state = 'running';

-- name: release
DELETE FROM wirecall_commands
WHERE caller = :caller AND method = :method AND key = :key AND fence = :fence AND nonce = :nonce AND state = 'running';

-- name: abandon
UPDATE wirecall_commands
SET state = 'unknown', lease_until = 0, due = 9e999, expires_at = 9e999,
    answer_at = CASE WHEN delivery IS NOT NULL THEN :clock END,
    answer_boot = CASE WHEN delivery IS NOT NULL THEN :boot END
WHERE caller = :caller AND method = :method AND key = :key AND fence = :fence AND nonce = :nonce AND state = 'running';

-- name: lapse
UPDATE wirecall_commands
SET lease = 0, lease_until = :clock, boot = :boot, expires_at = :wall + (due - started_at)
WHERE caller = :caller AND method = :method AND key = :key AND fence = :fence AND nonce = :nonce AND state = 'running';

-- name: resolve_done
-- By an operator, without a token. A committed run whose lease is over counts as unknown.
UPDATE wirecall_commands
SET state = 'done', lease = :retention, lease_until = :clock + :retention, boot = :boot,
    due = started_at + :retention, expires_at = :wall + :retention, completed_at = :wall,
    outcome_kind = :kind, payload = :payload, digest = :digest,
    answer_at = CASE delivery WHEN 'pending' THEN :clock ELSE answer_at END,
    answer_boot = CASE delivery WHEN 'pending' THEN :boot ELSE answer_boot END
WHERE caller = :caller AND method = :method AND key = :key AND (:seen IS NULL OR fence = :seen) AND (state = 'unknown' OR (
    state = 'running' AND committed = 1
        AND (lease_until <= :clock OR lease_until > :clock + lease + 1 OR (boot <> :boot AND boot <> x'' AND :boot <> x''))
));

-- name: resolve_absent
DELETE FROM wirecall_commands
WHERE caller = :caller AND method = :method AND key = :key AND (:seen IS NULL OR fence = :seen) AND (state = 'unknown' OR (
    state = 'running' AND committed = 1
        AND (lease_until <= :clock OR lease_until > :clock + lease + 1 OR (boot <> :boot AND boot <> x'' AND :boot <> x''))
));

-- name: unclaim_first
-- A claim whose caller was cancelled before it saw the answer: nothing ran, so a new record is removed.
DELETE FROM wirecall_commands
WHERE caller = :caller AND method = :method AND key = :key AND nonce = :nonce AND state = 'running' AND attempts = 1;

-- name: unclaim_later
-- A record that was taken over keeps its former state, and its lease is over.
UPDATE wirecall_commands
SET lease = 0, lease_until = :clock, boot = :boot, expires_at = :wall + (due - started_at)
WHERE caller = :caller AND method = :method AND key = :key AND nonce = :nonce AND state = 'running' AND attempts > 1;

-- name: deliver
-- By the claim that has the answer. A loss counts from now; what is written is not lost any more.
UPDATE wirecall_commands
SET delivery = :delivery, answer_at = :clock, answer_boot = :boot,
    likeness = CASE :delivery WHEN 'undelivered' THEN likeness END
WHERE caller = :caller AND method = :method AND key = :key AND deliverer = :nonce AND delivery IN ('pending', 'undelivered');

-- name: begin_task
-- Of a record that this token holds. A task that the record has already is written as it is, so that a row is changed.
INSERT INTO wirecall_tasks (
    nth, id, caller, method, key, started_at, version, document, is_ready, is_over, ttl, until, boot, expires_at
)
SELECT NULL, :id, caller, method, key, started_at, 1, :document, 0, 0, :ttl, :clock + :ttl, :boot, :wall + :ttl
FROM wirecall_commands
WHERE caller = :caller AND method = :method AND key = :key AND fence = :fence AND nonce = :nonce AND state = 'running'
ON CONFLICT (id) DO UPDATE SET version = version
WHERE caller = excluded.caller AND method = excluded.method AND key = excluded.key AND started_at = excluded.started_at;

-- name: task
SELECT t.id, t.caller, t.method, t.key, t.version, t.document, t.is_ready, t.is_over, t.ttl, t.until, t.boot, t.expires_at, {c.columns}
FROM wirecall_tasks AS t LEFT JOIN wirecall_commands AS c
ON c.caller = t.caller AND c.method = t.method AND c.key = t.key AND c.started_at = t.started_at
WHERE t.id = ?;

-- name: task_of
SELECT t.id, t.caller, t.method, t.key, t.version, t.document, t.is_ready, t.is_over, t.ttl, t.until, t.boot, t.expires_at, {c.columns}
FROM wirecall_commands AS c JOIN wirecall_tasks AS t
ON t.caller = c.caller AND t.method = c.method AND t.key = c.key AND t.started_at = c.started_at
WHERE c.caller = ? AND c.method = ? AND c.key = ?
ORDER BY t.nth DESC LIMIT 1;

-- name: change_task
UPDATE wirecall_tasks SET version = version + 1, document = ?, is_ready = ?, is_over = ? WHERE id = ? AND version = ?;

-- name: open_tasks
-- Those that may be orphans: the clocks decide. CROSS keeps their order, in which the tasks come first.
SELECT t.id, t.ttl, t.until, t.boot, t.expires_at, c.state, c.lease_until, c.lease, c.boot
FROM wirecall_tasks AS t CROSS JOIN wirecall_commands AS c
ON c.caller = t.caller AND c.method = t.method AND c.key = t.key AND c.started_at = t.started_at
WHERE t.is_over = 0 AND (c.state = 'running' OR (c.state = 'waiting' AND t.is_ready))
ORDER BY t.nth;

-- name: forget_tasks
DELETE FROM wirecall_tasks WHERE nth IN (
    SELECT nth FROM wirecall_tasks
    WHERE expires_at <= :wall
        AND (until <= :clock OR until > :clock + ttl + 1 OR (boot <> :boot AND boot <> x'' AND :boot <> x''))
    LIMIT :limit
);

-- name: due
-- The wall clock says so, and the clock from boot too, unless the time began in another boot.
SELECT {columns} FROM wirecall_commands
WHERE due <= :wall AND expires_at <= :wall AND state <> 'unknown'
    AND (lease_until <= :clock OR lease_until > :clock + lease + 1 OR (boot <> :boot AND boot <> x'' AND :boot <> x''))
LIMIT :limit;

-- name: dead
-- Committed runs whose lease has been over for a while; a boot that is over ends every lease.
SELECT {columns} FROM wirecall_commands INDEXED BY wirecall_commands_open
WHERE state = 'running' AND state IN ('running', 'unknown', 'waiting') AND committed = 1 AND may_rerun IS NULL
    AND (lease_until <= :clock - min(:after, due - started_at) OR lease_until > :clock + lease + 1
        OR (boot <> :boot AND boot <> x'' AND :boot <> x''))
LIMIT :limit;

-- name: methods
-- The methods that have records in a state. The index finds the next one, so this takes as many steps as there are methods.
WITH RECURSIVE found (method) AS (
    SELECT min(method) FROM wirecall_commands INDEXED BY wirecall_commands_open WHERE state = :state
    UNION ALL
    SELECT (
        SELECT min(method) FROM wirecall_commands INDEXED BY wirecall_commands_open WHERE state = :state AND method > found.method
    )
    FROM found WHERE found.method IS NOT NULL
)
SELECT method FROM found WHERE method IS NOT NULL;

-- name: page
-- The newest records of a state and a method. First the index alone, which has all that is asked for.
SELECT {c.columns} FROM (
    SELECT due, fence FROM wirecall_commands INDEXED BY wirecall_commands_open
    WHERE state = :state AND method = :method AND started_at >= :since AND started_at < :until AND started_at <= :at
        AND (:only_caller IS NULL OR caller = :only_caller) AND (started_at, caller, method, key) < (:at, :caller, :of, :key)
    ORDER BY started_at DESC, caller DESC, key DESC LIMIT :limit
) AS page CROSS JOIN wirecall_commands AS c ON c.due = page.due AND c.fence = page.fence;

-- name: page_running
-- The same for running ones, which are few. Whether one counts as unknown (:is_dead), the index does not say.
SELECT {columns} FROM wirecall_commands INDEXED BY wirecall_commands_open
WHERE state = 'running' AND method = :method AND started_at >= :since AND started_at < :until AND started_at <= :at
    AND (:only_caller IS NULL OR caller = :only_caller) AND (started_at, caller, method, key) < (:at, :caller, :of, :key)
    AND :is_dead = (committed = 1
        AND (lease_until <= :clock OR lease_until > :clock + lease + 1 OR (boot <> :boot AND boot <> x'' AND :boot <> x'')))
ORDER BY started_at DESC, caller DESC, key DESC LIMIT :limit;

-- name: of_caller
-- The records of a caller, unless they are many.
SELECT {columns} FROM wirecall_commands INDEXED BY wirecall_commands_id WHERE caller = :only_caller LIMIT :most;

-- name: page_of_tasks
-- The newest tasks, the last one of each record; the clocks decide whether it is over, and what its record counts as.
SELECT t.id, t.caller, t.method, t.key, t.version, t.document, t.is_ready, t.is_over, t.ttl, t.until, t.boot, t.expires_at, {c.columns}
FROM wirecall_tasks AS t INDEXED BY wirecall_tasks_started_at CROSS JOIN wirecall_commands AS c
ON c.caller = t.caller AND c.method = t.method AND c.key = t.key AND c.started_at = t.started_at
WHERE t.started_at >= :since AND t.started_at < :until AND t.started_at <= :at
    AND (:only_method IS NULL OR t.method = :only_method) AND (:only_caller IS NULL OR t.caller = :only_caller)
    AND (t.started_at, t.caller, t.method, t.key) < (:at, :caller, :of, :key)
    AND NOT EXISTS (
        SELECT 1 FROM wirecall_tasks AS o
        WHERE o.caller = t.caller AND o.method = t.method AND o.key = t.key AND o.started_at = t.started_at AND o.nth > t.nth
    )
ORDER BY t.started_at DESC, t.caller DESC, t.method DESC, t.key DESC;

-- name: counts
SELECT state, count(*) FROM wirecall_commands INDEXED BY wirecall_commands_open GROUP BY state;

-- name: count_dead
SELECT count(*) FROM wirecall_commands INDEXED BY wirecall_commands_open
WHERE state = 'running' AND committed = 1
    AND (lease_until <= :clock OR lease_until > :clock + lease + 1 OR (boot <> :boot AND boot <> x'' AND :boot <> x''));

-- name: mark
INSERT OR REPLACE INTO wirecall_marks (channel, name, content, made_at, expires_at)
VALUES (:channel, :name, :content, :wall, :wall + :ttl);

-- name: forget_marks
DELETE FROM wirecall_marks WHERE nth IN (
    SELECT nth FROM wirecall_marks WHERE expires_at <= :wall ORDER BY expires_at LIMIT 10
);

-- name: marked
SELECT content FROM wirecall_marks WHERE channel = :channel AND name = :name AND expires_at > :wall;

-- name: marks
SELECT name, content FROM wirecall_marks
WHERE channel = :channel AND made_at > :wall - :within AND expires_at > :wall ORDER BY nth;

-- name: identify
-- A mark that does not expire, unless there is one.
INSERT OR IGNORE INTO wirecall_marks (channel, name, content, made_at, expires_at)
VALUES (:channel, :name, :content, 0, 9e999);

-- name: identity
SELECT content FROM wirecall_marks WHERE channel = :channel AND name = :name;

-- name: fence
SELECT fence FROM wirecall_meta;
