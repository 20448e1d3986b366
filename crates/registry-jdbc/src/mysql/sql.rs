//! All statements of the store.
//!
//! Each statement is one transaction and takes one round trip. So a dropped future cannot leave a
//! transaction open. Exceptions are statements in a transaction of the caller, such as [`FENCE`]
//! and [`RAISE_TOKEN`], and [`ROW_LOCK`] in the transaction of a row lock.
//!
//! A row is held if it has a claim and `until` is in the future. A claim of a session or row lock
//! has no lease. Its `until` is zero, which stays in the past even if the clock is set back.
//!
//! All times are the server's time at the start of the statement. `UTC_TIMESTAMP` returns this time
//! anywhere in a statement, in any time zone, and on replicas too. While the statement waits for a
//! row, the time becomes outdated. An outdated time is safe in each case:
//!
//! - A granted or renewed lease begins at the outdated time. Its holder counts from an earlier
//!   time, before it sent the request. So the lease ends no earlier than its holder assumes.
//! - The lease of another claim seems to have more time left, so it is not considered expired too
//!   early.
//! - A token is above the tokens of the row at the time of the write, whatever the clock shows.
//! - A renewal skips locked rows, so it waits for none. It may prolong a lease that expired after
//!   the statement's start, but only if no other claim was granted the key meanwhile.
//!
//! A row whose claim is [`RECORD_MARKER`] contains the record of several claims in its label. Its
//! `until` is at least the end of the last entry, so statements for one claim find the key held.
//! See [`records`](crate::server::records).
//!
//! The statements do not use RETURNING, because the same text must work in MariaDB and MySQL.

use std::sync::LazyLock;

use registry_core::ClaimId;
use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

use crate::mutant::{self, Mutant, SqlMutation, with_mutation};
use crate::server::statement::with_names;
use crate::server::{
    HolderStatements, RECORD_MARKER, RowStatements, StatementText, ValueStatements,
    WaiterStatements,
};

/// The statements that create the tables. They are sent on an exclusively used connection.
pub(super) const SCHEMA: &str = include_str!("schema.sql");

/// The settings of every connection. They override the server's defaults: for example,
/// `completion_type` could make COMMIT close the connection, and `sql_safe_updates` could refuse
/// renewals. With READ COMMITTED, a statement sees all rows that were committed before it, and a
/// select inside a write locks nothing.
const CONNECTION_SETTINGS: &str = "\
    SET SESSION autocommit = 1, completion_type = 0, sql_safe_updates = 0, time_zone = '+00:00', sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION', \
        innodb_lock_wait_timeout = {lock_timeout}, lock_wait_timeout = {lock_timeout}; \
    SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE";

/// An additional setting for the connection of a session, where a waiting statement would delay all
/// commands. MariaDB computes a limit of zero seconds, and does not wait for rows. MySQL has no
/// limit below one second, and ignores `- 1` as a comment.
pub(super) const SESSION_WAITS_FOR_NO_ROW: &str =
    "SET SESSION innodb_lock_wait_timeout = 1 /*M! - 1 */";

/// The lengths of lists in a prepared statement, for renewals, polled keys and purges. Unused
/// parameters are NULL and match nothing. A few fixed sizes keep the number of prepared statements
/// on the server small.
pub(super) const LIST_SIZES: [usize; 4] = [1, 8, 64, 1024];

/// Returns the smallest of [`LIST_SIZES`] that is at least `items`, or the largest if there is
/// none.
pub(super) fn list_size(items: usize) -> usize {
    LIST_SIZES.into_iter().find(|&size| size >= items).unwrap_or(LIST_SIZES[LIST_SIZES.len() - 1])
}

/// The text of every statement, with the names of the tables filled in.
#[derive(Debug)]
pub(crate) struct MySqlStatements {
    rows: RowStatements,
    pub(super) meta_locking_read: StatementText,
    pub(super) label_size: StatementText,
    pub(super) has_newest_table: StatementText,
    pub(super) holder_connection: StatementText,
    pub(super) kill: StatementText,
    pub(super) renew: StatementText,
    pub(super) unexpired: StatementText,
    pub(super) held: StatementText,
    pub(super) force_release: StatementText,
    pub(super) is_free: StatementText,
    pub(super) clear_ended: StatementText,
    pub(super) insert_row: StatementText,
    pub(super) lock_row: StatementText,
    pub(super) is_current_in_snapshot: StatementText,
    pub(super) raise_token: StatementText,
    pub(super) session_write_claim: StatementText,
    pub(super) session_try_lock: StatementText,
    pub(super) session_is_free: StatementText,
    pub(super) session_ensure_row: StatementText,
    pub(super) session_update_claim: StatementText,
    pub(super) row_write_claim: StatementText,
    pub(super) row_lock: StatementText,
    pub(super) lease_left: StatementText,
    pub(super) purge_candidates: StatementText,
    pub(super) raise_floor: StatementText,
    pub(super) purge: StatementText,
}

