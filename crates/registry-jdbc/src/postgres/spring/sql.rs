//! All statements of the Spring layout. As in the native `sql`, each statement is one transaction
//! and takes one round trip.
//!
//! `{lock}` is Spring's table. `{locks}` is the native table, in which each key has a row for
//! tokens, label and the key itself, which Spring's table does not store. One statement writes
//! Spring's row first, then the native row. The lock on Spring's row also protects the native row,
//! so tokens are issued in the order of the grants.
//!
//! A row is held while its end is not before the server's time, which is UTC without a time zone.
//! Keys and clients are cast to the column's type, so that its index is used. The statements
//! contain the region, which was validated: ASCII without quotes.

use super::super::config::TableNames;
use crate::server::spring::SpringVersion;
use crate::server::statement::with_names;
use crate::server::{SpringStatements, SpringTable, StatementText};

/// The texts of all statements, for tables with these names.
#[derive(Debug)]
pub(crate) struct PgSpringStatements {
    common: SpringStatements,
    pub(super) renew: StatementText,
}

impl AsRef<SpringStatements> for PgSpringStatements {
    fn as_ref(&self) -> &SpringStatements {
        &self.common
    }
}

impl PgSpringStatements {
    /// Returns the texts. `lock` is the quoted name of Spring's table.
    pub(in super::super) fn new(tables: &TableNames, lock: &str, table: &SpringTable) -> Self {
        let version = table.version;
        let (columns, values, begin, extend, end) = match version {
            SpringVersion::V7 => (
                "region, lock_key, client_id, created_date, expired_after",
                "utc, utc + {lease}",
                "expired_after = {utc} + {lease}",
                "expired_after = greatest(l.expired_after, {utc} + {lease})",
                "l.expired_after".to_owned(),
            ),
            SpringVersion::V6 { ttl } => (
                "region, lock_key, client_id, created_date",
                "utc + {lease} - {ttl}",
                "created_date = {utc} + {lease} - {ttl}",
                "created_date = greatest(l.created_date, {utc} + {lease} - {ttl})",
                format!("(l.created_date + interval '{} microseconds')", ttl.as_micros()),
            ),
        };
        let ttl = match version {
            SpringVersion::V7 => String::new(),
            SpringVersion::V6 { ttl } => format!("interval '{} microseconds'", ttl.as_micros()),
        };
        let names = [
            ("{lock}", lock.to_owned()),
            ("{locks}", tables.locks()),
            ("{meta}", tables.meta()),
            ("{region}", table.region().to_owned()),
        ];
        let text_with = |template: &str, lease: &str| {
            let text = template
                .replace("{columns}", columns)
                .replace("{values}", values)
                .replace("{begin}", begin)
                .replace("{extend}", extend)
                .replace("{lease}", lease)
                .replace("{ttl}", &ttl)
                .replace("{end}", &end)
                .replace("{key}", "$1::text::char(36)")
                .replace("{client}", "$2::text::char(36)")
                .replace("{utc}", "timezone('UTC', clock_timestamp())")
                .replace("{now}", "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint");
            StatementText::numbered(&with_names(&text, &names))
        };
        let text = |template: &str| text_with(template, "");
        let common = SpringStatements {
            acquire: text_with(ACQUIRE, "$3::bigint * interval '1 microsecond'"),
            current_grant: text(CURRENT_GRANT),
            list: text(LIST),
            release: text(RELEASE),
            force_release: text(FORCE_RELEASE),
            fence: text(FENCE),
        };
        let renew = text_with(RENEW, "found.lease * interval '1 microsecond'");
        Self { common, renew }
    }
}

/// Returns the statement that creates Spring's table as Spring's own `schema-postgresql.sql` does.
pub(in super::super) fn create_table(lock: &str, version: SpringVersion) -> StatementText {
    let end = match version {
        SpringVersion::V7 => " EXPIRED_AFTER TIMESTAMP NOT NULL,",
        SpringVersion::V6 { .. } => "",
    };
    // The primary key is unnamed, so that the server chooses an unused name for its index.
    StatementText::numbered(&format!(
        "CREATE TABLE IF NOT EXISTS {lock} (LOCK_KEY CHAR(36) NOT NULL, REGION VARCHAR(100) NOT NULL, CLIENT_ID CHAR(36), \
         CREATED_DATE TIMESTAMP NOT NULL,{end} PRIMARY KEY (LOCK_KEY, REGION))"
    ))
}

