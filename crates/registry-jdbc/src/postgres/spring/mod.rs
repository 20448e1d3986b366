//! Locks in the table of a Spring Integration `JdbcLockRegistry`.
//!
//! Contains only the differences from the native layout, which is in `backend`. Names of keys and
//! owners are in `server::spring`.

mod sql;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, FencingToken, Finding, Grant, GuaranteeClass,
    Holder, Key, LockBackend, Reach, Release, Renewal,
};
use sqlx::postgres::PgRow;

use super::backend::{bytes, claim_id, column, micros, span};
use super::config::{PostgresConfig, quoted, unusable};
use super::ears::{Channel, Ears};
use super::error::{damaged, is_fenced, row_is_locked, tells_of_locked_row};
use super::fence::Fenced;
use super::link::{Link, Repeat};
use super::open::{self, Opened};
use super::statement::{Statement, Value};
use crate::server::spring::{self, Generation, PEER_POLL, client_id, is_claim, lock_key};
use crate::server::{Errand, RowId, SpringTable};
use sql::Texts;

/// Locks in the table of a Spring Integration `JdbcLockRegistry` in a PostgreSQL database. This
/// program and the Java programs exclude each other.
///
/// [`SpringTable`] lists what both sides must agree on. Everything else works as in a
/// [`PostgresBackend`](crate::PostgresBackend): the server's clock ends grants, tokens only grow,
/// and each claim is its own owner. A [`Fence`](crate::Fence) works too, but its row lock blocks
/// renewals: the lock is not renewed while the fenced transaction is open.
///
/// A release by this program wakes its waiting callers at once. Spring sends no notification, so
/// its releases are found by the registry's [poll](registry_core::RegistryBuilder::poll).
pub struct PostgresSpringBackend {
    config: PostgresConfig,
    table: SpringTable,
    store: String,
    native: super::sql::Texts,
    texts: Texts,
    link: Link,
    ears: Option<Ears>,
    channel: Channel,
    /// Distinguishes the native rows of this table and region from all others, including those of
    /// native namespaces.
    part: String,
}

impl PostgresSpringBackend {
    /// Checks the configuration and the table without I/O. Opening the store calls this first.
    ///
    /// # Errors
    /// [`BackendError`], `Misconfigured`, for the first invalid setting.
    pub fn check(config: &PostgresConfig, table: &SpringTable) -> Result<(), BackendError> {
        table.check().map_err(|says| unusable(&says))?;
        config.check()
    }

    /// Connects to the server, and creates Spring's table and those of this program if they are
    /// missing.
    ///
    /// [`with_create_schema`](PostgresConfig::with_create_schema) turns the creation off. The
    /// namespace is ignored: Spring has regions.
    ///
    /// # Errors
    /// As for [`PostgresBackend::open`](crate::PostgresBackend::open); also `Misconfigured` for a
    /// table of another generation of Spring.
    ///
    /// # Cancel safety
    /// Dropping the future may leave complete tables behind, never partial ones.
    pub async fn open(config: PostgresConfig, table: SpringTable) -> Result<Self, BackendError> {
        Self::check(&config, &table)?;
        let Opened { tables, store } = open::open(&config).await?;
        let link = Link::new(&config);
        let lock = find_or_make(&config, &table, &link).await?;
        let part = format!("{lock} {}", table.region());
        let channel = Channel::of(RowId::of_namespace(&part));
        let ears = config.for_listening().map(|server| Ears::new(server, channel.clone()));
        Ok(Self {
            native: super::sql::Texts::new(&tables),
            texts: Texts::new(&tables, &lock, table.generation),
            config,
            table,
            store,
            link,
            ears,
            channel,
            part,
        })
    }

    /// Returns the id of the native row with the token.
    fn row_id(&self, lock_key: &str) -> RowId {
        RowId::beside(&self.part, lock_key)
    }

    /// Returns a namespace that no native one can equal: it begins with a byte that is not valid
    /// UTF-8.
    fn namespace(&self) -> Value {
        Value::Bytes([b"\xff", self.part.as_bytes()].concat())
    }

    fn region(&self) -> Value {
        bytes(self.table.region().as_bytes())
    }

    fn patience(&self) -> Value {
        let millis = self.config.busy_timeout.as_millis().max(1);
        Value::Word(format!("{millis}ms"))
    }

