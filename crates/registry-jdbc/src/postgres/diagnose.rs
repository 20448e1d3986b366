//! Checks a PostgreSQL store for `lockreg doctor`. Changes nothing.

use registry_core::{BackendError, Finding};
use sqlx::postgres::PgRow;
use sqlx::{Postgres, Row as _};

use super::backend::PgLeaseTable;
use super::config::Listen;
use crate::server::statement::{number, one_row};
use crate::server::{
    QueryMode, ServerErrors as _, SqlStore, StatementText, Value, check_clock, check_row_locks,
    host_micros,
};

/// Returns a finding if the listener does not receive notifications.
pub(super) async fn check_listener(table: &PgLeaseTable) -> Option<Finding> {
    let listener = table.wakeups.listener.as_ref()?;
    let payload = format!("try_{:016x}", fastrand::u64(..));
    let text = StatementText::numbered(NOTIFY);
    let channel = table.wakeups.channel.name().to_owned();
    let values = [Value::Text(channel), Value::Text(payload.clone())];
    let notify = async { table.store.query(&text, values).await.map(drop) };
    let cause = match listener.self_test(&payload, notify).await {
        Ok(true) => return None,
        Ok(false) => {
            "a test notification did not arrive; `listen` may lead through a pooler or to another database".to_owned()
        }
        Err(error) => format!("the listener cannot connect: {error}"),
    };
    Some(Finding::warning(format!("release notifications do not arrive, so waiters poll: {cause}")))
}

/// Returns findings if the server has too few connections for `row_locks`, or if old row locks hold
/// back vacuum.
pub(super) async fn diagnose_row_locks(table: &PgLeaseTable) -> Result<Vec<Finding>, BackendError> {
    let found = table.store.query(&StatementText::numbered(CONNECTION_LIMIT), []).await?;
    let row = one_row::<Postgres>(&found)?;
    let (connections_max, old_row_locks) =
        (number::<Postgres>(row, 0)?, number::<Postgres>(row, 1)?);
    let row_locks = table.store.settings().row_locks;
    let mut findings = Vec::from_iter(check_row_locks(row_locks, connections_max));
    if old_row_locks > 0 {
        findings.push(Finding::warning(format!(
            "{old_row_locks} row locks have been held for more than five minutes, and the server cannot vacuum rows of the database that died since; use leases for long holds"
        )));
    }
    Ok(findings)
}

/// Returns the findings about the server.
pub(super) async fn check_server(store: &SqlStore<Postgres>) -> Result<Vec<Finding>, BackendError> {
    let before = host_micros();
    let rows = store.query(&StatementText::numbered(SERVER_SETTINGS), []).await?;
    let after = host_micros();
    let row = one_row::<Postgres>(&rows)?;

    let mut findings = setting_findings(row)?;
    findings.extend(check_clock(before, number::<Postgres>(row, 8)?, after));
    let is_prepared = matches!(store.config.query_mode(), QueryMode::Prepared);
    let listen = &store.config.listen;
    if !is_prepared && matches!(listen, Listen::SameServer) || matches!(listen, Listen::Off) {
        findings.push(Finding::note(
            "no listener receives release notifications, so waiters poll; behind a pooler, set `listen` to the URL of the server itself",
        ));
    }
    Ok(findings)
}

/// Returns the findings about the row of [`SERVER_SETTINGS`], except for the clock.
fn setting_findings(row: &PgRow) -> Result<Vec<Finding>, BackendError> {
    let setting = |index| row.try_get::<String, _>(index).map_err(Postgres::explain);
    let mut findings = Vec::new();
    let version = setting(0)?;
    findings.push(Finding::note(format!("PostgreSQL {version}")));
    if row.try_get(7).map_err(Postgres::explain)? {
        findings.push(Finding::warning(
            "this server is a standby; locks can be acquired only on the primary",
        ));
    }
    let synchronous = setting(1)?;
    if synchronous == "off" {
        findings.push(Finding::warning(
            "synchronous_commit is off: a crash of the server may free the most recent locks; set it to on for this user",
        ));
    }
    for (index, name) in [(2, "fsync"), (3, "full_page_writes")] {
        if setting(index)? == "off" {
            findings.push(Finding::warning(format!(
                "{name} is off: a crash of the host may free or damage locks; set it to on"
            )));
        }
    }
    let isolation = setting(4)?;
    if isolation != "read committed" {
        findings.push(Finding::warning(format!(
            "default_transaction_isolation is {isolation:?}: contended locks need retries; set it to \"read committed\" for this user"
        )));
    }
    if setting(5)? == "on" {
        findings.push(Finding::warning(
            "default_transaction_read_only is on: locks cannot be acquired; set it to off for this user",
        ));
    }
    if number::<Postgres>(row, 6)? > 0 && setting(9)?.is_empty() {
        findings.push(Finding::note(
            "standbys follow asynchronously: if one is promoted after a crash, the most recent locks may be free (class best-effort); \
             synchronous_standby_names makes grants wait for a standby",
        ));
    }
    Ok(findings)
}

/// Sends a test notification. Parameters: channel, payload.
const NOTIFY: &str = "SELECT pg_notify($1::text, $2::text) IS NULL";

/// Returns the server's connection limit and the number of old row locks in this database. The
/// server does not show other users' transactions.
const CONNECTION_LIMIT: &str = "\
    SELECT current_setting('max_connections')::bigint, \
        (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
            AND application_name = 'lock-registry' AND state = 'idle in transaction' \
            AND xact_start < clock_timestamp() - interval '5 minutes')";

/// Has no parameters, so it works in every query mode.
const SERVER_SETTINGS: &str = "\
    SELECT current_setting('server_version'), current_setting('synchronous_commit'), current_setting('fsync'), \
        current_setting('full_page_writes'), current_setting('default_transaction_isolation'), \
        current_setting('default_transaction_read_only'), (SELECT count(*) FROM pg_stat_replication), pg_is_in_recovery(), \
        (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, current_setting('synchronous_standby_names')";
