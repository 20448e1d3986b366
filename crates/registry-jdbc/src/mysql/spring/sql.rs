//! All statements of the Spring layout.
//!
//! `{lock}` is Spring's table. `{locks}` is the native table, in which each key has a row for
//! tokens, label and the key itself, which Spring's table does not store. Times are the server's
//! time at the start of a statement. The native `sql` explains why an outdated time is safe.
//!
//! A row is held while its end is not before the server's time. The statements contain the region,
//! which was validated: ASCII without quotes.

use std::time::Duration;

use super::super::config::MySqlConfig;
use super::super::sql::{LIST_SIZES, NOW, WRITABLE, quoted};
use crate::server::spring::SpringVersion;
use crate::server::statement::{micros, with_names};
use crate::server::{SpringStatements, SpringTable, StatementText};

/// The text of every statement, with the names of the tables filled in.
#[derive(Debug)]
pub(crate) struct MySqlSpringStatements {
    common: SpringStatements,
    version: SpringVersion,
    pub(super) renew: StatementText,
    pub(super) renew_native: StatementText,
    pub(super) unexpired: StatementText,
    pub(super) clear: StatementText,
}

impl AsRef<SpringStatements> for MySqlSpringStatements {
    fn as_ref(&self) -> &SpringStatements {
        &self.common
    }
}

impl MySqlSpringStatements {
    /// Fills in the names. `lock` is Spring's table, quoted.
    pub(in super::super) fn new(config: &MySqlConfig, lock: &str, table: &SpringTable) -> Self {
        let version = table.version;
        let (end, dates, extend, begin, values) = match version {
            SpringVersion::V7 => (
                "l.EXPIRED_AFTER",
                "CREATED_DATE, EXPIRED_AFTER",
                "l.EXPIRED_AFTER = GREATEST(l.EXPIRED_AFTER, {utc} + INTERVAL $4 MICROSECOND)",
                "EXPIRED_AFTER = {utc} + INTERVAL $3 MICROSECOND",
                "{utc}, {utc} + INTERVAL $3 MICROSECOND",
            ),
            SpringVersion::V6 { .. } => (
                "l.CREATED_DATE + INTERVAL {ttl} MICROSECOND",
                "CREATED_DATE",
                "l.CREATED_DATE = GREATEST(l.CREATED_DATE, {utc} + INTERVAL $4 MICROSECOND)",
                "CREATED_DATE = {utc} + INTERVAL ($3 - {ttl}) MICROSECOND",
                "{utc} + INTERVAL ($3 - {ttl}) MICROSECOND",
            ),
        };
        let ttl = match version {
            SpringVersion::V7 => Duration::ZERO,
            SpringVersion::V6 { ttl } => ttl,
        };
        let database = quoted(config.server.get_database().unwrap_or_default());
        let prefix = &config.settings.table_prefix;
        let names = [
            ("{lock}", lock.to_owned()),
            ("{locks}", format!("{database}.{prefix}_locks")),
            ("{meta}", format!("{database}.{prefix}_meta")),
            ("{region}", table.region().to_owned()),
        ];
        let text = |template: &str| {
            let text = template
                .replace("{dates}", dates)
                .replace("{values}", values)
                .replace("{begin}", begin)
                .replace("{extend}", extend)
                .replace("{end}", end)
                .replace("{ttl}", &ttl.as_micros().to_string())
                .replace("{writable}", WRITABLE)
                .replace("{utc}", "UTC_TIMESTAMP(6)")
                .replace("{now}", NOW);
            StatementText::positional(&with_names(&text, &names), &LIST_SIZES)
        };
        let common = SpringStatements {
            // In `CURRENT_GRANT` the id is parameter 2, in `ACQUIRE` parameter 4.
            acquire: text(&format!("{ACQUIRE}; {}", CURRENT_GRANT.replace("$2", "$4"))),
            current_grant: text(CURRENT_GRANT),
            list: text(LIST),
            release: text(RELEASE),
            force_release: text(FORCE_RELEASE),
            fence: text(FENCE),
        };
        Self {
            common,
            version,
            renew: text(RENEW),
            renew_native: text(RENEW_NATIVE),
            unexpired: text(UNEXPIRED),
            clear: text(CLEAR),
        }
    }