    fn message(&self, lock_key: &str) -> Value {
        bytes(&self.row_id(lock_key).short())
    }

    /// Returns the statements that a fence sends.
    pub(super) fn fenced(&self, claim: &Claim, token: FencingToken) -> Fenced<'_> {
        let lock_key = lock_key(claim.key());
        let statement = Statement::new(
            &self.texts.fence,
            [
                self.region(),
                bytes(lock_key.as_bytes()),
                bytes(client_id(claim.id()).as_bytes()),
                bytes(self.row_id(&lock_key).bytes()),
                claim_id(claim),
                Value::Number(i64::from(token)),
            ],
        );
        Fenced {
            statement,
            meta: &self.native.meta,
            store: &self.store,
            prepared: self.link.is_prepared(),
        }
    }

    /// Grants the key if it is free, or returns its holder, by one statement. Returns `None` if
    /// another client acquired or released the key during the statement.
    async fn ask_for(&self, claim: &Claim, mark: u64) -> Result<Option<Attempt>, BackendError> {
        let (lock_key, client) = (lock_key(claim.key()), client_id(claim.id()));
        let statement = Statement::new(
            &self.texts.acquire,
            [
                self.region(),
                bytes(lock_key.as_bytes()),
                bytes(client.as_bytes()),
                Value::Number(micros(claim.lease())),
                bytes(self.row_id(&lock_key).bytes()),
                self.namespace(),
                bytes(claim.key().as_str().as_bytes()),
                claim_id(claim),
                Value::Number(i64::from(claim.token_block())),
                Value::MaybeBytes(claim.label().map(|label| label.as_bytes().to_vec())),
                self.patience(),
            ],
        );
        // Only the engine may retry, as in the native layout.
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Never).await?;
        let row = rows.first().ok_or_else(|| damaged("a statement was not answered"))?;
        if let Some(token) = column::<Option<i64>>(row, 0)? {
            let grant = Grant::new(Some(fencing_token(token)?), claim.lease());
            return Ok(Some(Attempt::Granted(grant)));
        }
        if !column::<bool>(row, 7)? {
            return Ok(None);
        }
        let held = told_of(Holder::new(claim.key().clone()), row, 1)?;
        let left = held.lease_left.unwrap_or_default();
        if column::<Option<String>>(row, 1)?.is_some_and(|holder| holder == client) {
            return Ok(Some(Attempt::Granted(Grant::new(held.token, left.min(claim.lease())))));
        }
        Ok(Some(Attempt::Busy(
            Busy::new().with_retry_after(left).with_mark(mark).with_holder(held),
        )))
    }

    async fn renew_chunk(
        &self,
        claims: &[Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let keys: Vec<String> = claims.iter().map(|claim| lock_key(claim.key())).collect();
        let ids = keys.iter().map(|key| self.row_id(key).bytes().to_vec()).collect();
        let statement = Statement::new(
            &self.texts.renew,
            [
                self.region(),
                Value::ManyBytes(keys.into_iter().map(String::into_bytes).collect()),
                Value::ManyBytes(
                    claims.iter().map(|claim| client_id(claim.id()).into_bytes()).collect(),
                ),
                Value::ManyBytes(ids),
                Value::ManyBytes(
                    claims.iter().map(|claim| claim.id().to_bytes().to_vec()).collect(),
                ),
                Value::Numbers(claims.iter().map(|claim| micros(claim.lease())).collect()),
            ],
        );
        let shortest = claims.iter().map(Claim::lease).min().unwrap_or_default();
        // A repeated renewal has the same effect as a single one.
        let rows = self.link.rows(Errand::Renew(shortest), &statement, Repeat::Harmless).await?;
        if rows.len() != claims.len() {
            return Err(damaged("a renewal was not answered for each claim"));
        }
        rows.iter()
            .zip(claims)
            .map(|(row, claim)| {
                let (left, is_there): (Option<i64>, bool) = (column(row, 0)?, column(row, 1)?);
                Ok(match left {
                    Some(left) => Ok(Renewal::Renewed(span(left).min(claim.lease()))),
                    None if is_there => Err(row_is_locked()),
                    None => Ok(Renewal::Gone),
                })
            })
            .collect()
    }

    /// Checks that the row of the table `meta` exists, after several attempts without an answer.
    /// Without that row no lock is ever granted.
    async fn check_meta(&self) -> Result<(), BackendError> {
        let statement = Statement::new(&self.native.meta, []);
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
        if rows.is_empty() {
            return Err(damaged("the table with the name meta has lost its row").as_refused());
        }
        Ok(())
    }
}