impl AsRef<RowStatements> for MySqlStatements {
    fn as_ref(&self) -> &RowStatements {
        &self.rows
    }
}

impl MySqlStatements {
    /// Fills in the names of the tables, which are in `database` and begin with `prefix`.
    pub(super) fn new(database: &str, prefix: &str) -> Self {
        let database = quoted(database);
        let now = mutant::clock(NOW);
        let marker = format!("x'{:032x}'", u128::from_be_bytes(RECORD_MARKER));
        let table = |name: &str| format!("{database}.{prefix}_{name}");
        let names = [
            ("{locks}", table("locks")),
            ("{meta}", table("meta")),
            ("{values}", table("values")),
            ("{waiters}", table("waiters")),
        ];
        let text = |template: &str| {
            let text = template
                .replace("{has_grant}", HAS_GRANT)
                .replace("{has_session_grant}", HAS_SESSION_GRANT)
                .replace("{free}", FREE)
                .replace("{is_in_snapshot}", IS_IN_SNAPSHOT)
                .replace("{holder_connection}", HOLDER_CONNECTION_ID)
                .replace("{marker}", &marker)
                .replace("{writable}", WRITABLE)
                .replace("{now}", &now);
            StatementText::positional(&with_names(&text, &names), &LIST_SIZES)
        };
        let holder_statements = |connection| HolderStatements {
            of_key: text(&holders_query("id = $1", connection)),
            of_namespace: text(&holders_query("namespace = $1", connection)),
        };
        let rows = RowStatements {
            meta: text(META),
            acquire: text(
                &with_mutation(&ACQUIRE, &[CONSTANT_TOKEN]).replace("{end}", "{now} + $7"),
            ),
            reacquire: text(&with_mutation(
                REACQUIRE,
                &[CONSTANT_TOKEN_ON_REACQUIRE, REACQUIRES_HELD_KEY],
            )),
            current_grant: text(CURRENT_GRANT),
            holders: holder_statements(HOLDER_CONNECTION_ID),
            lease_holders_only: Some(holder_statements("NULL")),
            release: text(&with_mutation(RELEASE, &[RELEASE_BY_OTHER_CLAIM])),
            fence: text(&with_mutation(FENCE, &[FENCE_WITHOUT_LOCK])),
            fence_shared_grant: text(
                &with_mutation(FENCE, &[FENCE_WITHOUT_LOCK])
                    .replace("FOR UPDATE", "LOCK IN SHARE MODE"),
            ),
            fence_session_grant: text(FENCE_SESSION_GRANT),
            read_row: text(READ_ROW),
            insert_record: text(INSERT_RECORD),
            write_record: text(WRITE_RECORD),
            write_renewal: text(WRITE_RENEWAL),
            write_grant: text(WRITE_RECORD),
            acquire_released_row: text(&with_mutation(
                ACQUIRE_RELEASED_ROW,
                &[REACQUIRES_HELD_KEY],
            )),
            release_single_entry: text(RELEASE_SINGLE_ENTRY),
            values: ValueStatements {
                read: text(READ_VALUE),
                write: text(&WRITE_VALUE.replace("{condition}", HAS_GRANT)),
                write_in_session: text(&WRITE_VALUE.replace("{condition}", HAS_SESSION_GRANT)),
            },
            waiters: WaiterStatements {
                register: text(REGISTER_WAITER),
                unregister: text(
                    "DELETE FROM {waiters} WHERE id = $1 AND claim = $2 AND {writable}",
                ),
                of_key: text(&WAITERS.replace("{condition}", "id = $1")),
                of_namespace: text(&WAITERS.replace("{condition}", "namespace = $1")),
                purge: text("DELETE FROM {waiters} WHERE until <= {now} AND {writable}"),
            },
        };
        Self {
            rows,
            meta_locking_read: text(&format!("{META} LOCK IN SHARE MODE")),
            label_size: text(QUERY_LABEL_SIZE),
            has_newest_table: text("SELECT 1 FROM {waiters} WHERE FALSE"),
            holder_connection: text(HOLDER_CONNECTION),
            kill: text("KILL CONNECTION $1"),
            renew: text(&with_mutation(RENEW, &[RENEWAL_REVIVES])),
            unexpired: text(&with_mutation(UNEXPIRED, &[RENEWAL_REVIVES])),
            held: text(HELD),
            force_release: text(FORCE_RELEASE),
            is_free: text(IS_FREE),
            clear_ended: text(CLEAR_ENDED),
            insert_row: text(INSERT_ROW),
            lock_row: text(LOCK_ROW),
            is_current_in_snapshot: text(IS_CURRENT_IN_SNAPSHOT),
            raise_token: text(RAISE_TOKEN),
            session_write_claim: text(&ACQUIRE.replace("{end}", "0")),
            session_try_lock: text(&with_mutation(SESSION_TRY_LOCK, &[SESSION_SKIPS_CLAIM_CHECK])),
            session_is_free: text(SESSION_IS_FREE),
            session_ensure_row: text(SESSION_ENSURE_ROW),
            session_update_claim: text(SESSION_UPDATE_CLAIM),
            row_write_claim: text(ROW_WRITE_CLAIM),
            row_lock: text(ROW_LOCK),
            lease_left: text(LEASE_LEFT),
            purge_candidates: text(PURGE_CANDIDATES),
            raise_floor: text(RAISE_FLOOR),
            purge: text(PURGE),
        }
    }
}

