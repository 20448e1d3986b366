//! Every statement of the Spring layout.
//!
//! `{lock}` is Spring's table. `{locks}` is the native table, where each key has a row for what
//! Spring's table does not store: tokens, label and the key itself. Times are those of the start of
//! a statement, which is safe for the same reasons as in the native statements.
//!
//! A row is held unless its end is before the server's time. The statements contain the region,
//! which was validated: ASCII without quotes.

use std::fmt::Write as _;
use std::time::Duration;

use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

use super::super::sql::{MySqlStatementText, NOW, SIZES, WRITABLE, quoted};
use crate::server::spring::Generation;

/// The text of every statement, with the names of the tables filled in.
#[derive(Debug)]
pub(super) struct MySqlSpringStatements {
    acquire: String,
    generation: Generation,
    pub(super) current_grant: MySqlStatementText,
    pub(super) list: MySqlStatementText,
    pub(super) renew: [MySqlStatementText; SIZES.len()],
    pub(super) renew_native: [MySqlStatementText; SIZES.len()],
    pub(super) unexpired: [MySqlStatementText; SIZES.len()],
    pub(super) release: MySqlStatementText,
    pub(super) clear: MySqlStatementText,
    pub(super) force_release: MySqlStatementText,
    pub(super) fence: MySqlStatementText,
}

impl MySqlSpringStatements {
    /// Fills in the names. The native tables are in `database` and begin with `prefix`; `lock` is
    /// Spring's table, quoted.
    pub(super) fn new(
        database: &str,
        prefix: &str,
        lock: &str,
        region: &str,
        generation: Generation,
    ) -> Self {
        let (end, dates, extend, ttl) = match generation {
            Generation::V7 => (
                "l.EXPIRED_AFTER".to_owned(),
                "CREATED_DATE, EXPIRED_AFTER",
                "l.EXPIRED_AFTER = GREATEST(l.EXPIRED_AFTER, {utc} + INTERVAL ? MICROSECOND)",
                Duration::ZERO,
            ),
            Generation::V6 { ttl } => (
                "l.CREATED_DATE + INTERVAL {ttl} MICROSECOND".to_owned(),
                "CREATED_DATE",
                "l.CREATED_DATE = GREATEST(l.CREATED_DATE, {utc} + INTERVAL ? MICROSECOND)",
                ttl,
            ),
        };
        let database = quoted(database);
        let fill = |template: &str, items: usize| {
            template
                .replace("{items}", &vec!["?"; items].join(", "))
                .replace("{dates}", dates)
                .replace("{extend}", extend)
                .replace("{end}", &end)
                .replace("{ttl}", &ttl.as_micros().to_string())
                .replace("{lock}", lock)
                .replace("{region}", region)
                .replace("{locks}", &format!("{database}.{prefix}_locks"))
                .replace("{meta}", &format!("{database}.{prefix}_meta"))
                .replace("{writable}", WRITABLE)
                .replace("{utc}", "UTC_TIMESTAMP(6)")
                .replace("{now}", NOW)
        };
        let one = |template: &str| MySqlStatementText::new(&fill(template, 1));
        let sized =
            |template: &str| SIZES.map(|items| MySqlStatementText::new(&fill(template, items)));
        Self {
            acquire: {
                let current_grant =
                    CURRENT_GRANT.replacen('?', "{id}", 1).replacen('?', "'{key}'", 1);
                fill(&format!("{ACQUIRE}; {current_grant}"), 1)
            },
            generation,
            current_grant: one(CURRENT_GRANT),
            list: one(LIST),
            renew: sized(RENEW),
            renew_native: sized(RENEW_NATIVE),
            unexpired: sized(UNEXPIRED),
            release: one(RELEASE),
            clear: one(CLEAR),
            force_release: one(FORCE_RELEASE),
            fence: one(FENCE),
        }
    }

    /// Returns the transaction that grants a key unless it is held, followed by the query of the
    /// holder.
    pub(super) fn acquire(&self, values: &AcquireValues<'_>) -> SqlStr {
        let lease = micros(values.lease);
        let (dates, begin) = match self.generation {
            Generation::V7 => {
                let until = format!("UTC_TIMESTAMP(6) + INTERVAL {lease} MICROSECOND");
                (format!("UTC_TIMESTAMP(6), {until}"), format!("EXPIRED_AFTER = {until}"))
            }
            Generation::V6 { .. } => {
                let since = format!(
                    "UTC_TIMESTAMP(6) + INTERVAL ({}) MICROSECOND",
                    self.stored_offset(values.lease)
                );
                (since.clone(), format!("CREATED_DATE = {since}"))
            }
        };
        let text = self
            .acquire
            .replace("{begin}", &begin)
            .replace("{dates of}", &dates)
            .replace("{key}", values.lock_key)
            .replace("{spring_client}", values.spring_client)
            .replace("{id}", &hex(values.id))
            .replace("{namespace}", &hex(values.namespace))
            .replace("{name}", &hex(values.key))
            .replace("{claim}", &hex(values.claim))
            .replace("{block}", &values.block.to_string())
            .replace("{label}", &values.label.map_or_else(|| "NULL".to_owned(), hex))
            .replace("{lease}", &lease.to_string());
        AssertSqlSafe(text).into_sql_str()
    }