#[async_trait]
impl LockBackend for PostgresSpringBackend {
    /// Class C, because the Java peers decide by their own hosts' clocks whether a lock has
    /// expired.
    fn capabilities(&self) -> Capabilities {
        let capabilities = Capabilities::new("postgres", GuaranteeClass::C, Reach::Network)
            .with_fencing()
            .with_peer_poll(PEER_POLL)
            .with_labels()
            .with_inspect();
        if self.ears.is_some() { capabilities.with_wakes() } else { capabilities }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        // The same limit, and for the same reason, as in the native layout.
        const TRIES_MAX: u32 = 3;
        for _ in 0..TRIES_MAX {
            let mark = self.ears.as_ref().map_or(0, Ears::moment);
            if let Some(attempt) = self.ask_for(claim, mark).await? {
                return Ok(attempt);
            }
        }
        self.check_meta().await?;
        Ok(Attempt::Busy(Busy::new().with_retry_after(Duration::ZERO)))
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let mut answers = Vec::with_capacity(claims.len());
        let mut trouble: Option<BackendError> = None;
        for chunk in claims.chunks(CLAIMS_MAX) {
            // After a store error the remaining chunks fail at once. Otherwise each could wait for
            // the full time-out.
            let answer = match trouble.take() {
                Some(error) => Err(error),
                None => self.renew_chunk(chunk).await,
            };
            match answer {
                Ok(renewals) => answers.extend(renewals),
                Err(error) => {
                    answers.extend(chunk.iter().map(|_| Err(error.clone())));
                    trouble = Some(error);
                }
            }
        }
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let lock_key = lock_key(claim.key());
        // The fenced transaction locks the row, and the calling code may be what must end that
        // transaction.
        let patience = if claim.is_fenced() {
            Value::Word(format!("{}ms", FENCED_PATIENCE.as_millis()))
        } else {
            self.patience()
        };
        let statement = Statement::new(
            &self.texts.release,
            [
                self.region(),
                bytes(lock_key.as_bytes()),
                bytes(client_id(claim.id()).as_bytes()),
                patience,
                Value::Word(self.channel.name().to_owned()),
                self.message(&lock_key),
            ],
        );
        // A repeated release would return `NotHeld`. So the caller decides whether to repeat it.
        let rows = self.link.rows(Errand::Release, &statement, Repeat::Never).await;
        let rows = rows.map_err(|error| {
            let fenced = claim.is_fenced() && tells_of_locked_row(&error);
            if fenced { is_fenced(error) } else { error }
        })?;
        super::purge::by_chance(claim, &self.link, &self.native, self.config.purge_after).await;
        freed(&rows)
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        match &self.ears {
            Some(ears) => ears.wait(self.row_id(&lock_key(claim.key())).short(), busy.mark).await,
            None => std::future::pending().await,
        }
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        let lock_key = lock_key(key);
        let id = bytes(self.row_id(&lock_key).bytes());
        let values = [self.region(), bytes(lock_key.as_bytes()), id];
        let statement = Statement::new(&self.texts.look, values);
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
        rows.first().map(|row| told_of(Holder::new(key.clone()), row, 0)).transpose()
    }