const RELEASE_BY_OTHER_CLAIM: SqlMutation =
    SqlMutation::new(Mutant::ReleaseByOtherClaim, "claim = $2", "claim <> $2");
const RENEWAL_REVIVES: SqlMutation =
    SqlMutation::new(Mutant::RenewalRevives, "until > {now}", "until IS NOT NULL");
// The replacements omit the clock, because the clock's growing values would hide the bug.
const CONSTANT_TOKEN: SqlMutation = SqlMutation::new(
    Mutant::ConstantToken,
    "GREATEST(VALUES(token), {locks}.token + {locks}.block)",
    "GREATEST(0, {locks}.token)",
);
const CONSTANT_TOKEN_ON_REACQUIRE: SqlMutation =
    SqlMutation::new(Mutant::ConstantToken, "GREATEST({now}, token + block)", "GREATEST(0, token)");
const REACQUIRES_HELD_KEY: SqlMutation =
    SqlMutation::new(Mutant::ReacquiresHeldKey, "(claim IS NULL OR until <= {now})", "TRUE");
const FENCE_WITHOUT_LOCK: SqlMutation =
    SqlMutation::new(Mutant::FenceWithoutLock, "FOR UPDATE", "");
const SESSION_SKIPS_CLAIM_CHECK: SqlMutation =
    SqlMutation::new(Mutant::SessionSkipsClaimCheck, "AND l.claim = $2", "AND $2 IS NOT NULL");

/// Returns [`SCHEMA`] for names that begin with `prefix`.
pub(super) fn schema(prefix: &str) -> SqlStr {
    AssertSqlSafe(SCHEMA.replace("lock_registry", prefix)).into_sql_str()
}

/// Returns [`CONNECTION_SETTINGS`] with this lock timeout, in whole seconds: the server accepts no
/// fractions.
pub(super) fn connection_settings(lock_timeout_seconds: u64) -> SqlStr {
    AssertSqlSafe(CONNECTION_SETTINGS.replace("{lock_timeout}", &lock_timeout_seconds.to_string()))
        .into_sql_str()
}

pub(super) fn quoted(identifier: &str) -> String {
    format!("`{}`", identifier.replace('`', "``"))
}

/// The server's time in microseconds since 1970, as an integer. Unlike `UNIX_TIMESTAMP`, the
/// expression supports years after 2038 on all servers.
pub(super) const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// The condition that the existing row, with which an insert conflicts, is free.
const FREE: &str = "{locks}.claim IS NULL OR {locks}.until <= VALUES(since)";

/// The condition that the server is writable. A read-only replica still accepts writes of
/// privileged users. Without this condition, such users could acquire locks on the replica that are
/// held on the primary. Servers return a number or a string, so the cast is necessary.
pub(super) const WRITABLE: &str = "CAST(@@global.read_only AS CHAR) IN ('0', 'OFF')";

/// Returns the version, the id of the tables, and whether the server is writable. The fourth column
/// is always false, because the query cannot show how old the snapshot of a transaction is.
const META: &str = "SELECT version, store, CAST({writable} AS SIGNED), 0 FROM {meta} WHERE id = 1";

/// Returns the size of the column for labels and records.
///
/// Parameters: database, table.
const QUERY_LABEL_SIZE: &str = "\
    SELECT CAST(character_octet_length AS SIGNED) FROM information_schema.columns \
    WHERE table_schema = $1 AND table_name = $2 AND column_name = 'label'";