    /// Returns what is added to the clock for a lease, in microseconds.
    pub(super) fn stored_offset(&self, lease: Duration) -> i64 {
        match self.generation {
            Generation::V7 => micros(lease),
            Generation::V6 { ttl } => micros(lease) - micros(ttl),
        }
    }
}

/// The values of a claim. Keys and clients are UUIDs, and everything else is hexadecimal, so
/// nothing needs escaping.
#[derive(Debug)]
pub(super) struct AcquireValues<'a> {
    pub(super) lock_key: &'a str,
    pub(super) spring_client: &'a str,
    pub(super) lease: Duration,
    pub(super) id: &'a [u8],
    pub(super) namespace: &'a [u8],
    pub(super) key: &'a [u8],
    pub(super) claim: &'a [u8],
    pub(super) block: u32,
    pub(super) label: Option<&'a [u8]>,
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2 + 3);
    text.push_str("x'");
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text.push('\'');
    text
}

pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Returns the statement that creates Spring's table, as in Spring's `schema-mysql.sql`.
pub(super) fn create_table(lock: &str, generation: Generation) -> SqlStr {
    let end = match generation {
        Generation::V7 => " EXPIRED_AFTER DATETIME(6) NOT NULL,",
        Generation::V6 { .. } => "",
    };
    let text = format!(
        "CREATE TABLE IF NOT EXISTS {lock} (LOCK_KEY CHAR(36) NOT NULL, REGION VARCHAR(100) NOT NULL, CLIENT_ID CHAR(36), \
         CREATED_DATE DATETIME(6) NOT NULL,{end} CONSTRAINT INT_LOCK_PK PRIMARY KEY (LOCK_KEY, REGION)) ENGINE=InnoDB"
    );
    AssertSqlSafe(text).into_sql_str()
}

/// The columns of a table, in capitals. Parameters: database, table.
pub(super) const COLUMNS: &str = "\
    SELECT CAST(UPPER(COLUMN_NAME) AS CHAR) FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = ? AND TABLE_NAME = ?";

/// Grants the key, unless it is held.
///
/// Several statements form one transaction, because no statement of these servers writes both
/// tables and assigns a token in between. They are sent in one packet, so the transaction neither
/// waits for the client nor is left open by it. After an error the connection is closed, which ends
/// the transaction.
///
/// Spring's row is written first and stays locked. Only the transaction that has it locked writes
/// the native row, so tokens are assigned in the order of the grants. A crash undoes both writes or
/// none. If the response is lost, a retry with the same claim finds that it holds the key, with its
/// token in the native row.
///
/// A read-only server grants nothing to this program, whatever the user's privileges. Spring peers
/// do not check this.
///
/// An attempt runs this only after it has seen a free key, so a held key is seldom written to. A
/// late or repeated attempt changes nothing. The new token is above those of the native row, both
/// in the snapshot and at the write, and above those of all purged rows.
const ACQUIRE: &str = "\
    START TRANSACTION; \
    UPDATE {lock} AS l SET l.CLIENT_ID = '{spring_client}', l.{begin} \
    WHERE l.LOCK_KEY = '{key}' AND l.REGION = '{region}' AND {end} < {utc} AND {writable}; \
    SET @lock_registry_taken = ROW_COUNT(); \
    INSERT IGNORE INTO {lock} (REGION, LOCK_KEY, CLIENT_ID, {dates}) \
    SELECT '{region}', '{key}', '{spring_client}', {dates of} FROM DUAL WHERE @lock_registry_taken = 0 AND {writable}; \
    SET @lock_registry_taken = @lock_registry_taken + ROW_COUNT(); \
    INSERT INTO {locks} (id, namespace, lock_key, claim, token, block, label, since, until) \
    SELECT {id}, {namespace}, {name}, {claim}, \
        GREATEST({now}, meta.floor + 1, COALESCE(seen.token + seen.block, 0)), {block}, {label}, {now}, {now} + {lease} \
    FROM {meta} AS meta LEFT JOIN {locks} AS seen ON seen.id = {id} \
    WHERE meta.id = 1 AND @lock_registry_taken > 0 \
    ON DUPLICATE KEY UPDATE \
        token = GREATEST(VALUES(token), {locks}.token + {locks}.block), lock_key = VALUES(lock_key), claim = VALUES(claim), \
        block = VALUES(block), label = VALUES(label), since = VALUES(since), until = VALUES(until); \
    COMMIT";

