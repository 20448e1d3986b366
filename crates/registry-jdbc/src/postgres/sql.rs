//! All statements of the store. Each statement is one transaction and takes one round trip. So a
//! dropped future cannot leave a transaction open. Exceptions are statements in a transaction of
//! the caller (such as [`FENCE`] and [`LOCK_IN`]), and in the transaction of a row lock
//! ([`ROW_LOCK`], [`ROW_NOTIFY`]).
//!
//! A row is held if it has a claim and `until` is in the future. A claim of a session or row lock
//! has no lease. Its `until` is zero, which stays in the past even if the clock is set back. All
//! times are the server's, from `clock_timestamp()`. `now()` is unsuitable: it is constant during a
//! transaction, even while a statement waits for a row.
//!
//! Only statements of session locks ([`SESSION_TRY_LOCK`]) rely on session state: behind a pooler,
//! each statement may run in another session. A statement changes settings by `set_config(…,
//! true)`, whose effect lasts until the transaction's end. The position of the call in the
//! statement determines when the effect begins.
//!
//! A statement that grants a key to another claim locks the key's row FOR UPDATE, unless the claim
//! joins other readers. Renewals and releases lock the row only FOR NO KEY UPDATE. A fenced
//! transaction locks the row FOR KEY SHARE, which blocks grants to other claims, and permits
//! renewals and releases.
//!
//! A row whose claim is [`RECORD_MARKER`] contains the record of several claims in its label. Its
//! `until` is at least the end of the last entry, so statements for one claim find the key held.
//! See [`records`](crate::server::records).

use super::config::TableNames;
use crate::mutant::{self, Mutant, SqlMutation, with_mutation};
use crate::server::statement::with_names;
use crate::server::{
    HolderStatements, RECORD_MARKER, RowStatements, StatementText, ValueStatements,
    WaiterStatements,
};

/// The statements that create the tables. They are sent on a separate connection.
pub(super) const SCHEMA: &str = include_str!("schema.sql");

/// The texts of all statements, for tables with these names.
#[derive(Debug)]
pub(crate) struct PgStatements {
    pub(super) tables: TableNames,
    rows: RowStatements,
    pub(super) acquire_all: StatementText,
    pub(super) release_all: StatementText,
    pub(super) renew: StatementText,
    pub(super) force_release: StatementText,
    pub(super) terminate_row_holder: StatementText,
    pub(super) lock_in: StatementText,
    pub(super) session_acquire: StatementText,
    pub(super) session_prepare: StatementText,
    pub(super) session_try_lock: StatementText,
    pub(super) session_write_claim: StatementText,
    pub(super) session_unlock: StatementText,
    pub(super) session_ensure_row: StatementText,
    pub(super) lock_in_session: StatementText,
    pub(super) row_write_claim: StatementText,
    pub(super) row_lock: StatementText,
    pub(super) row_notify: StatementText,
    pub(super) has_holder_lock: StatementText,
    pub(super) purge: StatementText,
}

impl AsRef<RowStatements> for PgStatements {
    fn as_ref(&self) -> &RowStatements {
        &self.rows
    }
}

impl PgStatements {
    pub(super) fn new(tables: TableNames) -> Self {
        let now = mutant::clock(NOW);
        let marker = format!("decode('{:032x}', 'hex')", u128::from_be_bytes(RECORD_MARKER));
        let names = [
            ("{locks}", tables.locks()),
            ("{meta}", tables.meta()),
            ("{values}", tables.values()),
            ("{waiters}", tables.waiters()),
        ];
        let text = |template: &str| {
            let text = template
                .replace("{claim_lock_key}", CLAIM_LOCK_KEY)
                .replace("{is_as_read}", IS_AS_READ)
                .replace("{marker}", &marker)
                .replace("{notify}", NOTIFY)
                .replace("{now}", &now);
            StatementText::numbered(&with_names(&text, &names))
        };
        let holders = |condition| {
            text(&HOLDERS.replace("{condition}", condition).replace("{holder_locks}", HOLDER_LOCKS))
        };
        let rows = RowStatements {
            meta: text(META),
            acquire: text(&with_mutation(ACQUIRE, &[CONSTANT_TOKEN])),
            reacquire: text(&with_mutation(
                REACQUIRE,
                &[CONSTANT_TOKEN_ON_REACQUIRE, REACQUIRES_HELD_KEY],
            )),
            current_grant: text(CURRENT_GRANT),
            holders: HolderStatements {
                of_key: holders("id = $1::bytea"),
                of_namespace: holders("namespace = $1::bytea"),
            },
            lease_holders_only: None,
            release: text(&with_mutation(RELEASE, &[RELEASE_BY_OTHER_CLAIM])),
            fence: text(&with_mutation(FENCE, &[FENCE_WITHOUT_LOCK])),
            fence_shared_grant: text(&with_mutation(FENCE, &[FENCE_WITHOUT_LOCK])),
            fence_session_grant: text(FENCE_SESSION_GRANT),
            read_row: text(READ_ROW),
            insert_record: text(INSERT_RECORD),
            write_record: text(WRITE_RECORD),
            write_renewal: text(
                &WRITE_GRANT.replace("FOR UPDATE", "FOR NO KEY UPDATE SKIP LOCKED"),
            ),
            write_grant: text(WRITE_GRANT),
            acquire_released_row: text(&with_mutation(
                ACQUIRE_RELEASED_ROW,
                &[REACQUIRES_HELD_KEY],
            )),
            release_single_entry: text(RELEASE_SINGLE_ENTRY),
            values: ValueStatements {
                read: text(READ_VALUE),
                write: text(&WRITE_VALUE.replace("{fence}", FENCE)),
                write_in_session: text(
                    &WRITE_VALUE.replace(
                        "{fence}",
                        &FENCE_SESSION_GRANT
                            .replace("FOR KEY SHARE", "AND $4::bytea IS NOT NULL FOR KEY SHARE"),
                    ),
                ),
            },
            waiters: WaiterStatements {
                register: text(REGISTER_WAITER),
                unregister: text(UNREGISTER_WAITER),
                of_key: text(&WAITERS.replace("{condition}", "id = $1::bytea")),
                of_namespace: text(&WAITERS.replace("{condition}", "namespace = $1::bytea")),
                purge: text(PURGE_WAITERS),
            },
        };
        Self {
            acquire_all: text(ACQUIRE_ALL),
            release_all: text(RELEASE_ALL),
            renew: text(&with_mutation(RENEW, &[RENEWAL_REVIVES])),
            force_release: text(FORCE_RELEASE),
            terminate_row_holder: text(
                &TERMINATE_ROW_HOLDER.replace("{holder_locks}", HOLDER_LOCKS),
            ),
            lock_in: text(&lock_in("", "allowed WHERE NOT EXISTS (SELECT FROM held)", "false")),
            lock_in_session: text(&lock_in(
                LOCK_IN_SESSION,
                "tried WHERE got",
                "NOT (SELECT got FROM tried)",
            )),
            session_acquire: text(
                &SESSION_ACQUIRE.replace("{try_lock}", "pg_try_advisory_lock($7::bigint)").replace(
                    "{unless_leased}",
                    "WHERE NOT EXISTS (SELECT FROM seen WHERE lease_left IS NOT NULL)",
                ),
            ),
            session_prepare: text(&with_mutation(&session_prepare(), &[SESSION_SKIPS_CLAIM_CHECK])),
            session_try_lock: text(SESSION_TRY_LOCK),
            session_write_claim: text(
                &SESSION_ACQUIRE
                    .replace("{try_lock}", "$7::bigint IS NOT NULL")
                    .replace("{unless_leased}", ""),
            ),
            session_unlock: text(SESSION_UNLOCK),
            session_ensure_row: text(SESSION_ENSURE_ROW),
            row_write_claim: text(ROW_WRITE_CLAIM),
            row_lock: text(ROW_LOCK),
            row_notify: text(ROW_NOTIFY),
            has_holder_lock: text(HAS_HOLDER_LOCK),
            purge: text(PURGE),
            rows,
            tables,
        }
    }
}