/// Grants the key if it is free. A key that the given claim itself holds is not free. The response
/// contains the token as the *last insert id*. Zero means that nothing was granted. The affected
/// row count does not show a grant, because sqlx counts a row that was found and left unchanged.
///
/// If the key is held in the statement's snapshot, nothing is selected. So a busy attempt costs no
/// write, no lock and no flush, and the last insert id stays zero. If the key is free in the
/// snapshot, the statement inserts a row or conflicts with an existing row. If the existing row is
/// held by now, all columns keep their values, and the last insert id is reset to zero.
///
/// Assignments run from left to right and see earlier assignments. So `claim` and `until`, which
/// show whether the row is free, change last. The assignment of `until` recognises this grant by
/// the new `claim` and `since`.
///
/// The new token is above the tokens of this row, both in the snapshot and at the write. It is also
/// above the tokens of all purged rows. In a snapshot, either the row exists or the floor covers
/// its tokens.
///
/// With `{end}` zero instead of the end of a lease, the statement writes the claim of a session.
///
/// Parameters: id, namespace, key, claim, block, label, lease.
static ACQUIRE: LazyLock<String> = LazyLock::new(|| {
    let keep_unless_free =
        |column: &str| format!("{column} = IF({{free}}, VALUES({column}), {{locks}}.{column})");
    format!(
        "INSERT INTO {{locks}} (id, namespace, lock_key, claim, token, block, label, since, until) \
         SELECT $1, $2, $3, $4, \
             LAST_INSERT_ID(GREATEST({{now}}, meta.floor + 1, COALESCE(seen.token + seen.block, 0))), \
             $5, $6, {{now}}, {{end}} \
         FROM {{meta}} AS meta LEFT JOIN {{locks}} AS seen ON seen.id = $1 \
         WHERE meta.id = 1 AND (seen.claim IS NULL OR seen.until <= {{now}}) AND {{writable}} \
         ON DUPLICATE KEY UPDATE \
             token = IF({{free}}, \
                 LAST_INSERT_ID(GREATEST(VALUES(token), {{locks}}.token + {{locks}}.block)), \
                 {{locks}}.token + LAST_INSERT_ID(0)), \
             {}, {}, {}, {}, \
             until = IF({{locks}}.claim = VALUES(claim) AND {{locks}}.since = VALUES(since), \
                 VALUES(until), {{locks}}.until)",
        keep_unless_free("block"),
        keep_unless_free("label"),
        keep_unless_free("since"),
        keep_unless_free("claim"),
    )
});

/// Grants the key like [`ACQUIRE`], if a free row exists. Otherwise the *last insert id* is zero.
/// The server needs less than half of the time of `ACQUIRE`, because the statement neither reads a
/// snapshot nor tries to insert. The statement may wait for a locked row, so it is only for keys
/// that this process expects to be free.
///
/// A token above the row's own tokens is above all earlier tokens of the key: a new row starts
/// above the tokens of deleted rows. `token` is assigned first, because it must read the old
/// `block`.
///
/// Parameters: id, claim, block, label, lease.
const REACQUIRE: &str = "\
    UPDATE {locks} SET \
        token = LAST_INSERT_ID(GREATEST({now}, token + block)), \
        block = $3, label = $4, since = {now}, claim = $2, until = {now} + $5 \
    WHERE id = $1 AND (claim IS NULL OR until <= {now}) AND {writable}";

/// Returns the current grant of a key. Parameter: id.
const CURRENT_GRANT: &str = "\
    SELECT claim, token, label, {now} - since, until - {now} \
    FROM {locks} \
    WHERE id = $1 AND claim IS NOT NULL AND until > {now}";

/// Returns the query for holders of one key or of a namespace. A holder has a lease, or a
/// connection that has the row locked and holds the named lock [`holder_lock_name`].
///
/// Parameter: id or namespace.
fn holders_query(condition: &str, holder_connection: &str) -> String {
    format!(
        "SELECT lock_key, token, label, {{now}} - since, IF(until > {{now}}, until - {{now}}, NULL), claim, {{now}} \
         FROM {{locks}} \
         WHERE {condition} AND claim IS NOT NULL AND (until > {{now}} OR {holder_connection} IS NOT NULL)"
    )
}

/// Returns the claim in the row, and the id of the connection that has the row locked for this
/// claim. Parameter: id.
const HOLDER_CONNECTION: &str = "SELECT claim, CAST({holder_connection} AS SIGNED) FROM {locks} WHERE id = $1 AND claim IS NOT NULL";

/// The id of the connection that has the row locked for its claim, or NULL.
const HOLDER_CONNECTION_ID: &str = "IS_USED_LOCK(CONCAT('lock_registry_row_', LOWER(HEX(claim))))";

/// Returns the name of the holder lock: a named lock that a connection holds while it has the row
/// locked for this claim. The name is unique.
pub(super) fn holder_lock_name(claim: ClaimId) -> String {
    format!("lock_registry_row_{claim}")
}

