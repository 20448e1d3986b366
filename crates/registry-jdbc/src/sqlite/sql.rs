//! All statements of the store. Each statement is one transaction, so a dropped future cannot leave
//! a transaction open. Exceptions are [`SCHEMA`], and [`FENCE`] and [`WRITE_VALUE`] in a caller's
//! transaction.
//!
//! A row is held if it has a claim, `until` is in the future, and its boot is this process's boot.
//! Statements that grant, renew, fence or purge locks, or write a record or a value, also check the
//! boot in the meta row. After a process of another boot has stored its boot id, this process must
//! not grant or renew.
//!
//! The claim `x'2b'` is [`RECORD_MARKER`](super::records::RECORD_MARKER): the row contains the
//! record of several claims.

use std::sync::LazyLock;

/// The version of the tables that this program reads and writes.
pub(super) const VERSION: i64 = 1;

/// Creates the tables. Contains several statements, so the shared connections must not run it.
pub(super) const SCHEMA: &str = include_str!("schema.sql");

/// Returns a row if the oldest and the newest table exist. Without a result, the caller creates the
/// missing tables.
pub(super) const ALL_TABLES: &str = "\
    SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'lock_registry_meta' AND EXISTS ( \
        SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'lock_registry_waiters')";

pub(super) const META: &str =
    "SELECT version, boot, store FROM main.lock_registry_meta WHERE id = 1";

/// Stores the current boot id, if another one is stored.
pub(super) const SAVE_BOOT: &str =
    "UPDATE main.lock_registry_meta SET boot = ?1 WHERE id = 1 AND boot <> ?1";

/// Grants the key with the given token, if the key is free. A key that the given claim itself holds
/// is not free.
///
/// If the key is not free, the statement changes no row. It also changes no row if:
/// - The token is not above all earlier tokens of the key: the wall clock was set back, or the last
///   grant was microseconds ago.
/// - The meta row has another boot. The subquery is then NULL, and IGNORE skips the row.
///
/// The statement has no RETURNING, which would add a tenth to its time.
///
/// Parameters: namespace, key, claim, token, block, label, now, until, boot.
pub(super) const ACQUIRE_AT: &str = "\
    INSERT OR IGNORE INTO main.lock_registry_locks \
        (namespace, key, claim, token, block, label, since, until, boot) \
    VALUES (?1, ?2, ?3, \
        (SELECT ?4 FROM main.lock_registry_meta WHERE id = 1 AND boot = ?9 AND floor < ?4), \
        ?5, ?6, ?7, ?8, ?9) \
    ON CONFLICT (namespace, key) DO UPDATE SET \
        claim = excluded.claim, \
        token = excluded.token, \
        block = excluded.block, \
        label = excluded.label, \
        since = excluded.since, \
        until = excluded.until, \
        boot = excluded.boot \
    WHERE (claim IS NULL OR until <= excluded.since OR boot <> excluded.boot) \
        AND token + block <= excluded.token";

/// Like [`ACQUIRE_AT`], with the smallest token that is at least the given token and above all
/// earlier tokens. Returns this token.
pub(super) const ACQUIRE_ABOVE: &str = "\
    INSERT OR IGNORE INTO main.lock_registry_locks \
        (namespace, key, claim, token, block, label, since, until, boot) \
    VALUES (?1, ?2, ?3, \
        (SELECT max(?4, floor + 1) FROM main.lock_registry_meta WHERE id = 1 AND boot = ?9), \
        ?5, ?6, ?7, ?8, ?9) \
    ON CONFLICT (namespace, key) DO UPDATE SET \
        claim = excluded.claim, \
        token = max(excluded.token, token + block), \
        block = excluded.block, \
        label = excluded.label, \
        since = excluded.since, \
        until = excluded.until, \
        boot = excluded.boot \
    WHERE claim IS NULL OR until <= excluded.since OR boot <> excluded.boot \
    RETURNING token";

/// Returns the boot of the store and the row of a key. If the key has no row, the columns of the
/// lock are NULL.
///
/// Parameters: namespace, key.
pub(super) const CURRENT_GRANT: &str = "\
    SELECT meta.boot, l.key, l.claim, l.token, l.label, l.since, l.until, l.boot \
    FROM main.lock_registry_meta AS meta \
    LEFT JOIN main.lock_registry_locks AS l ON l.namespace = ?1 AND l.key = ?2 \
    WHERE meta.id = 1";