/// The holder of a key. Parameters: id, lock key.
const CURRENT_GRANT: &str = "\
    SELECT l.CLIENT_ID, n.claim, n.token, n.label, {now} - n.since, TIMESTAMPDIFF(MICROSECOND, {utc}, {end}) \
    FROM {lock} AS l LEFT JOIN {locks} AS n ON n.id = ? \
    WHERE l.LOCK_KEY = ? AND l.REGION = '{region}' AND {end} >= {utc}";

/// Every held row of a region. Grants of this program have their key in the native row. Parameter:
/// namespace.
const LIST: &str = "\
    SELECT l.CLIENT_ID, n.claim, n.token, n.label, {now} - n.since, TIMESTAMPDIFF(MICROSECOND, {utc}, {end}), l.LOCK_KEY, n.lock_key \
    FROM {lock} AS l LEFT JOIN {locks} AS n ON n.namespace = ? AND n.claim = UNHEX(REPLACE(l.CLIENT_ID, '-', '')) \
    WHERE l.REGION = '{region}' AND {end} >= {utc}";

/// Renews the grants that have not expired. Skips rows that are locked, as the native statement
/// does. Spring's own renewal also revives an expired row; this one does not.
///
/// Parameters: lock keys, clients, limit, lease.
const RENEW: &str = "\
    UPDATE ( \
        SELECT l.LOCK_KEY AS found_key FROM {lock} AS l FORCE INDEX (PRIMARY) \
        WHERE l.LOCK_KEY IN ({items}) AND l.REGION = '{region}' AND l.CLIENT_ID IN ({items}) AND {end} >= {utc} AND {writable} \
        LIMIT ? FOR UPDATE SKIP LOCKED) AS found \
    STRAIGHT_JOIN {lock} AS l FORCE INDEX (PRIMARY) ON l.LOCK_KEY = found.found_key AND l.REGION = '{region}' \
    SET {extend}";

/// Keeps the native rows from being purged as dead. If one renewal fails to do so, the next does
/// it.
///
/// Parameters: ids, claims, limit, lease.
const RENEW_NATIVE: &str = "\
    UPDATE ( \
        SELECT id FROM {locks} FORCE INDEX (PRIMARY) WHERE id IN ({items}) AND claim IN ({items}) \
        LIMIT ? FOR UPDATE SKIP LOCKED) AS found \
    STRAIGHT_JOIN {locks} AS n FORCE INDEX (PRIMARY) ON n.id = found.id \
    SET n.until = GREATEST(n.until, {now} + ?)";

/// The holders of these keys, with the time that they have left. Parameters: lock keys.
const UNEXPIRED: &str = "\
    SELECT l.CLIENT_ID, TIMESTAMPDIFF(MICROSECOND, {utc}, {end}) FROM {lock} AS l \
    WHERE l.LOCK_KEY IN ({items}) AND l.REGION = '{region}' AND {end} >= {utc}";

/// Ends the grant of one claim. Parameters: lock key, client.
const RELEASE: &str = "\
    DELETE l FROM {lock} AS l \
    WHERE l.LOCK_KEY = ? AND l.REGION = '{region}' AND l.CLIENT_ID = ? AND {end} >= {utc}";

/// Deletes the row of an expired grant. Parameters: lock key, client.
const CLEAR: &str =
    "DELETE l FROM {lock} AS l WHERE l.LOCK_KEY = ? AND l.REGION = '{region}' AND l.CLIENT_ID = ?";

/// Ends the grant of a key, whatever client holds it. Parameter: lock key.
const FORCE_RELEASE: &str =
    "DELETE l FROM {lock} AS l WHERE l.LOCK_KEY = ? AND l.REGION = '{region}' AND {end} >= {utc}";

/// Finds the grant with its token, and locks its row until the caller's transaction ends. Returns
/// whether the transaction's snapshot shows it, as the native statement does.
///
/// Parameters: id, claim, token, token, lock key, client.
const FENCE: &str = "\
    SELECT CAST(EXISTS (SELECT 1 FROM {locks} AS seen WHERE seen.id = n.id AND seen.claim = n.claim AND seen.token = n.token) AS SIGNED) FROM {lock} AS l \
    JOIN {locks} AS n ON n.id = ? AND n.claim = ? AND n.token <= ? AND ? < n.token + n.block \
    WHERE l.LOCK_KEY = ? AND l.REGION = '{region}' AND l.CLIENT_ID = ? AND {end} >= {utc} FOR UPDATE";