const RELEASE_BY_OTHER_CLAIM: SqlMutation =
    SqlMutation::new(Mutant::ReleaseByOtherClaim, "claim = $2::bytea", "$2::bytea IS NOT NULL");
const RENEWAL_REVIVES: SqlMutation =
    SqlMutation::new(Mutant::RenewalRevives, "l.until > {now}", "l.until IS NOT NULL");
// The mutated texts omit the clock, because the clock's growing values would hide the mutation.
const CONSTANT_TOKEN: SqlMutation = SqlMutation::new(
    Mutant::ConstantToken,
    "greatest(excluded.token, l.token + l.block)",
    "greatest(0, l.token)",
);
const CONSTANT_TOKEN_ON_REACQUIRE: SqlMutation = SqlMutation::new(
    Mutant::ConstantToken,
    "greatest({now}, l.token + l.block)",
    "greatest(0, l.token)",
);
const REACQUIRES_HELD_KEY: SqlMutation =
    SqlMutation::new(Mutant::ReacquiresHeldKey, "(claim IS NULL OR until <= {now})", "true");
const FENCE_WITHOUT_LOCK: SqlMutation =
    SqlMutation::new(Mutant::FenceWithoutLock, "FOR KEY SHARE", "");
const SESSION_SKIPS_CLAIM_CHECK: SqlMutation = SqlMutation::new(
    Mutant::SessionSkipsClaimCheck,
    "AND claim = $2::bytea",
    "AND $2::bytea IS NOT NULL",
);

/// Microseconds since 1970. `extract` is slower: its result is a decimal number.
const NOW: &str = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint";

/// Returns the version, the id of the tables, whether the server is writable, and whether the
/// transaction keeps the snapshot of its first read. A standby refuses writes with an error, but a
/// request that finds no row to change writes nothing.
const META: &str = "\
    SELECT version::bigint, uuid_send(store), current_setting('transaction_read_only') = 'off', \
        current_setting('transaction_isolation') <> 'read committed' \
    FROM {meta} WHERE id = 1";

/// Grants the key if it is free. A key that the given claim itself holds is not free. If the key is
/// held, the statement returns no row; [`CURRENT_GRANT`] then returns the holder.
///
/// If the key is held in the statement's snapshot, the row is not touched. So a busy attempt costs
/// no write and no flush. If the key is free in the snapshot, the assignment of `id` to itself
/// locks the row FOR UPDATE. Then the statement reads the clock again.
///
/// The new token is larger than the tokens of the row in the snapshot, of the locked row, and of
/// all deleted rows.
///
/// The statement does not return the holder, because this would make each grant an eighth slower on
/// the server.
///
/// Parameters: id, namespace, key, claim, block, label, lease
const ACQUIRE: &str = "\
    INSERT INTO {locks} AS l (id, namespace, key, claim, token, block, label, since, until) \
    SELECT $1::bytea, $2::bytea, $3::bytea, $4::bytea, greatest(now, floor + 1, seen.token + seen.block), $5::bigint, $6::bytea, \
        now, now + $7::bigint \
    FROM (SELECT {now} AS now) AS clock \
        CROSS JOIN {meta} AS meta LEFT JOIN {locks} AS seen ON seen.id = $1::bytea \
    WHERE meta.id = 1 AND (seen.claim IS NULL OR seen.until <= now) \
    ON CONFLICT (id) DO UPDATE SET \
        id = excluded.id, \
        claim = excluded.claim, \
        token = greatest(excluded.token, l.token + l.block), \
        block = excluded.block, \
        label = excluded.label, \
        since = {now}, \
        until = {now} + $7::bigint \
    WHERE l.claim IS NULL OR l.until <= {now} \
    RETURNING token";

