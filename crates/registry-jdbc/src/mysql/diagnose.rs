//! Checks a MariaDB or MySQL store for `lockreg doctor`. Changes nothing.

use std::collections::HashMap;

use registry_core::{BackendError, Finding};
use sqlx::MySql;

use super::backend::MySqlLeaseTable;
use crate::server::statement::{maybe_number, number, text};
use crate::server::{SqlStore, StatementText, check_clock, check_row_locks, host_micros};

/// The result omits variables that the server does not have.
const VARIABLES: &str = "\
    SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'version_comment', 'innodb_flush_log_at_trx_commit', 'sync_binlog', \
        'log_bin', 'read_only', 'super_read_only', 'binlog_format', 'wsrep_on', 'innodb_doublewrite', 'innodb_flush_method')";

const CONNECTION_LIMIT: &str = "SELECT CAST(@@global.max_connections AS SIGNED)";

const CLOCK: &str = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// Returns the findings about the server.
pub(super) async fn check_server(store: &SqlStore<MySql>) -> Result<Vec<Finding>, BackendError> {
    let query = async |statement| store.query(&StatementText::positional(statement, &[]), []).await;
    let mut variables = HashMap::new();
    for row in &query(VARIABLES).await? {
        let column = |index| Ok(text::<MySql>(row, index)?.unwrap_or_default());
        variables.insert(column(0)?.to_ascii_lowercase(), column(1)?);
    }
    let mut findings = findings(&variables);
    let before = host_micros();
    let rows = query(CLOCK).await?;
    let after = host_micros();
    if let Some(row) = rows.first() {
        findings.extend(check_clock(before, number::<MySql>(row, 0)?, after));
    }
    Ok(findings)
}

/// Returns a finding if the server's connection limit is too low for `row_locks`.
pub(super) async fn diagnose_row_locks(
    table: &MySqlLeaseTable,
) -> Result<Vec<Finding>, BackendError> {
    let limit = StatementText::positional(CONNECTION_LIMIT, &[]);
    let found = table.store.query(&limit, []).await?;
    let connections_max = found.first().map(|row| maybe_number::<MySql>(row, 0)).transpose()?;
    let connections_max = connections_max.flatten().unwrap_or(i64::MAX);
    Ok(Vec::from_iter(check_row_locks(table.store.settings().row_locks, connections_max)))
}

/// Returns what the server's settings mean for locks.
fn findings(variables: &HashMap<String, String>) -> Vec<Finding> {
    let value = |name: &str| variables.get(name).map_or("", String::as_str);
    let is_on = |name: &str| matches!(value(name), "ON" | "1");
    let mut findings =
        vec![Finding::note(format!("{} {}", value("version_comment"), value("version")))];
    // As in the statements, any other value than `OFF` is read-only. MariaDB has several such
    // values. A server without a variable returns no row for it.
    let is_read_only = |name: &str| !matches!(value(name), "" | "OFF" | "0");
    if is_read_only("read_only") || is_read_only("super_read_only") {
        findings.push(Finding::warning(
            "read_only is on: this server is probably a replica; locks can be acquired only on the primary",
        ));
    }
    let flush = value("innodb_flush_log_at_trx_commit");
    // In MariaDB, 3 flushes at least as often as 1.
    if !matches!(flush, "1" | "3") {
        findings.push(Finding::warning(format!(
            "innodb_flush_log_at_trx_commit is {flush}: a crash of the {} may free locks of the last second; set it to 1",
            if flush == "0" { "server" } else { "host" }
        )));
    }
    if value("innodb_flush_method").eq_ignore_ascii_case("nosync") {
        findings.push(Finding::warning(
            "innodb_flush_method is nosync: a crash of the host may free or damage locks; choose another method",
        ));
    }
    if value("innodb_doublewrite").eq_ignore_ascii_case("OFF") {
        findings.push(Finding::warning(
            "innodb_doublewrite is off: a crash of the host may damage the lock tables; set it to on",
        ));
    }
    if is_on("log_bin") {
        if value("sync_binlog") != "1" {
            findings.push(Finding::warning(format!(
                "sync_binlog is {}: after a crash of the host, replicas may lack the most recent locks or have additional ones; set it to 1",
                value("sync_binlog")
            )));
        }
        if value("binlog_format").eq_ignore_ascii_case("STATEMENT") {
            findings.push(Finding::warning(
                "binlog_format is STATEMENT: locks cannot be acquired; set it to ROW or MIXED",
            ));
        }
        findings.push(Finding::note(
            "there is a binary log: if a replica that follows it is promoted after a crash, the most recent locks may be free (class best-effort); \
             semi-synchronous replication makes grants wait for a replica",
        ));
    }
    if is_on("wsrep_on") {
        findings.push(Finding::warning(
            "this is a node of a Galera cluster, whose nodes do not lock rows for each other: a fence does not exclude other clients, and a crash of several nodes may free locks (class best-effort); connect all clients to the same node",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the findings about a durable server with these differences.
    fn messages(differences: &[(&str, &str)]) -> Vec<String> {
        let durable = [
            ("version", "10.11.0"),
            ("version_comment", "MariaDB"),
            ("innodb_flush_log_at_trx_commit", "1"),
            ("sync_binlog", "1"),
            ("log_bin", "OFF"),
            ("read_only", "OFF"),
            ("innodb_doublewrite", "ON"),
            ("innodb_flush_method", "O_DIRECT"),
        ];
        let variables = durable.iter().chain(differences);
        let variables = variables.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let findings = findings(&variables.collect());
        findings.into_iter().skip(1).map(|finding| finding.message).collect()
    }

    #[test]
    fn a_durable_server_has_no_findings_except_its_version() {
        assert_eq!(messages(&[]), Vec::<String>::new());
        let of_mariadb = ("innodb_flush_log_at_trx_commit", "3");
        assert_eq!(messages(&[of_mariadb]), Vec::<String>::new());
    }

    #[test]
    fn each_setting_that_weakens_locks_is_reported_by_name() {
        for (name, value) in [
            ("innodb_flush_log_at_trx_commit", "0"),
            ("innodb_flush_log_at_trx_commit", "2"),
            ("read_only", "ON"),
            ("read_only", "NO_LOCK_NO_ADMIN"),
            ("innodb_doublewrite", "OFF"),
            ("innodb_flush_method", "nosync"),
        ] {
            let messages = messages(&[(name, value)]);
            assert!(
                messages.len() == 1 && messages[0].contains(name),
                "{name}={value}: {messages:?}"
            );
        }
        let log_messages =
            messages(&[("log_bin", "ON"), ("sync_binlog", "0"), ("binlog_format", "STATEMENT")]);
        assert_eq!(log_messages.len(), 3, "{log_messages:?}");
        assert!(messages(&[("wsrep_on", "ON")])[0].contains("Galera"));
    }
}