/// Returns the boot of the store, the largest token of all deleted rows, and the columns of a key's
/// row. Without a row, its columns are NULL. Claim and label of another boot are NULL too.
///
/// Parameters: namespace, key, boot.
pub(super) const READ_ROW: &str = "\
    SELECT meta.boot, meta.floor, CASE WHEN l.boot = ?3 THEN l.claim END, \
        l.token, l.block, CASE WHEN l.boot = ?3 THEN l.label END, l.since, l.until \
    FROM main.lock_registry_meta AS meta \
    LEFT JOIN main.lock_registry_locks AS l ON l.namespace = ?1 AND l.key = ?2 \
    WHERE meta.id = 1";

/// Writes the row of a key that several claims can hold, if the row is still as [`READ_ROW`]
/// returned it. The statement compares claim, token and label, and also `until`, because a renewal
/// of an exclusive grant changes nothing else. If another process has purged the row since, the
/// token must be above the tokens of all deleted rows.
///
/// Parameters: namespace, key, claim, token, block, label, since, until, boot, old claim, old
/// token, old label, old `until`.
pub(super) const WRITE_ROW: &str = "\
    INSERT INTO main.lock_registry_locks \
        (namespace, key, claim, token, block, label, since, until, boot) \
    SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9 FROM main.lock_registry_meta WHERE id = 1 AND boot = ?9 \
        AND (floor < ?4 OR EXISTS (SELECT 1 FROM main.lock_registry_locks WHERE namespace = ?1 AND key = ?2)) \
    ON CONFLICT (namespace, key) DO UPDATE SET \
        claim = excluded.claim, \
        token = excluded.token, \
        block = excluded.block, \
        label = excluded.label, \
        since = excluded.since, \
        until = excluded.until, \
        boot = excluded.boot \
    WHERE token = ?11 AND CASE WHEN boot = ?9 THEN claim END IS ?10 \
        AND CASE WHEN boot = ?9 THEN label END IS ?12 AND until = ?13";

/// Like [`CURRENT_GRANT`], for every held key. Parameters: namespace, now, boot.
pub(super) const LIST_GRANTS: &str = "\
    SELECT boot, key, claim, token, label, since, until, boot FROM main.lock_registry_locks \
    WHERE namespace = ?1 AND claim IS NOT NULL AND until > ?2 AND boot = ?3";

/// Ends the grant of one claim. The row stays, for its tokens.
///
/// An expired grant is not changed, and the release returns `NotHeld`. Unused tokens of the block
/// become available again, so that tokens do not grow faster than the clock.
///
/// Parameters: namespace, key, claim, now, boot, tokens used.
pub(super) const RELEASE: &str = "\
    UPDATE main.lock_registry_locks SET claim = NULL, until = ?4, block = min(block, ?6) \
    WHERE namespace = ?1 AND key = ?2 AND claim = ?3 AND until > ?4 AND boot = ?5";

/// Ends the grant of a claim that is alone in its record, like [`RELEASE`]. A record with another
/// claim, or with a grant that is not the newest one of the key, is not changed. The positions are
/// those of [`LockRecord::to_text`](registry_core::LockRecord::to_text).
///
/// Parameters: namespace, key, the first 33 characters of the entry, now, boot, tokens used.
pub(super) const RELEASE_SINGLE_ENTRY: &str = "\
    UPDATE main.lock_registry_locks SET \
        claim = NULL, label = NULL, since = max(since + 1, ?4), until = ?4, block = min(block, ?6) \
    WHERE namespace = ?1 AND key = ?2 AND claim = x'2b' AND until > ?4 AND boot = ?5 \
        AND substr(label, 1, 33) = ?3 AND instr(label, ';') = length(label) \
        AND substr(label, 34, 16) > printf('%016d', ?4) \
        AND substr(label, 82, 19) = printf('%019d', token)";

/// Ends the exclusive grant of a key without a record, whatever claim holds it. Parameters:
/// namespace, key, now, boot.
pub(super) const FORCE_RELEASE: &str = "\
    UPDATE main.lock_registry_locks SET claim = NULL, until = ?3 \
    WHERE namespace = ?1 AND key = ?2 AND claim <> x'2b' AND until > ?3 AND boot = ?4";