/// Renews the grants that have not expired.
///
/// A row that another transaction has locked, perhaps for a fence, is skipped, so that it does not
/// delay other renewals. An update cannot skip rows, so an inner select finds and locks them. The
/// limit prevents the server from merging the inner select into the update. The order of tables and
/// the index are forced: in a small table, the server would otherwise read and lock all rows.
///
/// A claim's id is random and belongs to one key, so the two lists need not be one list of pairs.
///
/// Parameters: ids, claims, limit, lease.
const RENEW: &str = "\
    UPDATE ( \
        SELECT id FROM {locks} FORCE INDEX (PRIMARY) \
        WHERE id IN ($1...) AND claim IN ($2...) AND until > {now} AND {writable} \
        LIMIT $3 FOR UPDATE SKIP LOCKED) AS found \
    STRAIGHT_JOIN {locks} AS l FORCE INDEX (PRIMARY) ON l.id = found.id \
    SET l.until = GREATEST(l.until, {now} + $4)";

/// Returns the claims that hold one of the keys, with the times left of their leases, and whether
/// the server is writable. Parameters: ids.
const UNEXPIRED: &str = "\
    SELECT claim, until - {now}, CAST({writable} AS SIGNED) FROM {locks} \
    WHERE id IN ($1...) AND claim IS NOT NULL AND until > {now}";

/// Returns the ids of the held keys, with the versions of their rows. The version is the token of
/// the grant, or `since` of a record. Parameters: ids.
const HELD: &str = "\
    SELECT id, IF(claim = {marker}, since, token) FROM {locks} WHERE id IN ($1...) AND claim IS NOT NULL AND until > {now}";

/// Ends the grant of one claim. The row stays, for its tokens.
///
/// An expired grant is not changed: its key is already free, and the result is that the claim held
/// nothing. The affected row count is the number of ended grants: the old `until` is in the future,
/// so every found row changes.
///
/// Unused tokens of the block become available again, so that tokens do not get ahead of the clock.
///
/// Parameters: id, claim, tokens used.
const RELEASE: &str = "\
    UPDATE {locks} SET claim = NULL, until = {now}, block = LEAST(block, $3) \
    WHERE id = $1 AND claim = $2 AND until > {now} AND {writable}";

/// Returns the columns of the key's row that requests can change, the server's time, and the
/// largest token of all purged rows. Without a row, its columns are NULL.
///
/// Parameters: id.
const READ_ROW: &str = "\
    SELECT l.claim, l.token, l.block, l.label, l.since, l.until, {now}, meta.floor \
    FROM {meta} AS meta LEFT JOIN {locks} AS l ON l.id = $1 WHERE meta.id = 1";

/// Creates a row with a record, if the key has no row and the new token is above the tokens of all
/// purged rows.
///
/// Parameters: id, claim, token, block, label, since, until, namespace, key.
const INSERT_RECORD: &str = "\
    INSERT IGNORE INTO {locks} (id, namespace, lock_key, claim, token, block, label, since, until) \
    SELECT $1, $8, $9, $2, $3, $4, $5, $6, $7 FROM {meta} WHERE id = 1 AND floor < $3 AND {writable}";

/// Writes a row, if the row is unchanged since it was read. In a row with a record, each write
/// changes `since` or `until`.
///
/// Parameters: id, claim, token, block, label, since, until, the read claim, token, since and
/// until.
const WRITE_RECORD: &str = "\
    UPDATE {locks} SET claim = $2, token = $3, block = $4, label = $5, since = $6, until = $7 \
    WHERE id = $1 AND claim <=> $8 AND token = $9 AND since = $10 AND until = $11 AND {writable}";

/// Grants the key like [`REACQUIRE`], to a claim that is then alone in a record. The statement
/// writes the text of the record with the times and the token of the grant. `label` is assigned
/// after `token`, which it contains.
///
/// Parameters: id, block, lease, the first 33 bytes of the entry, its bytes from the token block
/// on.
const ACQUIRE_RELEASED_ROW: &str = "\
    UPDATE {locks} SET \
        token = LAST_INSERT_ID(GREATEST({now}, token + block)), \
        block = $2, \
        label = CONCAT($4, LPAD({now} + $3, 16, '0'), LPAD({now}, 16, '0'), REPEAT('0', 16), LPAD(token, 19, '0'), $5), \
        since = GREATEST({now}, since + 1), claim = {marker}, until = {now} + $3 \
    WHERE id = $1 AND (claim IS NULL OR until <= {now}) AND {writable}";

/// Ends the grant of a claim that is alone in its record, like [`RELEASE`]. A record with another
/// claim, or with a grant that is not the newest one of the key, is not changed.
///
/// Parameters: id, the first 33 bytes of the entry, tokens used.
const RELEASE_SINGLE_ENTRY: &str = "\
    UPDATE {locks} SET \
        claim = NULL, label = NULL, since = GREATEST({now}, since + 1), until = {now}, block = LEAST(block, $3) \
    WHERE id = $1 AND claim = {marker} AND until > {now} AND {writable} \
        AND LOCATE($2, label) = 1 AND LOCATE(';', label) = LENGTH(label) \
        AND SUBSTR(label, 34, 16) > LPAD({now}, 16, '0') AND SUBSTR(label, 82, 19) = LPAD(token, 19, '0')";