    /// Returns the number of microseconds that a renewal with this lease adds to the server's time.
    pub(super) fn stored_offset(&self, lease: Duration) -> i64 {
        match self.version {
            SpringVersion::V7 => micros(lease),
            SpringVersion::V6 { ttl } => micros(lease) - micros(ttl),
        }
    }
}

/// Returns the statement that creates Spring's table, as in Spring's `schema-mysql.sql`.
pub(in super::super) fn create_table(lock: &str, version: SpringVersion) -> StatementText {
    let end = match version {
        SpringVersion::V7 => " EXPIRED_AFTER DATETIME(6) NOT NULL,",
        SpringVersion::V6 { .. } => "",
    };
    let text = format!(
        "CREATE TABLE IF NOT EXISTS {lock} (LOCK_KEY CHAR(36) NOT NULL, REGION VARCHAR(100) NOT NULL, CLIENT_ID CHAR(36), \
         CREATED_DATE DATETIME(6) NOT NULL,{end} CONSTRAINT INT_LOCK_PK PRIMARY KEY (LOCK_KEY, REGION)) ENGINE=InnoDB"
    );
    StatementText::positional(&text, &[])
}

/// Returns the names of the columns of a table, in capitals, and how many digits of a second's
/// fraction they store. Parameters: database, table.
pub(super) const COLUMNS: &str = "\
    SELECT CAST(UPPER(COLUMN_NAME) AS CHAR), CAST(DATETIME_PRECISION AS SIGNED) \
    FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = $1 AND TABLE_NAME = $2";

/// How many digits of a second's fraction the column with the end of a lease must store. It is the
/// number in [`create_table`], which equals that of Spring's own schema.
pub(super) const DATE_DIGITS: i64 = 6;

/// Grants the key if it is free.
///
/// Several statements form one transaction, because these servers have no statement that writes
/// both tables. The statements are sent in one packet, so the transaction never waits for the
/// client. After an error the connection is closed, which ends the transaction.
///
/// Spring's row is written first and stays locked. Only the transaction that has it locked writes a
/// token to the native row, so tokens are assigned in the order of the grants. A crash undoes both
/// writes or none. If the response is lost, a retry finds that its own claim holds the key. The
/// claim's token is in the native row.
///
/// A read-only server grants nothing to this program, whatever the user's privileges. Spring peers
/// do not check this.
///
/// An attempt sends these statements only after a query has found the key free. If another client
/// has acquired the key meanwhile, the statements change nothing. The new token is above the tokens
/// of the native row, both in the snapshot and at the write. It is also above the tokens of all
/// purged rows.
///
/// Parameters: lock key, client, lease, id, namespace, key, claim, block, label.
const ACQUIRE: &str = "\
    START TRANSACTION; \
    UPDATE {lock} AS l SET l.CLIENT_ID = $2, l.{begin} \
    WHERE l.LOCK_KEY = $1 AND l.REGION = '{region}' AND {end} < {utc} AND {writable}; \
    SET @lock_registry_taken = ROW_COUNT(); \
    INSERT IGNORE INTO {lock} (REGION, LOCK_KEY, CLIENT_ID, {dates}) \
    SELECT '{region}', $1, $2, {values} FROM DUAL WHERE @lock_registry_taken = 0 AND {writable}; \
    SET @lock_registry_taken = @lock_registry_taken + ROW_COUNT(); \
    INSERT INTO {locks} (id, namespace, lock_key, claim, token, block, label, since, until) \
    SELECT $4, $5, $6, $7, \
        GREATEST({now}, meta.floor + 1, COALESCE(seen.token + seen.block, 0)), $8, $9, {now}, {now} + $3 \
    FROM {meta} AS meta LEFT JOIN {locks} AS seen ON seen.id = $4 \
    WHERE meta.id = 1 AND @lock_registry_taken > 0 \
    ON DUPLICATE KEY UPDATE \
        token = GREATEST(VALUES(token), {locks}.token + {locks}.block), lock_key = VALUES(lock_key), claim = VALUES(claim), \
        block = VALUES(block), label = VALUES(label), since = VALUES(since), until = VALUES(until); \
    COMMIT";

/// Returns the holder of a key. Parameters: lock key, id.
const CURRENT_GRANT: &str = "\
    SELECT l.CLIENT_ID, n.claim, n.token, n.label, {now} - n.since, TIMESTAMPDIFF(MICROSECOND, {utc}, {end}) \
    FROM {lock} AS l LEFT JOIN {locks} AS n ON n.id = $2 \
    WHERE l.LOCK_KEY = $1 AND l.REGION = '{region}' AND {end} >= {utc}";