/// Grants the key like [`ACQUIRE`], if its row exists and is free. Otherwise the statement returns
/// no row.
///
/// The statement is faster than `ACQUIRE`, because it need not handle a missing row. A token above
/// the row's own tokens is above all earlier tokens of the key: a new row starts above the tokens
/// of deleted rows.
///
/// The subquery locks the row FOR UPDATE, because an update alone would not conflict with a fence.
/// After the subquery has locked the row, it checks that the row is free.
///
/// Parameters: id, claim, block, label, lease
const REACQUIRE: &str = "\
    UPDATE {locks} AS l SET \
        claim = $2::bytea, \
        token = greatest({now}, l.token + l.block), \
        block = $3::bigint, \
        label = $4::bytea, \
        since = {now}, \
        until = {now} + $5::bigint \
    FROM (SELECT FROM {locks} WHERE id = $1::bytea AND (claim IS NULL OR until <= {now}) FOR UPDATE) AS free \
    WHERE l.id = $1::bytea \
    RETURNING token";

/// Returns the holder of the key, if it is held.
///
/// Parameters: id
const CURRENT_GRANT: &str = "\
    WITH clock AS MATERIALIZED (SELECT {now} AS now) \
    SELECT claim, token, label, now - since, until - now FROM {locks}, clock \
    WHERE id = $1::bytea AND claim IS NOT NULL AND until > now";

/// Returns the holder of one key, or the holders of a namespace. A key is held by a lease, or by a
/// transaction that holds the advisory lock of the claim; see [`ROW_LOCK`].
///
/// Parameters: id or namespace
const HOLDERS: &str = "\
    WITH clock AS MATERIALIZED (SELECT {now} AS now) \
    SELECT key, token, label, now - since, CASE WHEN until > now THEN until - now END, claim, now FROM {locks}, clock \
    WHERE {condition} AND claim IS NOT NULL AND (until > now OR {claim_lock_key} IN (SELECT lock_key FROM ({holder_locks}) AS holder_locks))";

/// The keys of all held advisory locks, with the ids of the server processes that hold them.
const HOLDER_LOCKS: &str = "\
    SELECT (classid::bigint << 32) | objid::bigint AS lock_key, pid FROM pg_locks \
    WHERE locktype = 'advisory' AND objsubid = 1 AND granted \
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// The key of the advisory lock of the row's claim; see [`ROW_LOCK`].
const CLAIM_LOCK_KEY: &str = "('x' || encode(substr(claim, 1, 8), 'hex'))::bit(64)::bigint";

/// Renews the grants that have not expired. Returns, for each claim, the time left if it was
/// renewed, and whether its grant exists.
///
/// A row that another transaction has locked is skipped, so that it does not delay the renewal of
/// other rows. The grant of a skipped row exists and is not extended. The statement waits for no
/// row, so no deadlock is possible.
///
/// Parameters: ids, claims, leases
const RENEW: &str = "\
    WITH wanted AS MATERIALIZED ( \
        SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bigint[]) WITH ORDINALITY AS w (id, claim, lease, n)), \
    found AS MATERIALIZED ( \
        SELECT l.id, w.claim, w.lease FROM wanted AS w JOIN {locks} AS l ON l.id = w.id AND l.claim = w.claim \
        WHERE l.until > {now} FOR NO KEY UPDATE OF l SKIP LOCKED), \
    renewed AS ( \
        UPDATE {locks} AS l SET until = greatest(l.until, {now} + found.lease) FROM found \
        WHERE l.id = found.id AND l.claim = found.claim AND l.until > {now} \
        RETURNING l.id, l.claim, l.until - {now} AS until) \
    SELECT renewed.until, \
        EXISTS (SELECT FROM {locks} AS l WHERE l.id = w.id AND l.claim = w.claim AND l.until > {now}) \
    FROM wanted AS w LEFT JOIN renewed ON renewed.id = w.id AND renewed.claim = w.claim ORDER BY w.n";

/// Ends the grant of one claim, and notifies the listeners if there are any; see
/// [`NotificationChannel`](super::listener::NotificationChannel). The row remains, for its tokens.
///
/// An expired grant is not changed: its key is already free, and the answer is that the claim held
/// nothing. The release need not be flushed to disk: if a crash undoes it, the key becomes free at
/// the end of its lease.
///
/// Unused tokens of the block become available again, so that tokens do not get ahead of the clock.
///
/// Parameters: id, claim, tokens used, channel, message, presence lock
const RELEASE: &str = "\
    UPDATE {locks} SET claim = NULL, until = {now}, block = least(block, $3::bigint) \
    WHERE id = $1::bytea AND claim = $2::bytea AND until > {now} \
    RETURNING CASE WHEN NOT pg_try_advisory_xact_lock($6::bigint) THEN pg_notify($4::text, encode($5::bytea, 'hex')) IS NULL END, \
        set_config('synchronous_commit', 'off', true)";