/// Like [`WRITE_RECORD`], but skips a row that another transaction has locked. The row is found as
/// in [`RENEW`].
const WRITE_RENEWAL: &str = "\
    UPDATE ( \
        SELECT id FROM {locks} FORCE INDEX (PRIMARY) \
        WHERE id = $1 AND claim <=> $8 AND token = $9 AND since = $10 AND until = $11 AND {writable} \
        LIMIT 1 FOR UPDATE SKIP LOCKED) AS found \
    STRAIGHT_JOIN {locks} AS l FORCE INDEX (PRIMARY) ON l.id = found.id \
    SET l.claim = $2, l.token = $3, l.block = $4, l.label = $5, l.since = $6, l.until = $7";

/// Ends the lease on the key, whatever claim holds it. Parameter: id.
const FORCE_RELEASE: &str = "\
    UPDATE {locks} SET claim = NULL, until = {now} \
    WHERE id = $1 AND claim IS NOT NULL AND until > {now} AND {writable}";

/// Finds the row with this claim and token, or with a record that contains them, and locks it until
/// the caller's transaction ends. The inner select locks nothing, and shows whether the
/// transaction's snapshot contains the grant. The inner select depends on the outer select, so that
/// the snapshot begins only after the wait of the outer select.
///
/// Parameters: id, claim, token, first 33 bytes of the entry.
const FENCE: &str = "\
    SELECT CAST(EXISTS ( \
        SELECT 1 FROM {locks} AS seen WHERE seen.id = l.id AND ( \
            seen.claim = l.claim AND seen.token = l.token \
            OR l.claim = {marker} AND (seen.claim = $2 OR seen.claim = {marker} AND LOCATE($4, seen.label) > 0)) \
    ) AS SIGNED) FROM {locks} AS l WHERE {has_grant} FOR UPDATE";

/// The condition that the row `l` has the grant of a claim, or a record that contains it.
///
/// In an entry of a record, the end of the lease begins at offset 33, the token at 81, and the
/// token block at 100. Offsets begin at zero.
///
/// Parameters: id, claim, token, first 33 bytes of the entry.
const HAS_GRANT: &str = "\
    l.id = $1 AND l.until > {now} AND CASE \
        WHEN l.claim = $2 THEN l.token <= $3 AND $3 < l.token + l.block \
        WHEN l.claim = {marker} AND LOCATE($4, l.label) > 0 THEN \
            CAST(SUBSTR(l.label, LOCATE($4, l.label) + 33, 16) AS SIGNED) > {now} \
            AND CAST(SUBSTR(l.label, LOCATE($4, l.label) + 81, 19) AS SIGNED) <= $3 \
            AND CAST(SUBSTR(l.label, LOCATE($4, l.label) + 81, 19) AS SIGNED) \
                + CAST(SUBSTR(l.label, LOCATE($4, l.label) + 100, 10) AS SIGNED) > $3 END";

/// As [`HAS_GRANT`], for a lock that ends with a connection. The condition stays true after the end
/// of the connection. This is safe, because the next grant must change the row first.
///
/// Parameters: id, claim, token.
const HAS_SESSION_GRANT: &str =
    "l.id = $1 AND l.claim = $2 AND l.token <= $3 AND $3 < l.token + l.block";

/// Returns token, value and the server's time. Token and value are null if the key has no value.
///
/// Parameter: id.
const READ_VALUE: &str = "\
    SELECT v.token, v.value, {now} FROM (SELECT 1 AS one) AS one LEFT JOIN {values} AS v ON v.id = $1";

/// Writes the value of a key whose row has this claim and token, unless the stored value has a
/// larger token. The row lock keeps the key from being granted to another claim until the value is
/// committed. The row lock is shared, because the connection of the holder may also have one.
///
/// Parameters: id, claim, token, first 33 bytes of the entry, namespace, key, value.
const WRITE_VALUE: &str = "\
    INSERT INTO {values} (id, namespace, lock_key, token, value) \
    SELECT $1, $5, $6, $3, $7 FROM {locks} AS l WHERE {condition} AND $4 IS NOT NULL AND {writable} \
        AND NOT EXISTS (SELECT 1 FROM {values} AS newer WHERE newer.id = $1 AND newer.token > $3) \
    LOCK IN SHARE MODE \
    ON DUPLICATE KEY UPDATE token = VALUES(token), value = VALUES(value)";