/// Returns every held row of a region. The last column is the key, if this program holds the lock.
/// Parameter: namespace.
const LIST: &str = "\
    SELECT l.CLIENT_ID, n.claim, n.token, n.label, {now} - n.since, TIMESTAMPDIFF(MICROSECOND, {utc}, {end}), l.LOCK_KEY, n.lock_key \
    FROM {lock} AS l LEFT JOIN {locks} AS n ON n.namespace = $1 AND n.claim = UNHEX(REPLACE(l.CLIENT_ID, '-', '')) \
    WHERE l.REGION = '{region}' AND {end} >= {utc}";

/// Renews the grants that have not expired. Skips locked rows, as the native statement does. Unlike
/// Spring's own renewal, this statement does not revive an expired row.
///
/// Parameters: lock keys, clients, limit, lease.
const RENEW: &str = "\
    UPDATE ( \
        SELECT l.LOCK_KEY AS found_key FROM {lock} AS l FORCE INDEX (PRIMARY) \
        WHERE l.LOCK_KEY IN ($1...) AND l.REGION = '{region}' AND l.CLIENT_ID IN ($2...) AND {end} >= {utc} AND {writable} \
        LIMIT $3 FOR UPDATE SKIP LOCKED) AS found \
    STRAIGHT_JOIN {lock} AS l FORCE INDEX (PRIMARY) ON l.LOCK_KEY = found.found_key AND l.REGION = '{region}' \
    SET {extend}";

/// Extends the native rows, so that a purge does not delete them. If the statement fails, the next
/// renewal sends it again.
///
/// Parameters: ids, claims, limit, lease.
const RENEW_NATIVE: &str = "\
    UPDATE ( \
        SELECT id FROM {locks} FORCE INDEX (PRIMARY) WHERE id IN ($1...) AND claim IN ($2...) AND {writable} \
        LIMIT $3 FOR UPDATE SKIP LOCKED) AS found \
    STRAIGHT_JOIN {locks} AS n FORCE INDEX (PRIMARY) ON n.id = found.id \
    SET n.until = GREATEST(n.until, {now} + $4)";

/// Returns the holders of these keys, with the times left of their leases, and whether the server
/// is writable. Parameters: lock keys.
const UNEXPIRED: &str = "\
    SELECT l.CLIENT_ID, TIMESTAMPDIFF(MICROSECOND, {utc}, {end}), CAST({writable} AS SIGNED) FROM {lock} AS l \
    WHERE l.LOCK_KEY IN ($1...) AND l.REGION = '{region}' AND {end} >= {utc}";

/// Ends the grant of one claim. Parameters: lock key, client.
const RELEASE: &str = "\
    DELETE l FROM {lock} AS l \
    WHERE l.LOCK_KEY = $1 AND l.REGION = '{region}' AND l.CLIENT_ID = $2 AND {end} >= {utc} AND {writable}";

/// Deletes the row of a claim, even if its grant has expired. Parameters: lock key, client.
const CLEAR: &str = "\
    DELETE l FROM {lock} AS l \
    WHERE l.LOCK_KEY = $1 AND l.REGION = '{region}' AND l.CLIENT_ID = $2 AND {writable}";

/// Ends the grant of a key, whatever client holds it. Parameter: lock key.
const FORCE_RELEASE: &str = "\
    DELETE l FROM {lock} AS l \
    WHERE l.LOCK_KEY = $1 AND l.REGION = '{region}' AND {end} >= {utc} AND {writable}";

/// Finds the rows of this claim and token, and locks them until the caller's transaction ends.
/// Returns whether the transaction's snapshot contains the grant, as the native statement does.
///
/// Parameters: lock key, client, id, claim, token.
const FENCE: &str = "\
    SELECT CAST(EXISTS (SELECT 1 FROM {locks} AS seen WHERE seen.id = n.id AND seen.claim = n.claim AND seen.token = n.token) AS SIGNED) FROM {lock} AS l \
    JOIN {locks} AS n ON n.id = $3 AND n.claim = $4 AND n.token <= $5 AND $5 < n.token + n.block \
    WHERE l.LOCK_KEY = $1 AND l.REGION = '{region}' AND l.CLIENT_ID = $2 AND {end} >= {utc} FOR UPDATE";