/// Grants all keys like [`REACQUIRE`] and returns their tokens, if the rows of all keys exist, are
/// free, and are not locked by another transaction. Otherwise the statement returns no row.
///
/// The statement waits for no row, so no deadlock is possible.
///
/// Parameters: ids, claims, block, label, lease
const ACQUIRE_ALL: &str = "\
    WITH wanted AS MATERIALIZED ( \
        SELECT * FROM unnest($1::bytea[], $2::bytea[]) WITH ORDINALITY AS w (id, claim, n)), \
    free AS MATERIALIZED ( \
        SELECT l.id, w.claim FROM wanted AS w JOIN {locks} AS l ON l.id = w.id \
        WHERE l.claim IS NULL OR l.until <= {now} FOR UPDATE OF l SKIP LOCKED), \
    granted AS ( \
        UPDATE {locks} AS l SET \
            claim = free.claim, \
            token = greatest({now}, l.token + l.block), \
            block = $3::bigint, \
            label = $4::bytea, \
            since = {now}, \
            until = {now} + $5::bigint \
        FROM free \
        WHERE l.id = free.id AND (SELECT count(*) FROM free) = cardinality($1::bytea[]) \
        RETURNING l.id, l.token) \
    SELECT granted.token FROM wanted AS w JOIN granted ON granted.id = w.id ORDER BY w.n";

/// Ends the grants of several claims like [`RELEASE`]. Returns, for each claim, whether it held its
/// key.
///
/// Parameters: ids, claims, tokens used, channel, messages, presence locks
const RELEASE_ALL: &str = "\
    WITH wanted AS MATERIALIZED ( \
        SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bigint[], $5::bytea[], $6::bigint[]) \
            WITH ORDINALITY AS w (id, claim, used, message, presence_lock, n)), \
    released AS ( \
        UPDATE {locks} AS l SET claim = NULL, until = {now}, block = least(l.block, w.used) \
        FROM wanted AS w WHERE l.id = w.id AND l.claim = w.claim AND l.until > {now} \
        RETURNING l.id, \
            CASE WHEN NOT pg_try_advisory_xact_lock(w.presence_lock) THEN pg_notify($4::text, encode(w.message, 'hex')) IS NULL END, \
            set_config('synchronous_commit', 'off', true)) \
    SELECT EXISTS (SELECT FROM released WHERE released.id = w.id) FROM wanted AS w ORDER BY w.n";

/// Ends the lease on the key, whatever claim holds it, and notifies the listeners.
///
/// Parameters: id, channel, message
const FORCE_RELEASE: &str = "\
    UPDATE {locks} SET claim = NULL, until = {now} \
    WHERE id = $1::bytea AND claim IS NOT NULL AND until > {now} \
    RETURNING pg_notify($2::text, encode($3::bytea, 'hex')) IS NULL";

/// Ends the server process whose transaction holds the key for the row's claim. Returns whether it
/// ended within the limit.
///
/// Parameters: id, milliseconds
const TERMINATE_ROW_HOLDER: &str = "\
    WITH holder AS MATERIALIZED ( \
        SELECT holder_locks.pid FROM {locks} JOIN ({holder_locks}) AS holder_locks ON holder_locks.lock_key = {claim_lock_key} WHERE id = $1::bytea AND claim IS NOT NULL) \
    SELECT pg_terminate_backend(pid, $2::bigint) FROM holder";

/// Finds the row with this claim and token, or with a record that contains them. Locks the row
/// against a grant to another claim until the caller's transaction ends. A reader that joins other
/// readers does not wait for this row lock, because its grant is written by [`WRITE_RECORD`].
///
/// In an entry of a record, the end of the lease begins at offset 33, the token at 81, and the
/// token block at 100. Offsets begin at zero.
///
/// Parameters: id, claim, token, first 33 bytes of the entry
const FENCE: &str = "\
    SELECT true FROM {locks} \
    WHERE id = $1::bytea AND until > {now} AND CASE \
        WHEN claim = $2::bytea THEN token <= $3::bigint AND $3::bigint < token + block \
        WHEN claim = {marker} AND position($4::bytea IN label) > 0 THEN \
            encode(substr(label, position($4::bytea IN label) + 33, 16), 'escape')::bigint > {now} \
            AND encode(substr(label, position($4::bytea IN label) + 81, 19), 'escape')::bigint <= $3::bigint \
            AND encode(substr(label, position($4::bytea IN label) + 81, 19), 'escape')::bigint \
                + encode(substr(label, position($4::bytea IN label) + 100, 10), 'escape')::bigint > $3::bigint END \
    FOR KEY SHARE";

/// Returns the columns of the key's row that requests can change, the server's time, and the
/// largest token of all deleted rows. Without a row, its columns are NULL.
///
/// Parameters: id
const READ_ROW: &str = "\
    SELECT l.claim, l.token, l.block, l.label, l.since, l.until, {now}, meta.floor \
    FROM {meta} AS meta LEFT JOIN {locks} AS l ON l.id = $1::bytea WHERE meta.id = 1";

/// Whether the row is unchanged since it was read. In a row with a record, each write changes
/// `since` or `until`.
const IS_AS_READ: &str = "\
    id = $1::bytea AND claim IS NOT DISTINCT FROM $8::bytea AND token = $9::bigint AND since = $10::bigint AND until = $11::bigint";

/// Creates a row with a record, if the key has no row and the new token is above the tokens of all
/// deleted rows.
///
/// Parameters: id, claim, token, block, label, since, until, namespace, key
const INSERT_RECORD: &str = "\
    INSERT INTO {locks} (id, namespace, key, claim, token, block, label, since, until) \
    SELECT $1::bytea, $8::bytea, $9::bytea, $2::bytea, $3::bigint, $4::bigint, $5::bytea, $6::bigint, $7::bigint \
    FROM {meta} WHERE id = 1 AND floor < $3::bigint \
    ON CONFLICT (id) DO NOTHING RETURNING true";