/// Returns the query for schema and name of Spring's table, and for whether the table has the
/// column `expired_after`. `name` was validated: letters, digits, underscores, a dot, and double
/// quotes around a schema.
pub(super) fn find_table(name: &str) -> StatementText {
    StatementText::numbered(&format!(
        "SELECT nspname::text, relname::text, EXISTS (SELECT FROM pg_attribute \
            WHERE attrelid = pg_class.oid AND attname = 'expired_after' AND NOT attisdropped) \
         FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace \
         WHERE pg_class.oid = to_regclass('{name}')"
    ))
}

/// Grants the key if it is free. A key that the given claim itself holds is not free. Returns the
/// current grant of the key after the attempt, in the columns of [`CURRENT_GRANT`].
///
/// As in the native layout, a busy attempt writes nothing. If another client is faster, the
/// statement returns nothing. Rows of the native table outlive rows of Spring's table, and their
/// tokens only grow. The native `ACQUIRE` explains the three tokens that a new token must exceed.
///
/// Parameters: lock key, client, lease, id, namespace, key, claim, block, label
const ACQUIRE: &str = "\
    WITH clock AS MATERIALIZED (SELECT {now} AS now, {utc} AS utc), \
    seen AS MATERIALIZED ( \
        SELECT l.client_id::text AS client, {end} AS until FROM {lock} AS l WHERE l.lock_key = {key} AND l.region = '{region}'), \
    native_row AS MATERIALIZED (SELECT claim, token, block, label, since FROM {locks} WHERE id = $4::bytea), \
    held AS (SELECT seen.* FROM seen, clock WHERE until >= utc), \
    taken AS ( \
        INSERT INTO {lock} AS l ({columns}) \
        SELECT '{region}', {key}, {client}, {values} \
        FROM clock, {meta} AS meta WHERE meta.id = 1 AND NOT EXISTS (SELECT FROM held) \
        ON CONFLICT (lock_key, region) DO UPDATE SET client_id = excluded.client_id, {begin} WHERE {end} < {utc} \
        RETURNING l.lock_key), \
    granted AS ( \
        INSERT INTO {locks} AS n (id, namespace, key, claim, token, block, label, since, until) \
        SELECT $4::bytea, $5::bytea, $6::bytea, $7::bytea, \
            greatest(now, floor + 1, (SELECT token + block FROM native_row)), $8::bigint, $9::bytea, now, now + $3::bigint \
        FROM taken, clock, {meta} AS meta WHERE meta.id = 1 \
        ON CONFLICT (id) DO UPDATE SET \
            id = excluded.id, \
            key = excluded.key, \
            claim = excluded.claim, \
            token = greatest(excluded.token, n.token + n.block, {now}), \
            block = excluded.block, \
            label = excluded.label, \
            since = {now}, \
            until = {now} + $3::bigint \
        RETURNING token) \
    SELECT {client}::text, $7::bytea, token, $9::bytea, 0::bigint, $3::bigint FROM granted \
    UNION ALL \
    SELECT held.client, native_row.claim, native_row.token, native_row.label, now - native_row.since, (extract(epoch FROM held.until - utc) * 1000000)::bigint \
    FROM clock CROSS JOIN held LEFT JOIN native_row ON true";

/// Returns the holder of the key, if it is held.
///
/// Parameters: lock key, id
const CURRENT_GRANT: &str = "\
    WITH clock AS MATERIALIZED (SELECT {now} AS now, {utc} AS utc) \
    SELECT l.client_id::text, n.claim, n.token, n.label, now - n.since, (extract(epoch FROM {end} - utc) * 1000000)::bigint \
    FROM clock, {lock} AS l LEFT JOIN {locks} AS n ON n.id = $2::bytea \
    WHERE l.lock_key = {key} AND l.region = '{region}' AND {end} >= utc";

/// Returns every held row of a region. The last column is the key, if this program holds the lock.
///
/// Parameters: namespace
const LIST: &str = "\
    WITH clock AS MATERIALIZED (SELECT {now} AS now, {utc} AS utc) \
    SELECT l.client_id::text, n.claim, n.token, n.label, now - n.since, (extract(epoch FROM {end} - utc) * 1000000)::bigint, \
        l.lock_key::text, n.key \
    FROM clock, {lock} AS l LEFT JOIN {locks} AS n \
        ON n.namespace = $1::bytea AND encode(n.claim, 'hex') = replace(l.client_id::text, '-', '') \
    WHERE l.region = '{region}' AND {end} >= utc";