/// The condition that a row, or the record in it, contains an unexpired grant of a claim, and that
/// this grant has reserved the token.
///
/// Parameters: namespace, key, claim, token, now, boot, claim as text.
macro_rules! has_grant {
    () => {
        "namespace = ?1 AND key = ?2 AND until > ?5 AND boot = ?6 \
        AND (claim = ?3 AND token <= ?4 AND ?4 < token + block \
            OR claim = x'2b' AND instr(label, ?7) > 0 \
                AND substr(label, instr(label, ?7) + 32, 1) BETWEEN 'a' AND 'z' \
                AND CAST(substr(label, instr(label, ?7) + 33, 16) AS INTEGER) > ?5 \
                AND CAST(substr(label, instr(label, ?7) + 81, 19) AS INTEGER) <= ?4 \
                AND ?4 < CAST(substr(label, instr(label, ?7) + 81, 19) AS INTEGER) \
                    + CAST(substr(label, instr(label, ?7) + 100, 10) AS INTEGER)) \
        AND EXISTS (SELECT 1 FROM main.lock_registry_meta WHERE id = 1 AND boot = ?6)"
    };
}

/// Acquires SQLite's write lock for the caller's transaction, and finds the row with a grant of
/// this claim that has reserved this token. If the row contains a record, the grant is an entry in
/// it. The positions in the text are those of
/// [`LockRecord::to_text`](registry_core::LockRecord::to_text).
///
/// The assignment changes nothing, but counts as a write. Until the transaction ends, no other
/// connection can write, so no other claim can be granted the key.
///
/// Parameters: namespace, key, claim, token, now, boot, claim as text.
pub(crate) const FENCE: &str =
    concat!("UPDATE main.lock_registry_locks SET block = block WHERE ", has_grant!());

/// Writes the value of a key whose row has this claim and token, as in [`FENCE`]. Does not replace
/// a value with a larger token.
///
/// Parameters: namespace, key, claim, token, now, boot, claim as text, value.
pub(super) const WRITE_VALUE: &str = concat!(
    "INSERT INTO main.lock_registry_values (namespace, key, token, value) \
     SELECT ?1, ?2, ?4, ?8 FROM main.lock_registry_locks WHERE ",
    has_grant!(),
    " ON CONFLICT (namespace, key) DO UPDATE SET token = excluded.token, value = excluded.value \
     WHERE token <= excluded.token"
);

/// Returns token and value of a key. Parameters: namespace, key.
pub(super) const READ_VALUE: &str =
    "SELECT token, value FROM main.lock_registry_values WHERE namespace = ?1 AND key = ?2";

/// Registers a claim that waits, or extends its registration.
///
/// Parameters: namespace, key, claim, mode, label, since, until, boot.
pub(super) const REGISTER_WAITER: &str = "\
    INSERT INTO main.lock_registry_waiters (namespace, key, claim, mode, label, since, until, boot) \
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) \
    ON CONFLICT (namespace, key, claim) DO UPDATE SET \
        mode = excluded.mode, since = excluded.since, until = excluded.until, boot = excluded.boot";

/// Deletes the registration of a claim. Parameters: namespace, key, claim.
pub(super) const UNREGISTER_WAITER: &str = "\
    DELETE FROM main.lock_registry_waiters WHERE namespace = ?1 AND key = ?2 AND claim = ?3";

/// Returns the registered claims of a key, or of all keys if the key is NULL. Parameters:
/// namespace, now, boot, key.
pub(super) const WAITERS: &str = "\
    SELECT key, mode, label, since, until FROM main.lock_registry_waiters \
    WHERE namespace = ?1 AND until > ?2 AND boot = ?3 AND (?4 IS NULL OR key = ?4)";

/// Deletes expired registrations and those of other boots. Processes that end without unregistering
/// leave such registrations.
///
/// Parameters: now, boot.
pub(super) const PURGE_WAITERS: &str =
    "DELETE FROM main.lock_registry_waiters WHERE until <= ?1 OR boot <> ?2";

/// Returns the row after which the next search for dead rows starts.
pub(super) const PURGE_POSITION: &str =
    "SELECT sweep_namespace, sweep_key FROM main.lock_registry_meta WHERE id = 1";

/// Searches a range of at most [`PURGE_ROWS_MAX`] rows for dead rows: rows of another boot, and
/// rows whose `until` is at most `free since`. Returns the last row of the range, the number of
/// rows, and the number of dead rows. No result at the end of the table.
///
/// Parameters: namespace and key to start after, free since, boot.
pub(super) const PURGE_CANDIDATES: &str = "\
    WITH candidates AS MATERIALIZED ( \
        SELECT namespace, key, until <= ?3 OR boot <> ?4 AS dead FROM main.lock_registry_locks \
        WHERE (namespace, key) > (?1, ?2) ORDER BY namespace, key LIMIT 512) \
    SELECT namespace, key, (SELECT count(*) FROM candidates), (SELECT sum(dead) FROM candidates) \
    FROM candidates ORDER BY namespace DESC, key DESC LIMIT 1";