/// Writes a row, if the row is unchanged since it was read. If another claim may be granted after
/// the change, notifies the listeners, if there are any.
///
/// Parameters: id, claim, token, block, label, since, until, the read claim, token, since and
/// until, whether to notify, whether a crash may undo the change, channel, message, presence lock
const WRITE_RECORD: &str = "\
    UPDATE {locks} SET \
        claim = $2::bytea, token = $3::bigint, block = $4::bigint, label = $5::bytea, since = $6::bigint, until = $7::bigint \
    WHERE {is_as_read} RETURNING {notify}";

/// Like [`WRITE_RECORD`], for a change that grants the key. The subquery locks the row FOR UPDATE,
/// as in [`REACQUIRE`].
const WRITE_GRANT: &str = "\
    UPDATE {locks} AS l SET \
        claim = $2::bytea, token = $3::bigint, block = $4::bigint, label = $5::bytea, since = $6::bigint, until = $7::bigint \
    FROM (SELECT FROM {locks} WHERE {is_as_read} FOR UPDATE) AS seen \
    WHERE l.id = $1::bytea RETURNING {notify}";

/// Grants the key like [`REACQUIRE`], to a claim that is then alone in a record. The statement
/// writes the text of the record with the times and the token of the grant.
///
/// Parameters: id, block, lease, the first 33 bytes of the entry, its bytes from the token block on
const ACQUIRE_RELEASED_ROW: &str = "\
    UPDATE {locks} AS l SET \
        claim = {marker}, \
        token = greatest(free.now, l.token + l.block), \
        block = $2::bigint, \
        label = $4::bytea || convert_to( \
            lpad((free.now + $3::bigint)::text, 16, '0') || lpad(free.now::text, 16, '0') || repeat('0', 16) \
                || lpad(greatest(free.now, l.token + l.block)::text, 19, '0'), \
            'UTF8') || $5::bytea, \
        since = greatest(free.now, l.since + 1), \
        until = free.now + $3::bigint \
    FROM ( \
        SELECT {now} AS now FROM {locks} WHERE id = $1::bytea AND (claim IS NULL OR until <= {now}) FOR UPDATE) AS free \
    WHERE l.id = $1::bytea \
    RETURNING token";

/// Ends the grant of a claim that is alone in its record, like [`RELEASE`]. A record with another
/// claim, or with a grant that is not the newest one of the key, is not changed.
///
/// Parameters: id, the first 33 bytes of the entry, tokens used, channel, message, presence lock
const RELEASE_SINGLE_ENTRY: &str = "\
    UPDATE {locks} SET \
        claim = NULL, label = NULL, since = greatest({now}, since + 1), until = {now}, block = least(block, $3::bigint) \
    WHERE id = $1::bytea AND claim = {marker} AND until > {now} \
        AND position($2::bytea IN label) = 1 AND position(';'::bytea IN label) = length(label) \
        AND substr(label, 34, 16) > convert_to(lpad({now}::text, 16, '0'), 'UTF8') \
        AND substr(label, 82, 19) = convert_to(lpad(token::text, 19, '0'), 'UTF8') \
    RETURNING CASE WHEN NOT pg_try_advisory_xact_lock($6::bigint) THEN pg_notify($4::text, encode($5::bytea, 'hex')) IS NULL END, \
        set_config('synchronous_commit', 'off', true)";

/// The columns of [`WRITE_RECORD`]. They send the notification and set `synchronous_commit`, as the
/// parameters request.
const NOTIFY: &str = "\
    CASE WHEN $12::bigint = 1 THEN CASE WHEN NOT pg_try_advisory_xact_lock($16::bigint) THEN \
        pg_notify($14::text, encode($15::bytea, 'hex')) IS NULL END END, \
    CASE WHEN $13::bigint = 1 THEN set_config('synchronous_commit', 'off', true) END";

/// Returns [`LOCK_IN`] for rows alone, or for rows with session locks. `session_step` is the
/// additional step for session locks. `source` follows `FROM`, and yields no row if the transaction
/// must not lock the row. `is_in_session` is the expression for whether a session holds the lock.
fn lock_in(session_step: &str, source: &str, is_in_session: &str) -> String {
    LOCK_IN
        .replace("{session_step}", session_step)
        .replace("{source}", source)
        .replace("{is_in_session}", is_in_session)
}

/// The additional step for session locks ([`SESSION_ACQUIRE`]): the transaction also acquires the
/// advisory lock.
///
/// Parameters: those of [`LOCK_IN`], advisory lock
const LOCK_IN_SESSION: &str = "\
    tried AS MATERIALIZED (SELECT pg_try_advisory_xact_lock($9::bigint) AS got FROM allowed WHERE NOT EXISTS (SELECT FROM held)),";

