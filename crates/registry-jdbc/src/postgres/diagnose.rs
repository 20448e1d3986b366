//! Checks a PostgreSQL store for `lockreg doctor`. Changes nothing.

use registry_core::{BackendError, Finding};
use sqlx::postgres::PgRow;

use super::backend::{PgRows, column, one_row};
use super::client::PgClient;
use super::config::{Listen, PostgresConfig};
use super::sql::PgStatementText;
use super::statement::{BoundStatement, PgParam};
use crate::server::{ConnectionUse, Resend, check_clock, check_row_locks, host_micros};

impl PgRows {
    /// Returns a finding if the listener does not receive notifications.
    pub(super) async fn check_listener(&self) -> Option<Finding> {
        let listener = self.listener.as_ref()?;
        let payload = format!("try_{:016x}", fastrand::u64(..));
        let text = PgStatementText::new(NOTIFY);
        let values =
            [PgParam::Identifier(self.channel().to_owned()), PgParam::Identifier(payload.clone())];
        let statement = BoundStatement::new(&text, values);
        let notify = async {
            let sent = self.client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await;
            sent.map(drop)
        };
        let cause = match listener.self_test(&payload, notify).await {
            Ok(true) => return None,
            Ok(false) => {
                "a test notification did not arrive; `listen` may lead through a pooler or to another database".to_owned()
            }
            Err(error) => format!("listening: {error}"),
        };
        Some(Finding::warning(format!(
            "release notifications do not arrive, so waiters poll; {cause}"
        )))
    }

    /// Checks whether the server has connections for this number of row locks, and whether existing
    /// row locks hold back vacuum.
    pub(super) async fn check_connection_limit(&self) -> Result<Vec<Finding>, BackendError> {
        let text = PgStatementText::new(CONNECTION_LIMIT);
        let statement = BoundStatement::new(&text, []);
        let rows = self.client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await?;
        let row = one_row(&rows)?;
        let (connections, old): (i64, i64) = (column(row, 0)?, column(row, 1)?);
        let mut findings = Vec::from_iter(check_row_locks(self.config.row_locks, connections));
        if old > 0 {
            findings.push(Finding::warning(format!(
                "{old} row locks have been held for more than five minutes, and the server has vacuumed no dead rows of the database since; use leases for long holds"
            )));
        }
        Ok(findings)
    }
}

/// Returns the findings about the server that `client` connects to.
pub(super) async fn check_server(
    client: &PgClient,
    config: &PostgresConfig,
) -> Result<Vec<Finding>, BackendError> {
    let text = PgStatementText::new(SERVER_SETTINGS);
    let statement = BoundStatement::new(&text, []);
    let before = host_micros();
    let rows = client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await?;
    let after = host_micros();
    let row = one_row(&rows)?;

    let mut findings = settings(row)?;
    findings.extend(check_clock(before, column(row, 8)?, after));
    if !client.is_prepared() && matches!(config.listen, Listen::SameServer | Listen::Off)
        || matches!(config.listen, Listen::Off)
    {
        findings.push(Finding::note(
            "no listener receives release notifications, so waiters poll; behind a pooler, set `listen` to the URL of the server itself",
        ));
    }
    Ok(findings)
}

fn settings(row: &PgRow) -> Result<Vec<Finding>, BackendError> {
    let setting = |index| column::<String>(row, index);
    let mut findings = Vec::new();
    let version = setting(0)?;
    findings.push(Finding::note(format!("PostgreSQL {version}")));
    if column::<bool>(row, 7)? {
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
    if column::<i64>(row, 6)? > 0 && setting(9)?.is_empty() {
        findings.push(Finding::note(
            "standbys follow asynchronously: if one is promoted after a crash, the most recent locks may be free (class best-effort); \
             synchronous_standby_names makes grants wait for a standby",
        ));
    }
    Ok(findings)
}

/// Parameters: channel, word.
const NOTIFY: &str = "SELECT pg_notify($1::text, $2::text) IS NULL";

/// Returns the server's connection limit and the number of old row locks. The server does not show
/// other users' transactions.
const CONNECTION_LIMIT: &str = "\
    SELECT current_setting('max_connections')::bigint, \
        (SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lock-registry' AND state = 'idle in transaction' \
            AND xact_start < clock_timestamp() - interval '5 minutes')";

/// Binds no value, so it works in every mode of sending statements.
const SERVER_SETTINGS: &str = "\
    SELECT current_setting('server_version'), current_setting('synchronous_commit'), current_setting('fsync'), \
        current_setting('full_page_writes'), current_setting('default_transaction_isolation'), \
        current_setting('default_transaction_read_only'), (SELECT count(*) FROM pg_stat_replication), pg_is_in_recovery(), \
        (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, current_setting('synchronous_standby_names')";