/// Registers a claim that waits, or extends its registration.
///
/// Parameters: id, namespace, key, claim, mode, label, microseconds waited, lease.
const REGISTER_WAITER: &str = "\
    INSERT INTO {waiters} (id, claim, namespace, lock_key, mode, label, since, until) \
    SELECT $1, $4, $2, $3, $5, $6, {now} - $7, {now} + $8 FROM DUAL WHERE {writable} \
    ON DUPLICATE KEY UPDATE mode = VALUES(mode), since = VALUES(since), until = VALUES(until)";

/// Returns the registered claims of one key, or of a namespace.
///
/// Parameter: id or namespace.
const WAITERS: &str = "\
    SELECT lock_key, mode, label, {now} - since, until - {now} FROM {waiters} WHERE {condition} AND until > {now}";

/// Whether a select without locks sees the row `l` that a locking select has found.
const IS_IN_SNAPSHOT: &str = "\
    CAST(EXISTS (SELECT 1 FROM {locks} AS seen WHERE seen.id = l.id AND seen.claim = l.claim AND seen.token = l.token) AS SIGNED)";

/// Returns whether no lease is held on the key, whether the row still contains a claim, and whether
/// the server is writable. No result if there is no row.
///
/// Parameter: id.
const IS_FREE: &str = "\
    SELECT CAST(claim IS NULL OR until <= {now} AS SIGNED), CAST(claim IS NOT NULL AS SIGNED), CAST({writable} AS SIGNED) \
    FROM {locks} WHERE id = $1";

/// Removes a claim that ended without a write: by expiry, or with a connection. The newest version
/// of the row is then younger than all writes of that holder, so [`IS_CURRENT_IN_SNAPSHOT`] detects
/// an older snapshot. Skips a row that another transaction has locked. The row is found as in
/// [`RENEW`].
///
/// Parameter: id.
const CLEAR_ENDED: &str = "\
    UPDATE ( \
        SELECT id FROM {locks} FORCE INDEX (PRIMARY) \
        WHERE id = $1 AND claim IS NOT NULL AND until <= {now} AND {writable} \
        LIMIT 1 FOR UPDATE SKIP LOCKED) AS found \
    STRAIGHT_JOIN {locks} AS l FORCE INDEX (PRIMARY) ON l.id = found.id \
    SET l.claim = NULL";

/// Creates a free row, unless the key has a row or the server is read-only.
///
/// Parameters: id, namespace, key.
const INSERT_ROW: &str = "\
    INSERT IGNORE INTO {locks} (id, namespace, lock_key, claim, token, block, label, since, until) \
    SELECT $1, $2, $3, NULL, GREATEST(clock.now, clock.floor + 1), 1, NULL, clock.now, clock.now \
    FROM (SELECT {now} AS now, floor FROM {meta} WHERE id = 1 AND {writable}) AS clock";

/// Locks the row if no other transaction has locked it. Returns whether the row contains a lease,
/// the next token, and claim and token of the newest grant.
///
/// Parameter: id.
const LOCK_ROW: &str = "\
    SELECT CAST(claim IS NOT NULL AND until > {now} AS SIGNED), CAST(GREATEST({now}, token + block) AS SIGNED), claim, token \
    FROM {locks} WHERE id = $1 FOR UPDATE SKIP LOCKED";

/// Returns the id of the tables, whether the snapshot of the transaction contains the current
/// version of the locked row, and whether the server is writable. This is a separate statement:
/// combined with [`LOCK_ROW`], it would begin the snapshot even if another transaction has locked
/// the row.
///
/// Parameters: id, claim, token.
const IS_CURRENT_IN_SNAPSHOT: &str = "\
    SELECT store, CAST(EXISTS (SELECT 1 FROM {locks} WHERE id = $1 AND claim <=> $2 AND token = $3) AS SIGNED), CAST({writable} AS SIGNED) FROM {meta} WHERE id = 1";

/// Writes the token of a lock that the caller's transaction acquires, and leaves the row free.
///
/// Parameters: id, token.
const RAISE_TOKEN: &str = "\
    UPDATE {locks} SET claim = NULL, token = $2, block = 1, label = NULL, since = {now}, until = {now} WHERE id = $1";

/// Acquires a named lock for the session. Returns the server's time if the row still contains a
/// claim of this session and the server is writable. Writes nothing.
///
/// The row is read only after the result of the lock request, because the row's id in the query
/// depends on that result. The first read of a statement determines its snapshot. So the subquery
/// sees all writes of earlier holders of the lock. The limit prevents servers from turning the
/// subquery into a join.
///
/// Parameters: id, claim, name, seconds.
const SESSION_TRY_LOCK: &str = "\
    SELECT CONNECTION_ID(), tried.got, \
        (SELECT {now} FROM {locks} AS l \
        WHERE l.id = IF(tried.got = 1, CAST($1 AS BINARY(32)), NULL) AND l.claim = $2 AND {writable} LIMIT 1) \
    FROM (SELECT CAST(GET_LOCK($3, $4) AS SIGNED) AS got) AS tried";