/// Locks the row for the caller's transaction, unless another client holds a lease. In that case,
/// the statement returns the lease's time left.
///
/// The statement resembles [`ACQUIRE`] without the lease: the commit leaves a free row with a
/// larger token, and notifies the listeners. If the transaction's isolation level keeps a snapshot,
/// the statement locks nothing. The holder lock is an advisory lock that shows to other clients why
/// the row is locked. No statement waits for the holder lock. The statement restores the caller's
/// `lock_timeout`.
///
/// Columns by index; columns 4 and 5 are ignored:
/// - 0: whether this is the store's database
/// - 1: the token
/// - 2: the lease's time left
/// - 3: the isolation level, if it is unsuitable
/// - 6: whether a session holds the lock ([`LOCK_IN_SESSION`])
///
/// Parameters: id, namespace, key, store, lock_timeout, holder lock, channel, message
const LOCK_IN: &str = "\
    WITH settings AS MATERIALIZED ( \
        SELECT current_setting('lock_timeout') AS was, set_config('lock_timeout', $5::text, true)), \
    clock AS MATERIALIZED (SELECT {now} AS now), \
    meta AS MATERIALIZED (SELECT floor FROM {meta} WHERE id = 1 AND uuid_send(store) = $4::bytea), \
    level AS MATERIALIZED (SELECT current_setting('transaction_isolation') AS name), \
    allowed AS MATERIALIZED (SELECT floor FROM meta, level WHERE name LIKE 'read %'), \
    seen AS MATERIALIZED (SELECT claim, token, block, until FROM {locks} WHERE id = $1::bytea), \
    held AS (SELECT seen.* FROM seen, clock WHERE claim IS NOT NULL AND until > now), \
    {session_step} \
    holder_lock AS MATERIALIZED (SELECT pg_try_advisory_xact_lock_shared($6::bigint) FROM {source}), \
    taken AS ( \
        INSERT INTO {locks} AS l (id, namespace, key, claim, token, block, label, since, until) \
        SELECT $1::bytea, $2::bytea, $3::bytea, NULL, \
            greatest(now, floor + 1, (SELECT token + block FROM seen)), 1, NULL, now, now \
        FROM settings, clock, allowed, holder_lock \
        ON CONFLICT (id) DO UPDATE SET \
            id = excluded.id, \
            claim = NULL, \
            token = greatest(excluded.token, l.token + l.block, {now}), \
            block = 1, \
            label = NULL, \
            since = {now}, \
            until = {now} \
        WHERE l.claim IS NULL OR l.until <= {now} \
        RETURNING token) \
    SELECT meta.floor IS NOT NULL, taken.token, held.until - now, \
        CASE WHEN level.name NOT LIKE 'read %' THEN level.name END, \
        set_config('lock_timeout', settings.was, true), \
        CASE WHEN taken.token IS NOT NULL THEN pg_notify($7::text, encode($8::bytea, 'hex')) IS NULL END, {is_in_session} \
    FROM settings CROSS JOIN clock CROSS JOIN level LEFT JOIN meta ON true LEFT JOIN taken ON true LEFT JOIN held ON true";

/// Acquires an advisory lock for the session, unless the session holds it, and writes the claim and
/// a larger token to the row. Clients that request a lease still find the row free.
///
/// Returns no token if another session holds the advisory lock, another client holds a lease, or
/// another transaction has locked the row. The statement then releases the session's advisory lock,
/// if held. It sends no notification, because each notified client would also fail and notify
/// again. After an error the caller must release the advisory lock, because a rollback does not
/// release it.
///
/// The statement does not wait for locked rows, because all commands of the session would wait too.
/// `lock_timeout` limits only the wait for a row that another transaction has inserted and not
/// committed.
///
/// As in [`ACQUIRE`], the token exceeds the token of the row in the snapshot. Another client may
/// delete that row meanwhile, and the floor in the snapshot does not cover its token.
///
/// The commit must be flushed to disk only if the token is ahead of the clock. A session does not
/// survive a crash, and lost tokens below the clock are not issued again.
///
/// Parameters: id, namespace, key, claim, block, label, advisory lock, lock_timeout
const SESSION_ACQUIRE: &str = "\
    WITH settings AS MATERIALIZED (SELECT set_config('lock_timeout', $8::text, true)), \
    seen AS MATERIALIZED ( \
        SELECT token, block, CASE WHEN claim IS NOT NULL AND until > {now} THEN until - {now} END AS lease_left \
        FROM {locks}, settings WHERE id = $1::bytea), \
    tried AS MATERIALIZED (SELECT {try_lock} AS got FROM settings {unless_leased}), \
    clock AS MATERIALIZED (SELECT {now} AS now FROM tried WHERE got), \
    mine AS MATERIALIZED ( \
        SELECT l.id FROM {locks} AS l, clock WHERE l.id = $1::bytea FOR UPDATE OF l SKIP LOCKED), \
    taken AS ( \
        INSERT INTO {locks} AS l (id, namespace, key, claim, token, block, label, since, until) \
        SELECT $1::bytea, $2::bytea, $3::bytea, $4::bytea, greatest(now, floor + 1, seen.token + seen.block), $5::bigint, $6::bytea, now, 0 \
        FROM clock CROSS JOIN {meta} AS meta LEFT JOIN seen ON true \
        WHERE meta.id = 1 AND (seen.token IS NULL OR EXISTS (SELECT FROM mine)) \
        ON CONFLICT (id) DO UPDATE SET \
            id = excluded.id, \
            claim = excluded.claim, \
            token = greatest(excluded.token, l.token + l.block, {now}), \
            block = excluded.block, \
            label = excluded.label, \
            since = {now}, \
            until = 0 \
        WHERE l.claim IS NULL OR l.until <= {now} \
        RETURNING token) \
    SELECT pg_backend_pid(), coalesce(tried.got, false), taken.token, seen.lease_left, \
        coalesce(tried.got, false) AND seen.token IS NOT NULL AND NOT EXISTS (SELECT FROM mine), \
        CASE WHEN taken.token <= {now} THEN set_config('synchronous_commit', 'off', true) END, \
        CASE WHEN tried.got AND taken.token IS NULL THEN pg_advisory_unlock($7::bigint) END \
    FROM settings LEFT JOIN tried ON true LEFT JOIN taken ON true LEFT JOIN seen ON true";

/// Acquires an advisory lock for the session. [`session_prepare`] prepares this statement.
///
/// Parameters: advisory lock
const SESSION_TRY: &str = "SELECT pg_backend_pid(), pg_try_advisory_lock($1::bigint)";

/// Returns the server's time, if the row still contains this claim.
///
/// Parameters: id, claim
const SESSION_READ_CLAIM: &str =
    "SELECT {now} FROM {locks} WHERE id = $1::bytea AND claim = $2::bytea";

