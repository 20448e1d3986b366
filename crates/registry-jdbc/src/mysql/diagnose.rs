//! The findings of `doctor` about a MariaDB or MySQL store. Reads only, repairs nothing.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use registry_core::{BackendError, Finding};
use sqlx::Row as _;

use super::backend::MySqlBackend;
use super::link::Link;
use crate::server::Errand;

/// A larger difference between the server's clock and this host's is reported.
const CLOCK_DISTANCE_MAX: Duration = Duration::from_secs(1);

/// The result omits variables that the server does not have.
const VARIABLES: &str = "\
    SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'version_comment', 'innodb_flush_log_at_trx_commit', 'sync_binlog', \
        'log_bin', 'read_only', 'super_read_only', 'binlog_format', 'wsrep_on', 'innodb_doublewrite', 'innodb_flush_method')";

const ROOM: &str = "SELECT CAST(@@global.max_connections AS SIGNED)";

const CLOCK: &str = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

impl MySqlBackend {
    /// Returns the findings of [`diagnose`](registry_core::LockBackend::diagnose).
    pub(super) async fn look_for_trouble(&self) -> Result<Vec<Finding>, BackendError> {
        look_around(&self.link).await
    }
}

/// Returns the findings about the server of this link.
pub(super) async fn look_around(link: &Link) -> Result<Vec<Finding>, BackendError> {
    let explain = |error| link.explain(error);
    let rows = link.rows(Errand::Acquire, || sqlx::query(VARIABLES)).await?;
    let mut variables = HashMap::new();
    for row in &rows {
        let name: String = row.try_get(0).map_err(explain)?;
        variables.insert(name.to_ascii_lowercase(), row.try_get(1).map_err(explain)?);
    }
    let mut findings = findings(&variables);
    let before = now();
    let rows = link.rows(Errand::Acquire, || sqlx::query(CLOCK)).await?;
    let after = now();
    if let Some(row) = rows.first() {
        let theirs: i64 = row.try_get(0).map_err(explain)?;
        let distance = (theirs - (before + (after - before) / 2)).unsigned_abs();
        if Duration::from_micros(distance) > CLOCK_DISTANCE_MAX {
            findings.push(Finding::note(format!(
                "the server's clock and this host's differ by {:?}: locks only follow the server's, but one of them is wrong",
                Duration::from_millis(distance / 1000)
            )));
        }
    }
    Ok(findings)
}

impl MySqlBackend {
    /// Returns a finding if the server's connection limit is too low for `row_locks`.
    pub(super) async fn look_for_room(&self, row_locks: u32) -> Result<Vec<Finding>, BackendError> {
        let rows = self.link.rows(Errand::Acquire, || sqlx::query(ROOM)).await?;
        let room: Option<i64> = rows.first().map(|row| self.column(row, 0)).transpose()?;
        let room = room.unwrap_or(i64::MAX);
        if i64::from(row_locks) <= room / 2 {
            return Ok(Vec::new());
        }
        Ok(vec![Finding::warning(format!(
            "row_locks is {row_locks}, and the server takes {room} connections from all programs together; raise max_connections, \
             or lower row_locks"
        ))])
    }
}

/// Returns what the server's settings mean for locks.
fn findings(variables: &HashMap<String, String>) -> Vec<Finding> {
    let value = |name: &str| variables.get(name).map_or("", String::as_str);
    let is_on = |name: &str| matches!(value(name), "ON" | "1");
    let mut findings =
        vec![Finding::note(format!("{} {}", value("version_comment"), value("version")))];
    if is_on("read_only") || is_on("super_read_only") {
        findings.push(Finding::warning(
            "read_only is on: this server is a replica, most likely; locks can be taken on the primary only",
        ));
    }
    let flush = value("innodb_flush_log_at_trx_commit");
    if flush != "1" {
        findings.push(Finding::warning(format!(
            "innodb_flush_log_at_trx_commit is {flush}: a crash of the {} may free locks of the last second; set it to 1",
            if flush == "0" { "server" } else { "host" }
        )));
    }
    if value("innodb_flush_method").eq_ignore_ascii_case("nosync") {
        findings.push(Finding::warning(
            "innodb_flush_method is nosync: a crash of the host may free or damage locks; choose another one",
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
                "sync_binlog is {}: after a crash of the host replicas may lack, or have too many, locks of the last moments; set it to 1",
                value("sync_binlog")
            )));
        }
        if value("binlog_format").eq_ignore_ascii_case("STATEMENT") {
            findings.push(Finding::warning(
                "binlog_format is STATEMENT: locks cannot be taken; set it to ROW or MIXED",
            ));
        }
        findings.push(Finding::note(
            "there is a binary log: if a replica that follows it is promoted after a crash, locks of the last moments may be free (class C); \
             semi-synchronous replication makes grants wait for a replica",
        ));
    }
    if is_on("wsrep_on") {
        findings.push(Finding::warning(
            "this is a node of a Galera cluster, whose nodes lock no rows for each other: a fence does not keep others out, and a crash of \
             several nodes may free locks (class C); let all who lock use the same node",
        ));
    }
    findings
}

/// Returns this host's clock, only for comparison with the server's.
fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the findings about a durable server with these differences.
    fn told(differences: &[(&str, &str)]) -> Vec<String> {
        let sound = [
            ("version", "10.11.0"),
            ("version_comment", "MariaDB"),
            ("innodb_flush_log_at_trx_commit", "1"),
            ("sync_binlog", "1"),
            ("log_bin", "OFF"),
            ("read_only", "OFF"),
            ("innodb_doublewrite", "ON"),
            ("innodb_flush_method", "O_DIRECT"),
        ];
        let variables = sound.iter().chain(differences);
        let variables = variables.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let findings = findings(&variables.collect());
        findings.into_iter().skip(1).map(|finding| finding.message).collect()
    }

    #[test]
    fn a_sound_server_is_only_named() {
        assert_eq!(told(&[]), Vec::<String>::new());
    }

    #[test]
    fn each_setting_that_weakens_locks_is_told_by_its_name() {
        for (name, value) in [
            ("innodb_flush_log_at_trx_commit", "0"),
            ("innodb_flush_log_at_trx_commit", "2"),
            ("read_only", "ON"),
            ("innodb_doublewrite", "OFF"),
            ("innodb_flush_method", "nosync"),
        ] {
            let told = told(&[(name, value)]);
            assert!(told.len() == 1 && told[0].contains(name), "{name}={value}: {told:?}");
        }
        let told_of_log =
            told(&[("log_bin", "ON"), ("sync_binlog", "0"), ("binlog_format", "STATEMENT")]);
        assert_eq!(told_of_log.len(), 3, "{told_of_log:?}");
        assert!(told(&[("wsrep_on", "ON")])[0].contains("Galera"));
    }
}