/// The limit in [`PURGE_CANDIDATES`].
pub(super) const PURGE_ROWS_MAX: i64 = 512;

/// Deletes the dead rows of a range. A trigger records the largest of their tokens.
///
/// Parameters: namespace and key to start after, free since, boot, namespace and key to end with.
pub(super) const PURGE: &str = "\
    DELETE FROM main.lock_registry_locks \
    WHERE (namespace, key) > (?1, ?2) AND (namespace, key) <= (?5, ?6) \
        AND (until <= ?3 OR boot <> ?4) \
        AND EXISTS (SELECT 1 FROM main.lock_registry_meta WHERE id = 1 AND boot = ?4)";

/// Stores the row after which the next search starts. Parameters: namespace, key.
pub(super) const SAVE_PURGE_POSITION: &str =
    "UPDATE main.lock_registry_meta SET sweep_namespace = ?1, sweep_key = ?2 WHERE id = 1";

/// The text of a statement for at most `items_max` items.
///
/// Unused parameters are NULL and match no row. A few fixed sizes keep every text constant, so that
/// its compiled form stays cached.
#[derive(Debug)]
pub(super) struct BatchStatement {
    pub(super) items_max: usize,
    pub(super) text: String,
}

/// Returns `items` groups of parameters, numbered from `first`. SQLite would number unnumbered
/// parameters from one, because most texts begin with these groups.
fn parameters(first: usize, items: usize, per_item: usize) -> String {
    let group = |item: usize| {
        let numbers = (0..per_item).map(|n| format!("?{}", first + item * per_item + n));
        let numbers = numbers.collect::<Vec<_>>().join(", ");
        if per_item == 1 { numbers } else { format!("({numbers})") }
    };
    (0..items).map(group).collect::<Vec<_>>().join(", ")
}

/// Renews the exclusive grants that have not expired and are in no record.
///
/// Parameters: now, boot, namespace, then for each claim: key, claim, until.
pub(super) static RENEW: LazyLock<[BatchStatement; 3]> = LazyLock::new(|| renew_statements(""));

/// Like [`RENEW`], and returns the renewed claims. Returning a row costs more than renewing it.
pub(super) static RENEW_RETURNING: LazyLock<[BatchStatement; 3]> =
    LazyLock::new(|| renew_statements(" RETURNING claim, until"));

fn renew_statements(returning: &str) -> [BatchStatement; 3] {
    [1, 10, 100].map(|items_max| BatchStatement {
        items_max,
        // The plus signs prevent an index over `wanted`. For many items, the planner would prefer
        // that index to the primary key, and scan the whole namespace.
        text: format!(
            "WITH wanted (key, claim, until) AS (VALUES {}) \
             UPDATE main.lock_registry_locks AS l SET until = max(l.until, wanted.until) \
             FROM wanted \
             WHERE l.namespace = ?3 AND l.key = +wanted.key AND l.claim = +wanted.claim \
                 AND l.until > ?1 AND l.boot = ?2 \
                 AND EXISTS (SELECT 1 FROM main.lock_registry_meta WHERE id = 1 AND boot = ?2)\
             {returning}",
            parameters(4, items_max, 3)
        ),
    })
}

/// Grants all keys if their rows exist and are free, and returns each key with its token, as in
/// [`ACQUIRE_ABOVE`]. Otherwise changes no row.
///
/// Parameters: now, boot, namespace, token, block, label, until, number of keys, then for each key:
/// key, claim.
pub(super) static ACQUIRE_ALL: LazyLock<[BatchStatement; 2]> = LazyLock::new(|| {
    [10, 100].map(|items_max| BatchStatement {
        items_max,
        text: format!(
            "WITH wanted (key, claim) AS (VALUES {}) \
             UPDATE main.lock_registry_locks AS l SET \
                 claim = wanted.claim, token = max(?4, l.token + l.block), block = ?5, label = ?6, since = ?1, until = ?7, boot = ?2 \
             FROM wanted \
             WHERE l.namespace = ?3 AND l.key = +wanted.key \
                 AND ?8 = (SELECT count(*) FROM wanted AS w JOIN main.lock_registry_locks AS free \
                     ON free.namespace = ?3 AND free.key = +w.key \
                     WHERE free.claim IS NULL OR free.until <= ?1 OR free.boot <> ?2) \
                 AND EXISTS (SELECT 1 FROM main.lock_registry_meta WHERE id = 1 AND boot = ?2) \
             RETURNING key, token",
            parameters(9, items_max, 2)
        ),
    })
});