/// Returns the statements that prepare [`SESSION_TRY`] and [`SESSION_READ_CLAIM`], for
/// [`SESSION_TRY_LOCK`].
fn session_prepare() -> String {
    format!(
        "PREPARE lock_registry_try (bigint) AS {SESSION_TRY}; PREPARE lock_registry_seen (bytea, bytea) AS {SESSION_READ_CLAIM}"
    )
}

/// Acquires an advisory lock for the session. Returns the server's time if the row still contains a
/// claim of this session. Writes nothing.
///
/// The message contains two statements. Under READ COMMITTED, the isolation level of the session,
/// the second statement sees all commits of earlier holders of the lock. A single statement would
/// read a snapshot that is older than the lock.
///
/// Parameters: advisory lock, id, claim
const SESSION_TRY_LOCK: &str = "\
    EXECUTE lock_registry_try ($1::bigint); EXECUTE lock_registry_seen ($2::bytea, $3::bytea)";

/// Releases an advisory lock, and notifies the listeners if there are any; see
/// [`NotificationChannel`](super::listener::NotificationChannel). Whichever call runs first, the
/// advisory lock is free before the presence lock, which lasts until the end of the transaction.
/// `synchronous_commit` is set only with a notification, because otherwise the transaction writes
/// nothing.
///
/// Parameters: advisory lock, channel, message, presence lock
const SESSION_UNLOCK: &str = "\
    SELECT pg_backend_pid(), pg_advisory_unlock($1::bigint), \
        CASE WHEN NOT pg_try_advisory_xact_lock($4::bigint) THEN \
            set_config('synchronous_commit', 'off', true) IS NULL OR pg_notify($2::text, encode($3::bytea, 'hex')) IS NULL END";

/// Ensures that the row exists and contains this claim, for the session that holds the lock. The
/// row may have been purged, because it has no lease. Or the row contains an earlier claim of the
/// session, which reserved this claim's token.
///
/// Parameters: id, namespace, key, claim, token, block, lock_timeout, earlier claim
const SESSION_ENSURE_ROW: &str = "\
    WITH settings AS MATERIALIZED ( \
        SELECT set_config('lock_timeout', $7::text, true), set_config('synchronous_commit', 'off', true)), \
    clock AS MATERIALIZED (SELECT {now} AS now FROM settings), \
    ensured AS ( \
        INSERT INTO {locks} AS l (id, namespace, key, claim, token, block, label, since, until) \
        SELECT $1::bytea, $2::bytea, $3::bytea, $4::bytea, $5::bigint, $6::bigint, NULL, now, 0 FROM clock \
        ON CONFLICT (id) DO UPDATE SET \
            claim = excluded.claim, \
            token = excluded.token, \
            block = excluded.block, \
            since = greatest(l.since, {now}) \
        WHERE l.claim = $8::bytea AND l.token <= excluded.token AND excluded.token < l.token + l.block \
        RETURNING id) \
    SELECT pg_backend_pid(), (SELECT count(*) FROM ensured) FROM settings";

/// Like [`FENCE`], for a lock that ends with a connection. The statement finds the row even after
/// the end of the connection. This is safe, because the next grant must change the row first.
///
/// Parameters: id, claim, token
const FENCE_SESSION_GRANT: &str = "\
    SELECT true FROM {locks} \
    WHERE id = $1::bytea AND claim = $2::bytea AND token <= $3::bigint AND $3::bigint < token + block \
    FOR KEY SHARE";

/// Returns token, value and the server's time. Token and value are null if the key has no value.
///
/// Parameters: id
const READ_VALUE: &str = "\
    SELECT v.token, v.value, {now} FROM (SELECT) AS one LEFT JOIN {values} AS v ON v.id = $1::bytea";

/// Writes the value of a key whose row has this claim and token, unless the stored value has a
/// larger token. [`FENCE`] keeps the key from being granted to another claim until the value is
/// committed.
///
/// Parameters: id, claim, token, first 33 bytes of the entry, namespace, key, value
const WRITE_VALUE: &str = "\
    WITH fenced AS MATERIALIZED ({fence}) \
    INSERT INTO {values} AS v (id, namespace, key, token, value) \
    SELECT $1::bytea, $5::bytea, $6::bytea, $3::bigint, $7::bytea FROM fenced \
    ON CONFLICT (id) DO UPDATE SET token = excluded.token, value = excluded.value \
    WHERE v.token <= excluded.token \
    RETURNING true";

/// Registers a claim that waits, or extends its registration. The registration need not be flushed
/// to disk.
///
/// Parameters: id, namespace, key, claim, mode, label, microseconds waited, lease
const REGISTER_WAITER: &str = "\
    WITH clock AS MATERIALIZED (SELECT {now} AS now, set_config('synchronous_commit', 'off', true)) \
    INSERT INTO {waiters} (id, claim, namespace, key, mode, label, since, until) \
    SELECT $1::bytea, $4::bytea, $2::bytea, $3::bytea, $5::bytea, $6::bytea, now - $7::bigint, now + $8::bigint FROM clock \
    ON CONFLICT (id, claim) DO UPDATE SET mode = excluded.mode, since = excluded.since, until = excluded.until";

/// Deletes the registration of a claim.
///
/// Parameters: id, claim
const UNREGISTER_WAITER: &str = "\
    WITH settings AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)) \
    DELETE FROM {waiters} USING settings WHERE id = $1::bytea AND claim = $2::bytea";

/// Returns the registered claims of one key, or of a namespace.
///
/// Parameters: id or namespace
const WAITERS: &str = "\
    WITH clock AS MATERIALIZED (SELECT {now} AS now) \
    SELECT key, mode, label, now - since, until - now FROM {waiters}, clock WHERE {condition} AND until > now";