/// Renews the grants that have not expired. Locked rows are skipped, as in the native statement.
///
/// Unlike Spring's own renewal, this statement checks that a row has not expired, so that it does
/// not revive an expired grant.
///
/// Parameters: lock keys, clients, ids, claims, leases
const RENEW: &str = "\
    WITH wanted AS MATERIALIZED ( \
        SELECT k::char(36) AS k, c::char(36) AS c, id, claim, lease, n \
        FROM unnest($1::text[], $2::text[], $3::bytea[], $4::bytea[], $5::bigint[]) WITH ORDINALITY AS w (k, c, id, claim, lease, n)), \
    found AS MATERIALIZED ( \
        SELECT w.k, w.c, w.id, w.claim, w.lease FROM wanted AS w \
        JOIN {lock} AS l ON l.lock_key = w.k AND l.region = '{region}' AND l.client_id = w.c \
        WHERE {end} >= {utc} FOR NO KEY UPDATE OF l SKIP LOCKED), \
    renewed AS ( \
        UPDATE {lock} AS l SET {extend} FROM found \
        WHERE l.lock_key = found.k AND l.region = '{region}' AND l.client_id = found.c AND {end} >= {utc} \
        RETURNING found.c, (extract(epoch FROM {end} - {utc}) * 1000000)::bigint AS until), \
    renewed_native AS ( \
        UPDATE {locks} AS n SET until = greatest(n.until, {now} + found.lease) FROM found \
        WHERE n.id = found.id AND n.claim = found.claim) \
    SELECT renewed.until, \
        EXISTS (SELECT FROM {lock} AS l \
            WHERE l.lock_key = w.k AND l.region = '{region}' AND l.client_id = w.c AND {end} >= {utc}) \
    FROM wanted AS w LEFT JOIN renewed ON renewed.c = w.c ORDER BY w.n";

/// Ends the grant of one claim, and notifies this program's listeners, as in the native layout.
/// Spring has no listeners. An expired row is also deleted, and the result shows that it was
/// expired.
///
/// Parameters: lock key, client, lock_timeout, channel, message, presence lock
const RELEASE: &str = "\
    WITH settings AS MATERIALIZED ( \
        SELECT set_config('lock_timeout', $3::text, true), set_config('synchronous_commit', 'off', true)), \
    freed AS ( \
        DELETE FROM {lock} AS l USING settings \
        WHERE l.lock_key = {key} AND l.region = '{region}' AND l.client_id = {client} RETURNING {end} >= {utc} AS held) \
    SELECT held, CASE WHEN NOT pg_try_advisory_xact_lock($6::bigint) THEN pg_notify($4::text, encode($5::bytea, 'hex')) IS NULL END \
    FROM freed";

/// Ends the grant of any holder of the key, and notifies the listeners.
///
/// Parameters: lock key, channel, message, presence lock
const FORCE_RELEASE: &str = "\
    WITH freed AS ( \
        DELETE FROM {lock} AS l WHERE l.lock_key = {key} AND l.region = '{region}' RETURNING {end} >= {utc} AS held) \
    SELECT held, CASE WHEN NOT pg_try_advisory_xact_lock($4::bigint) THEN pg_notify($2::text, encode($3::bytea, 'hex')) IS NULL END \
    FROM freed";

/// Finds the row with this claim and token. Locks the row against a grant to another claim until
/// the caller's transaction ends.
///
/// Spring grants a row to another client without changing a key column, which the FOR KEY SHARE of
/// the native layout would permit. So this statement locks FOR SHARE, which also blocks
/// renewals: they skip the row until the transaction ends.
///
/// Parameters: lock key, client, id, claim, token
const FENCE: &str = "\
    SELECT true FROM {lock} AS l JOIN {locks} AS n \
        ON n.id = $3::bytea AND n.claim = $4::bytea AND n.token <= $5::bigint AND $5::bigint < n.token + n.block \
    WHERE l.lock_key = {key} AND l.region = '{region}' AND l.client_id = {client} AND {end} >= {utc} \
    FOR SHARE OF l";