    /// Returns the holders of the region. A lock of this program is listed by its key, any other
    /// lock by its UUID, which is a key of the same lock.
    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let statement = Statement::new(&self.texts.list, [self.region(), self.namespace()]);
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
        rows.iter()
            .map(|row| {
                let key = column::<Option<Vec<u8>>>(row, 7)?;
                let key = key.and_then(|key| String::from_utf8(key).ok());
                let key = match key {
                    Some(key) => key,
                    // `CHAR(36)` pads shorter keys with blanks, and manually written rows may have
                    // such keys.
                    None => column::<String>(row, 6)?.trim_end().to_owned(),
                };
                let key = Key::new(&key)
                    .map_err(|_| damaged("a row's key is not one that can be locked"))?;
                told_of(Holder::new(key), row, 0)
            })
            .collect()
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let lock_key = lock_key(key);
        let statement = Statement::new(
            &self.texts.force_release,
            [
                self.region(),
                bytes(lock_key.as_bytes()),
                self.patience(),
                Value::Word(self.channel.name().to_owned()),
                self.message(&lock_key),
            ],
        );
        let rows = self.link.rows(Errand::Release, &statement, Repeat::Never).await?;
        freed(&rows)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let mut findings = super::diagnose::look_around(&self.link, &self.config).await?;
        findings.push(Finding::note(spring::CLOCKS));
        Ok(findings)
    }

    async fn close(&self) {
        if let Some(ears) = &self.ears {
            ears.close();
        }
        self.link.close().await;
    }
}

/// Finds Spring's table, or creates it. Returns its qualified, quoted name.
async fn find_or_make(
    config: &PostgresConfig,
    table: &SpringTable,
    link: &Link,
) -> Result<String, BackendError> {
    let (schema, name) = table.name();
    let schema = schema.map(str::to_owned).or_else(|| config.tables.schema.clone());
    // Unquoted as in Spring's statements, so that the server converts the letters to lower case.
    let named = match &schema {
        Some(schema) => format!("{schema}.{name}"),
        None => name,
    };
    let text = sql::find(&named);
    let find = Statement::new(&text, []);
    let mut rows = link.rows(Errand::Acquire, &find, Repeat::Harmless).await?;
    if rows.is_empty() {
        if !config.tables.create {
            return Err(unusable(&format!(
                "Spring's table {named} is missing; have it made by Spring's schema-postgresql.sql, or let this program make it"
            )));
        }
        let text = sql::make(&named, table.generation);
        let make = Statement::new(&text, []);
        let made = link.rows(Errand::Acquire, &make, Repeat::Harmless).await;
        rows = link.rows(Errand::Acquire, &find, Repeat::Harmless).await?;
        if rows.is_empty() {
            // The error is only the cause if no other process has created the table meanwhile.
            made.map_err(BackendError::as_refused)?;
        }
    }
    let row = rows.first().ok_or_else(|| damaged("a table that was made is not there"))?;
    let tells_end: bool = column(row, 2)?;
    match (table.generation, tells_end) {
        (Generation::V7, false) => Err(unusable(&spring::is_older(&named))),
        (Generation::V6 { .. }, true) => Err(unusable(&spring::is_newer(&named))),
        _ => Ok(format!(
            "{}.{}",
            quoted(&column::<String>(row, 0)?),
            quoted(&column::<String>(row, 1)?)
        )),
    }
}

/// Reads client, claim, token, label and times from adjacent columns, beginning at `first`. The
/// native row's columns belong to the holder only if its claim matches the client.
fn told_of(holder: Holder, row: &PgRow, first: usize) -> Result<Holder, BackendError> {
    let client: Option<String> = column(row, first)?;
    let claim: Option<Vec<u8>> = column(row, first + 1)?;
    let left = Some(span(column(row, first + 5)?));
    if !is_claim(client.as_deref(), claim.as_deref()) {
        return Ok(holder.with_times(None, left));
    }
    let label: Option<Vec<u8>> = column(row, first + 3)?;
    let label = label.map(|label| String::from_utf8_lossy(&label).into_owned());
    Ok(holder
        .with_label(label)
        .with_token(Some(fencing_token(column(row, first + 2)?)?))
        .with_times(Some(span(column(row, first + 4)?)), left))
}

fn fencing_token(token: i64) -> Result<FencingToken, BackendError> {
    FencingToken::try_from(token).map_err(|_| damaged("a row's token is negative"))
}

fn freed(rows: &[PgRow]) -> Result<Release, BackendError> {
    for row in rows {
        if column(row, 0)? {
            return Ok(Release::Freed);
        }
    }
    Ok(Release::NotHeld)
}

/// How long the release of a fenced claim waits for the row. Other statements that read the row
/// lock it for a shorter time.
const FENCED_PATIENCE: Duration = Duration::from_millis(100);

/// The maximum number of claims that one statement renews.
const CLAIMS_MAX: usize = 1000;

impl fmt::Debug for PostgresSpringBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresSpringBackend")
            .field("config", &self.config)
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}
