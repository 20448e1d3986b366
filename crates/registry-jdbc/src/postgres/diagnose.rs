//! Checks a PostgreSQL store for `lockreg doctor`. Changes nothing.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use registry_core::{BackendError, Finding};
use sqlx::postgres::PgRow;

use super::backend::{PostgresBackend, column};
use super::config::{Listen, PostgresConfig};
use super::error::damaged;
use super::link::{Link, Repeat};
use super::sql::Text;
use super::statement::{Statement, Value};
use crate::server::Errand;

/// The clock difference between server and host that is reported.
const CLOCK_DISTANCE_MAX: Duration = Duration::from_secs(1);

impl PostgresBackend {
    /// Returns all findings of [`diagnose`](registry_core::LockBackend::diagnose).
    pub(super) async fn look_for_trouble(&self) -> Result<Vec<Finding>, BackendError> {
        let mut findings = look_around(&self.link, &self.config).await?;
        findings.extend(self.listen_for_trouble().await);
        Ok(findings)
    }

    /// Returns a finding if the listener does not receive notifications.
    async fn listen_for_trouble(&self) -> Option<Finding> {
        let ears = self.ears.as_ref()?;
        let word = format!("try_{:016x}", fastrand::u64(..));
        let text = Text::new(TELL);
        let values = [Value::Word(self.channel().to_owned()), Value::Word(word.clone())];
        let statement = Statement::new(&text, values);
        let tell = async {
            let told = self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await;
            told.map(drop)
        };
        let why = match ears.try_out(&word, tell).await {
            Ok(true) => return None,
            Ok(false) => {
                "a word that was said here was not heard; is it through a pooler, or in another database, that `listen` leads?".to_owned()
            }
            Err(error) => format!("listening: {error}"),
        };
        Some(Finding::warning(format!(
            "releases are not heard of, so those who wait look by themselves; {why}"
        )))
    }
}

impl PostgresBackend {
    /// Checks whether the server has connections for this number of row locks, and whether existing
    /// row locks hold back vacuum.
    pub(super) async fn look_for_room(&self, row_locks: u32) -> Result<Vec<Finding>, BackendError> {
        let text = Text::new(ROOM);
        let statement = Statement::new(&text, []);
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
        let row = rows.first().ok_or_else(|| damaged("a question was not answered"))?;
        let (connections, old): (i64, i64) = (column(row, 0)?, column(row, 1)?);
        let mut findings = Vec::new();
        if i64::from(row_locks) > connections / 2 {
            findings.push(Finding::warning(format!(
                "row_locks is {row_locks}, and the server takes {connections} connections from all programs together; raise max_connections, \
                 or lower row_locks"
            )));
        }
        if old > 0 {
            findings.push(Finding::warning(format!(
                "{old} row locks are held for more than five minutes: the server cleans up no dead rows since then, in no table of the database; \
                 use leases for locks that are held long"
            )));
        }
        Ok(findings)
    }
}

/// Returns the findings about the server that `link` connects to.
pub(super) async fn look_around(
    link: &Link,
    config: &PostgresConfig,
) -> Result<Vec<Finding>, BackendError> {
    let text = Text::new(LOOK_AROUND);
    let statement = Statement::new(&text, []);
    let before = now();
    let rows = link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
    let after = now();
    let row = rows.first().ok_or_else(|| damaged("a question was not answered"))?;

    let mut findings = settings(row)?;
    let theirs: i64 = column(row, 8)?;
    let distance = (theirs - (before + (after - before) / 2)).unsigned_abs();
    if Duration::from_micros(distance) > CLOCK_DISTANCE_MAX {
        findings.push(Finding::note(format!(
            "the server's clock and this host's differ by {:?}: locks only follow the server's, but one of them is wrong",
            Duration::from_millis(distance / 1000)
        )));
    }
    if !link.is_prepared() && matches!(config.listen, Listen::Here | Listen::Off)
        || matches!(config.listen, Listen::Off)
    {
        findings.push(Finding::note(
            "nobody listens to releases: those who wait look by themselves; behind a pooler, `listen` can name the server itself",
        ));
    }
    Ok(findings)
}

fn settings(row: &PgRow) -> Result<Vec<Finding>, BackendError> {
    let word = |index| column::<String>(row, index);
    let mut findings = Vec::new();
    let version = word(0)?;
    findings.push(Finding::note(format!("PostgreSQL {version}")));
    if column::<bool>(row, 7)? {
        findings.push(Finding::warning(
            "this server is a standby; locks can be taken on the primary only",
        ));
    }
    let synchronous = word(1)?;
    if synchronous == "off" {
        findings.push(Finding::warning(
            "synchronous_commit is off: a crash of the server may free locks of the last moments; set it to on for this user",
        ));
    }
    for (index, name) in [(2, "fsync"), (3, "full_page_writes")] {
        if word(index)? == "off" {
            findings.push(Finding::warning(format!(
                "{name} is off: a crash of the host may free or damage locks; set it to on"
            )));
        }
    }
    let isolation = word(4)?;
    if isolation != "read committed" {
        findings.push(Finding::warning(format!(
            "default_transaction_isolation is {isolation:?}: contended locks cost retries; set it to \"read committed\" for this user"
        )));
    }
    if word(5)? == "on" {
        findings.push(Finding::warning(
            "default_transaction_read_only is on: locks cannot be taken; set it to off for this user",
        ));
    }
    if column::<i64>(row, 6)? > 0 && word(9)?.is_empty() {
        findings.push(Finding::note(
            "standbys follow asynchronously: if one is promoted after a crash, locks of the last moments may be free (class C); \
             synchronous_standby_names makes grants wait for a standby",
        ));
    }
    Ok(findings)
}

/// Parameters: channel, word.
const TELL: &str = "SELECT pg_notify($1::text, $2::text) IS NULL";

/// Returns the server's connection limit and the number of old row locks. The server does not show
/// other users' transactions.
const ROOM: &str = "\
    SELECT current_setting('max_connections')::bigint, \
        (SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lock-registry' AND state = 'idle in transaction' \
            AND xact_start < clock_timestamp() - interval '5 minutes')";

/// Binds no value, so it works in every mode of sending statements.
const LOOK_AROUND: &str = "\
    SELECT current_setting('server_version'), current_setting('synchronous_commit'), current_setting('fsync'), \
        current_setting('full_page_writes'), current_setting('default_transaction_isolation'), \
        current_setting('default_transaction_read_only'), (SELECT count(*) FROM pg_stat_replication), pg_is_in_recovery(), \
        (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, current_setting('synchronous_standby_names')";

/// Returns this host's time in microseconds, for the comparison only.
fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
}