/// Ends the grants of several claims like [`RELEASE`], and returns the keys whose grants it ended.
///
/// Parameters: now, boot, namespace, then for each claim: key, claim, tokens used.
pub(super) static RELEASE_ALL: LazyLock<[BatchStatement; 2]> = LazyLock::new(|| {
    [10, 100].map(|items_max| BatchStatement {
        items_max,
        text: format!(
            "WITH wanted (key, claim, used) AS (VALUES {}) \
             UPDATE main.lock_registry_locks AS l SET \
                 claim = NULL, until = ?1, block = min(l.block, wanted.used) \
             FROM wanted \
             WHERE l.namespace = ?3 AND l.key = +wanted.key AND l.claim = +wanted.claim \
                 AND l.until > ?1 AND l.boot = ?2 \
             RETURNING key",
            parameters(4, items_max, 3)
        ),
    })
});

/// Returns the held keys with their versions. The version of an exclusive grant is its token. The
/// version of a record is `since` with the highest bit set. Parameters: now, boot, namespace, then
/// the keys.
pub(super) static HELD_VERSIONS: LazyLock<[BatchStatement; 3]> = LazyLock::new(|| {
    [1, 8, 64].map(|items_max| BatchStatement {
        items_max,
        text: format!(
            "SELECT key, CASE WHEN claim = x'2b' THEN since | -9223372036854775808 ELSE token END \
             FROM main.lock_registry_locks \
             WHERE claim IS NOT NULL AND until > ?1 AND boot = ?2 AND namespace = ?3 \
                 AND key IN ({})",
            parameters(4, items_max, 1)
        ),
    })
});

/// Returns the smallest of `batches` that fits `items`, or the largest of all.
pub(super) fn smallest_batch_for(
    batches: &'static [BatchStatement],
    items: usize,
) -> &'static BatchStatement {
    batches
        .iter()
        .find(|batch| batch.items_max >= items)
        .or_else(|| batches.last())
        .expect("each statement has at least one batch size")
}

/// Returns the maximum number of items of `batches`.
pub(super) fn batch_items_max(batches: &[BatchStatement]) -> usize {
    batches.iter().map(|batch| batch.items_max).max().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    //! The query plans of the statements. A plan that scans the table is correct but too slow.

    use sqlx::{ConnectOptions, Row, SqliteConnection};

    use crate::sqlite::tests::TestFolder;
    use crate::sqlite::{connection, sql};

    async fn plan(connection: &mut SqliteConnection, statement: &str) -> Vec<String> {
        let explain = sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {statement}"));
        let rows = sqlx::query(explain).fetch_all(connection).await.unwrap();
        rows.iter().map(|row| row.get::<String, _>("detail")).collect()
    }

    #[tokio::test]
    async fn no_statement_of_an_acquisition_scans_the_table() {
        let folder = TestFolder::new();
        let _tables = folder.open_backend().await;
        let mut connection = connection::options(&folder.file()).connect().await.unwrap();
        let renew =
            sql::RENEW.iter().chain(sql::RENEW_RETURNING.iter()).map(|batch| batch.text.as_str());
        let held = sql::HELD_VERSIONS.iter().map(|batch| batch.text.as_str());
        let all =
            sql::ACQUIRE_ALL.iter().chain(sql::RELEASE_ALL.iter()).map(|batch| batch.text.as_str());
        let fixed = [
            sql::ACQUIRE_AT,
            sql::ACQUIRE_ABOVE,
            sql::CURRENT_GRANT,
            sql::RELEASE,
            sql::FORCE_RELEASE,
            sql::FENCE,
            sql::WRITE_VALUE,
            sql::READ_VALUE,
            sql::PURGE_CANDIDATES,
            sql::PURGE,
        ];
        let by_key = ["(namespace=? AND key=?)", "(namespace,key)>(?,?)"];
        for statement in renew.chain(held).chain(all).chain(fixed) {
            for step in plan(&mut connection, statement).await {
                let touches_locks = step.contains("lock_registry_locks") || step.contains(" l ");
                let finds_by_key = by_key.iter().any(|index| step.contains(index));
                assert!(!touches_locks || finds_by_key, "{step}\n{statement}");
                assert!(!step.contains("TEMP B-TREE"), "{step}\n{statement}");
            }
        }
    }
}