/// Returns whether the named lock is free and the row contains no lease.
///
/// Parameters: name, id.
const SESSION_IS_FREE: &str = "\
    SELECT CAST(IS_FREE_LOCK($1) AND NOT EXISTS ( \
        SELECT 1 FROM {locks} WHERE id = $2 AND claim IS NOT NULL AND until > {now}) AS SIGNED)";

/// Writes a claim whose token was reserved by an earlier claim of the same session.
///
/// Parameters: id, claim, token, block, earlier claim.
const SESSION_UPDATE_CLAIM: &str = "\
    UPDATE {locks} SET claim = $2, token = $3, block = $4 \
    WHERE id = $1 AND claim = $5 AND token <= $3 AND $3 < token + block";

/// If the row was purged, creates it again with the claim of the session that holds the lock. An
/// existing row stays unchanged, and the statement does not wait for a fence that has locked the
/// row.
///
/// Parameters: id, namespace, key, claim, token, block.
const SESSION_ENSURE_ROW: &str = "\
    INSERT IGNORE INTO {locks} (id, namespace, lock_key, claim, token, block, label, since, until) \
    SELECT $1, $2, $3, $4, $5, $6, NULL, {now}, 0 FROM DUAL";

/// Like [`FENCE`], for a lock that ends with a connection. The row lock is shared, because the
/// connection of the holder may also have one.
///
/// Parameters: id, claim, token.
const FENCE_SESSION_GRANT: &str = "\
    SELECT {is_in_snapshot} FROM {locks} AS l WHERE {has_session_grant} LOCK IN SHARE MODE";

/// Writes a claim and a larger token to the row, unless the row contains a lease or a transaction
/// has locked it. The token is the *last insert id*; zero means that nothing was written. The
/// statement does not wait. Clients that request a lease still find the row free. The row is found
/// as in [`RENEW`].
///
/// Parameters: id, claim, block, label.
const ROW_WRITE_CLAIM: &str = "\
    UPDATE ( \
        SELECT id FROM {locks} FORCE INDEX (PRIMARY) \
        WHERE id = $1 AND (claim IS NULL OR until <= {now}) AND {writable} \
        LIMIT 1 FOR UPDATE SKIP LOCKED) AS found \
    STRAIGHT_JOIN {locks} AS l FORCE INDEX (PRIMARY) ON l.id = found.id \
    SET l.token = LAST_INSERT_ID(GREATEST({now}, l.token + l.block)), l.claim = $2, l.block = $3, l.label = $4, \
        l.since = {now}, l.until = 0";

/// Locks the row for a transaction, if the row contains the claim.
///
/// The row lock is shared. It permits a fence of the holder. It excludes statements that write a
/// claim or grant a lease, and [`LOCK_ROW`].
///
/// Parameters: id, claim.
const ROW_LOCK: &str = "\
    SELECT CONNECTION_ID() FROM {locks} WHERE id = $1 AND claim = $2 LOCK IN SHARE MODE";

/// Returns the time left of the lease on the key, or NULL without a lease. No result if there is no
/// row.
///
/// Parameter: id.
const LEASE_LEFT: &str = "\
    SELECT IF(claim IS NOT NULL AND until > {now}, until - {now}, NULL) FROM {locks} WHERE id = $1";

/// Returns the dead rows of a batch, each with its largest token. A batch begins at a random id.
/// Ids are hashes, so a batch is a random part of the table.
///
/// Parameters: first id of the batch, maximum number of rows, minimum microseconds since the row's
/// end.
const PURGE_CANDIDATES: &str = "\
    SELECT batch.id, batch.token + batch.block - 1 \
    FROM (SELECT id, token, block, GREATEST(since, until) AS until FROM {locks} WHERE id >= $1 ORDER BY id LIMIT $2) AS batch \
    WHERE batch.until <= {now} - $3";

/// Records the largest token of rows before [`PURGE`] deletes them. Between the two statements,
/// both the floor and the rows cover the tokens.
///
/// Parameters: token.
const RAISE_FLOOR: &str = "UPDATE {meta} SET floor = $1 WHERE id = 1 AND floor < $1 AND {writable}";

/// Deletes dead rows whose tokens the floor covers. Checks each row again, because its key may have
/// been granted since [`PURGE_CANDIDATES`].
///
/// Parameters: ids, minimum microseconds since the row's end, token.
const PURGE: &str = "\
    DELETE l FROM {locks} AS l FORCE INDEX (PRIMARY) \
    WHERE l.id IN ($1...) AND GREATEST(l.since, l.until) <= {now} - $2 AND l.token + l.block - 1 <= $3 AND {writable}";