/// Deletes the expired registrations. Skips locked rows, because two such statements could
/// otherwise wait for each other.
const PURGE_WAITERS: &str = "\
    DELETE FROM {waiters} WHERE (id, claim) IN ( \
        SELECT id, claim FROM {waiters} WHERE until <= {now} FOR UPDATE SKIP LOCKED)";

/// Writes a claim and a larger token to the row, unless another client holds a lease or a
/// transaction has locked the row. Returns the token, and whether a lease exists. Clients that
/// request a lease still find the row free.
///
/// The commit must be flushed to disk only if the token is ahead of the clock. The lock does not
/// survive a crash, and lost tokens below the clock are not issued again.
///
/// Parameters: id, namespace, key, claim, block, label, lock_timeout
const ROW_WRITE_CLAIM: &str = "\
    WITH settings AS MATERIALIZED (SELECT set_config('lock_timeout', $7::text, true)), \
    seen AS MATERIALIZED ( \
        SELECT claim IS NOT NULL AND until > {now} AS leased FROM {locks}, settings WHERE id = $1::bytea), \
    found AS MATERIALIZED ( \
        SELECT l.id FROM {locks} AS l \
        WHERE l.id = $1::bytea AND (l.claim IS NULL OR l.until <= {now}) AND EXISTS (SELECT FROM seen) \
        FOR UPDATE SKIP LOCKED), \
    updated AS ( \
        UPDATE {locks} AS l SET \
            id = l.id, \
            claim = $4::bytea, \
            token = greatest({now}, l.token + l.block), \
            block = $5::bigint, \
            label = $6::bytea, \
            since = {now}, \
            until = 0 \
        FROM found WHERE l.id = found.id \
        RETURNING l.token), \
    inserted AS ( \
        INSERT INTO {locks} AS l (id, namespace, key, claim, token, block, label, since, until) \
        SELECT $1::bytea, $2::bytea, $3::bytea, $4::bytea, greatest(now, floor + 1), $5::bigint, $6::bytea, now, 0 \
        FROM (SELECT {now} AS now, floor FROM {meta} WHERE id = 1) AS meta, settings \
        WHERE NOT EXISTS (SELECT FROM seen) \
        ON CONFLICT (id) DO NOTHING \
        RETURNING token), \
    granted AS (SELECT coalesce((SELECT token FROM updated), (SELECT token FROM inserted)) AS token) \
    SELECT token, EXISTS (SELECT FROM seen WHERE leased), \
        CASE WHEN token <= {now} THEN set_config('synchronous_commit', 'off', true) END \
    FROM granted";

/// Locks the row for a transaction if the row contains the claim. Two advisory locks of the
/// transaction show that it holds this key (holder lock), and for which claim. Sent after `BEGIN`
/// in one message.
///
/// Returns the ids of the server process and of the transaction, or no row if nothing was locked.
/// From then on, the server ends the transaction after `idle timeout` without a statement, but
/// never because of its age.
///
/// Parameters: id, claim, holder lock, idle timeout, advisory lock of the claim
const ROW_LOCK: &str = "\
    WITH settings AS MATERIALIZED ( \
        SELECT set_config('idle_in_transaction_session_timeout', $4::text, true), set_config('tcp_user_timeout', $4::text, true), \
            set_config('tcp_keepalives_idle', '30', true), set_config('tcp_keepalives_interval', '10', true), \
            set_config('tcp_keepalives_count', '3', true), set_config('synchronous_commit', 'off', true), \
            CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', true) END), \
    mine AS MATERIALIZED ( \
        SELECT l.id FROM {locks} AS l WHERE l.id = $1::bytea AND l.claim = $2::bytea FOR NO KEY UPDATE SKIP LOCKED), \
    holder_lock AS MATERIALIZED ( \
        SELECT pg_try_advisory_xact_lock_shared($3::bigint), pg_try_advisory_xact_lock_shared($5::bigint) FROM mine, settings) \
    SELECT pg_backend_pid(), pg_current_xact_id()::text FROM holder_lock";

/// Notifies the listeners, if there are any, when the transaction is committed; see
/// [`NotificationChannel`](super::listener::NotificationChannel).
///
/// Parameters: channel, message, presence lock
const ROW_NOTIFY: &str = "\
    SELECT CASE WHEN NOT pg_try_advisory_xact_lock($3::bigint) THEN pg_notify($1::text, encode($2::bytea, 'hex')) IS NULL END";

/// Returns whether a transaction holds this holder lock.
///
/// Parameters: holder lock
const HAS_HOLDER_LOCK: &str = "\
    SELECT EXISTS ( \
        SELECT FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted \
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
            AND classid::bigint = (($1::bigint >> 32) & 4294967295) AND objid::bigint = ($1::bigint & 4294967295))";

/// Deletes the dead rows of a batch. A trigger records the largest of their tokens. The batch
/// begins at a random id. Ids are hashes, so a batch is a random part of the table.
///
/// Parameters: first id of the batch, maximum number of rows, minimum microseconds since the row's
/// end
const PURGE: &str = "\
    WITH settings AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)), \
    batch AS MATERIALIZED (SELECT id, greatest(since, until) AS until FROM {locks} WHERE id >= $1::bytea ORDER BY id LIMIT $2::bigint), \
    dead AS MATERIALIZED ( \
        SELECT l.id FROM {locks} AS l \
        WHERE l.id IN (SELECT id FROM batch WHERE until <= {now} - $3::bigint) AND greatest(l.since, l.until) <= {now} - $3::bigint \
        FOR UPDATE SKIP LOCKED), \
    deleted AS (DELETE FROM {locks} AS l USING dead, settings WHERE l.id = dead.id RETURNING l.id) \
    SELECT count(*) FROM deleted";
