//! Locks in the table of a Spring Integration `JdbcLockRegistry`.
//!
//! Contains only what differs from the native layout. The rest of the store is in `backend`;
//! `server::spring` maps keys to names in Spring's table.

mod sql;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, FencingToken, Finding, Grant, GuaranteeClass,
    Holder, Key, LockBackend, Reach, Release, Renewal,
};
use sqlx::mysql::MySqlRow;
use sqlx::{MySql, Row, query, raw_sql};
use tokio::time::sleep;

use super::config::{MySqlConfig, unusable};
use super::error;
use super::fence::{Fenced, UNLOCK_PAUSES};
use super::link::{Link, Repeat};
use super::open::{self, Opened};
use super::plain::{Value, plain};
use super::purge;
use super::sql::{SIZES, Texts as NativeTexts, quoted};
use super::statement::{Statement, filled, span};
use crate::server::spring::{self, Generation, PEER_POLL, client_id, is_claim, lock_key};
use crate::server::{Errand, RowId, SpringTable};
use sql::{Texts, Wanted, micros};

/// Locks in the table of a Spring Integration `JdbcLockRegistry` in a MariaDB or MySQL database.
/// This program and Java programs exclude each other.
///
/// For the requirements of both sides, see [`SpringTable`]. Here, the table's name is
/// case-sensitive. Everything else is as in [`MySqlBackend`](crate::MySqlBackend): leases expire by
/// the server's clock, tokens only grow, a claim is its own owner, and a [`Fence`](crate::Fence)
/// works. There are no release notifications: waiters detect releases by the registry's
/// [poll](registry_core::RegistryBuilder::poll).
pub struct MySqlSpringBackend {
    config: MySqlConfig,
    table: SpringTable,
    store: Vec<u8>,
    native: NativeTexts,
    texts: Texts,
    link: Link,
    /// Distinguishes the native rows of this table and region from those of other tables and
    /// regions, and of native namespaces.
    part: String,
}

impl MySqlSpringBackend {
    /// Validates the configuration without I/O. Opening the store calls this first.
    ///
    /// # Errors
    /// [`BackendError`], `Misconfigured`, for the first invalid value.
    pub fn check(config: &MySqlConfig, table: &SpringTable) -> Result<(), BackendError> {
        table.check().map_err(|says| unusable(&says))?;
        config.check()
    }

    /// Connects to the server. Creates Spring's table and the native tables if they are missing,
    /// unless this is [turned off](MySqlConfig::with_create_schema). The namespace is ignored:
    /// Spring has regions.
    ///
    /// # Errors
    /// As for [`MySqlBackend::open`](crate::MySqlBackend::open). Also `Misconfigured` for a table
    /// of another generation of Spring.
    ///
    /// # Cancel safety
    /// Dropping the future may leave some of the tables behind. The next open of the store creates
    /// the others.
    pub async fn open(config: MySqlConfig, table: SpringTable) -> Result<Self, BackendError> {
        Self::check(&config, &table)?;
        let link = Link::new(&config);
        let Opened { texts: native, store } = open::open(&config, &link).await?;
        let lock = find_or_make(&config, &table, &link).await?;
        let database = config.server.get_database().unwrap_or_default();
        let texts =
            Texts::new(database, &config.table_prefix, &lock, table.region(), table.generation);
        // In most collations, regions that differ only in case are equal.
        let part = format!("{lock} {}", table.region().to_ascii_lowercase());
        Ok(Self { config, table, store, native, texts, link, part })
    }

    /// Returns the id of the native row with the key's tokens.
    fn row_id(&self, lock_key: &str) -> Vec<u8> {
        RowId::beside(&self.part, lock_key).bytes().to_vec()
    }

    /// Returns a namespace that no native namespace equals, because those are UTF-8. A hash,
    /// because a table's name may be too long.
    fn namespace(&self) -> Vec<u8> {
        let part = RowId::beside(&self.part, "");
        [b"\xffspring ", part.bytes()].concat()
    }

    /// Returns the queries of a fence.
    pub(super) fn fenced(&self, claim: &Claim, token: FencingToken) -> Fenced<'_> {
        let (lock_key, token) = (lock_key(claim.key()), i64::from(token));
        let values = [
            Value::Bytes(self.row_id(&lock_key)),
            Value::Bytes(claim.id().to_bytes().to_vec()),
            Value::Number(token),
            Value::Number(token),
            Value::Word(lock_key),
            Value::Word(client_id(claim.id())),
        ];
        let statement = plain(&self.texts.fence, &values);
        Fenced { statement, meta: plain(&self.native.meta, &[]), store: &self.store }
    }

    /// Waits for the end of a transaction that this claim has fenced, as in the native layout.
    async fn wait_for_fence(&self, claim: &Claim) -> Result<(), BackendError> {
        for pause in UNLOCK_PAUSES.into_iter().map(Some).chain([None]) {
            // If this fails, nothing was released.
            let is_open = self.has_open_fence(claim).await.map_err(BackendError::as_refused)?;
            if !is_open {
                return Ok(());
            }
            if let Some(pause) = pause {
                sleep(pause).await;
            }
        }
        Err(error::is_fenced(self.link.place()))
    }

    async fn has_open_fence(&self, claim: &Claim) -> Result<bool, BackendError> {
        // A fence locks both rows. The native row exists as long as the claim does.
        let id = self.row_id(&lock_key(claim.key()));
        let look = || query(self.native.lock_row.safe()).bind(id.clone());
        if !self.link.rows(Errand::Release, look).await?.is_empty() {
            return Ok(false);
        }
        let held = self.look(claim.key(), Errand::Release).await?;
        Ok(held.is_some_and(|held| held.client == Some(client_id(claim.id()))))
    }

    /// Returns the current grant of the key.
    async fn look(&self, key: &Key, errand: Errand) -> Result<Option<Held>, BackendError> {
        let lock_key = lock_key(key);
        let make =
            || query(self.texts.look.safe()).bind(self.row_id(&lock_key)).bind(lock_key.clone());
        let rows = self.link.rows(errand, make).await?;
        rows.first().map(|row| self.held(Holder::new(key.clone()), row)).transpose()
    }

    /// Grants the key if it is free. Returns the grant that the key has afterwards.
    async fn take(&self, claim: &Claim) -> Result<Option<Held>, BackendError> {
        let (lock_key, client) = (lock_key(claim.key()), client_id(claim.id()));
        let (id, namespace) = (self.row_id(&lock_key), self.namespace());
        let make = || {
            raw_sql(self.texts.acquire(&Wanted {
                lock_key: &lock_key,
                client: &client,
                lease: claim.lease(),
                id: &id,
                namespace: &namespace,
                key: claim.key().as_str().as_bytes(),
                claim: &claim.id().to_bytes(),
                block: claim.token_block(),
                label: claim.label().map(str::as_bytes),
            }))
        };
        let rows = self.link.transaction(Errand::Acquire, make).await?;
        rows.first().map(|row| self.held(Holder::new(claim.key().clone()), row)).transpose()
    }

    /// Reads a grant. The columns of the native row are valid only if that row has the same claim.
    fn held(&self, holder: Holder, row: &MySqlRow) -> Result<Held, BackendError> {
        let client: Option<String> = self.column(row, 0)?;
        let claim: Option<Vec<u8>> = self.column(row, 1)?;
        let lease_left = span(self.column(row, 5)?);
        let holder = if is_claim(client.as_deref(), claim.as_deref()) {
            let label: Option<Vec<u8>> = self.column(row, 3)?;
            let token: i64 = self.column(row, 2)?;
            let token = FencingToken::try_from(token)
                .map_err(|_| self.damaged("a row's token is negative"))?;
            holder
                .with_label(label.map(|label| String::from_utf8_lossy(&label).into_owned()))
                .with_token(Some(token))
                .with_times(Some(span(self.column(row, 4)?)), Some(lease_left))
        } else {
            holder.with_times(None, Some(lease_left))
        };
        Ok(Held { client, lease_left, holder })
    }

    /// Renews claims with the same lease.
    async fn renew_chunk(
        &self,
        claims: &[&Claim],
        lease: Duration,
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let asked_at = Instant::now();
        let keys: Vec<String> = claims.iter().map(|claim| lock_key(claim.key())).collect();
        let clients: Vec<String> = claims.iter().map(|claim| client_id(claim.id())).collect();
        let limit = i64::try_from(claims.len()).unwrap_or(i64::MAX);
        // A repeated renewal has no further effect.
        let make = || {
            let statement = query(NativeTexts::sized(&self.texts.renew, claims.len()).safe());
            let statement = filled(statement, keys.iter().cloned());
            let statement = filled(statement, clients.iter().cloned());
            statement.bind(limit).bind(self.texts.written(lease))
        };
        let done = self.link.change(Errand::Renew(lease), Repeat::Harmless, make).await?;
        let make = || {
            let statement =
                query(NativeTexts::sized(&self.texts.renew_beside, claims.len()).safe());
            let statement = filled(statement, keys.iter().map(|key| self.row_id(key)));
            let ids = claims.iter().map(|claim| claim.id().to_bytes().to_vec());
            filled(statement, ids).bind(limit).bind(micros(lease))
        };
        // The grants are renewed. The native rows matter only for the purge, so an error is
        // ignored.
        let _ = self.link.change(Errand::Renew(lease), Repeat::Harmless, make).await;
        let wanted: HashSet<_> = claims.iter().map(|claim| claim.id()).collect();
        if usize::try_from(done.rows_affected()) == Ok(wanted.len()) {
            return Ok(claims.iter().map(|_| Ok(Renewal::Renewed(lease))).collect());
        }
        // Some grants are gone, or a fence has their rows locked. The rows show which.
        let make = || {
            let statement = query(NativeTexts::sized(&self.texts.lasting, claims.len()).safe());
            filled(statement, keys.iter().cloned())
        };
        let rows = self.link.rows(Errand::Renew(lease), make).await?;
        let since = asked_at.elapsed();
        let mut lasting = HashMap::<Option<String>, Duration>::with_capacity(rows.len());
        for row in &rows {
            lasting.insert(self.column(row, 0)?, span(self.column(row, 1)?));
        }
        let answer = |client: String| match lasting.get(&Some(client)) {
            None => Ok(Renewal::Gone),
            // Valid for the reason given in the native layout, see `MySqlBackend::renew_chunk`.
            Some(left) if left.saturating_add(since) >= lease => {
                Ok(Renewal::Renewed((*left).min(lease)))
            }
            Some(_) => Err(error::row_is_locked(self.link.place())),
        };
        Ok(clients.into_iter().map(answer).collect())
    }

    fn column<'r, T>(&self, row: &'r MySqlRow, index: usize) -> Result<T, BackendError>
    where
        T: sqlx::Decode<'r, MySql> + sqlx::Type<MySql>,
    {
        row.try_get(index).map_err(|error| self.link.explain(error))
    }

    fn damaged(&self, says: &str) -> BackendError {
        error::damaged(self.link.place(), says)
    }

    /// Reads the meta row after an attempt failed although the key is free. Without that row, or on
    /// a replica, nothing ever gets a token.
    async fn check_meta(&self) -> Result<(), BackendError> {
        let rows = self.link.rows(Errand::Acquire, || query(self.native.meta.safe())).await?;
        let row = rows.first();
        let row =
            row.ok_or_else(|| self.damaged("the meta table has lost its row").as_refused())?;
        if self.column::<i64>(row, 2)? == 0 {
            // New connections may lead to the server's successor.
            self.link.forget();
            return Err(error::read_only(self.link.place()));
        }
        Ok(())
    }

    fn key_and_client(text: &super::sql::Text, claim: &Claim) -> Statement {
        query(text.safe()).bind(lock_key(claim.key())).bind(client_id(claim.id()))
    }
}

/// A grant as stored in the tables.
#[derive(Debug)]
struct Held {
    client: Option<String>,
    lease_left: Duration,
    holder: Holder,
}

#[async_trait]
impl LockBackend for MySqlSpringBackend {
    /// Class C because of the Spring peers: they check the expiry of locks by the clocks of their
    /// own hosts.
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("mysql", GuaranteeClass::C, Reach::Network)
            .with_fencing()
            .with_peer_poll(PEER_POLL)
            .with_labels()
            .with_inspect()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        // Between an attempt and the query the key may come free. After this many repetitions, the
        // attempt returns `Busy` without a holder and is retried at once.
        const TRIES_MAX: u32 = 3;
        for _ in 0..TRIES_MAX {
            let held = match self.look(claim.key(), Errand::Acquire).await? {
                Some(held) => held,
                None => match self.take(claim).await? {
                    Some(held) => held,
                    None => continue,
                },
            };
            if held.client == Some(client_id(claim.id())) {
                let Some(token) = held.holder.token else {
                    return Err(self.damaged("a grant has no row with its token"));
                };
                let lease = held.lease_left.min(claim.lease());
                return Ok(Attempt::Granted(Grant::new(Some(token), lease)));
            }
            return Ok(Attempt::Busy(
                Busy::new().with_retry_after(held.lease_left).with_holder(held.holder),
            ));
        }
        self.check_meta().await?;
        Ok(Attempt::Busy(Busy::new().with_retry_after(Duration::ZERO)))
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let mut by_lease: HashMap<Duration, Vec<usize>> = HashMap::new();
        for (place, claim) in claims.iter().enumerate() {
            by_lease.entry(claim.lease()).or_default().push(place);
        }
        let mut answers: Vec<Option<Result<Renewal, BackendError>>> = vec![None; claims.len()];
        let mut trouble: Option<BackendError> = None;
        for (lease, places) in by_lease {
            for places in places.chunks(SIZES[SIZES.len() - 1]) {
                let chunk: Vec<&Claim> = places.iter().map(|&place| &claims[place]).collect();
                // After an error no further statement is sent: the same fault would probably delay
                // each of them as long.
                let renewed = match &trouble {
                    Some(error) => Err(error.clone()),
                    None => self.renew_chunk(&chunk, lease).await,
                };
                let renewed = renewed.unwrap_or_else(|error| {
                    trouble = Some(error.clone());
                    places.iter().map(|_| Err(error.clone())).collect()
                });
                for (&place, renewal) in places.iter().zip(renewed) {
                    answers[place] = Some(renewal);
                }
            }
        }
        answers.into_iter().map(|answer| answer.expect("every place is in one chunk")).collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        if claim.is_fenced() {
            self.wait_for_fence(claim).await?;
        }
        // Not repeated: the second result would be that the claim held nothing. The caller decides
        // about a retry.
        let make = || Self::key_and_client(&self.texts.release, claim);
        let done = self.link.change(Errand::Release, Repeat::Never, make).await?;
        let freed = done.rows_affected() > 0;
        if !freed {
            // The grant has expired. Its row is deleted so that peers do not find it.
            let make = || Self::key_and_client(&self.texts.clear, claim);
            self.link.change(Errand::Release, Repeat::Harmless, make).await?;
        }
        purge::by_chance(claim, &self.link, &self.native, self.config.purge_after).await;
        Ok(if freed { Release::Freed } else { Release::NotHeld })
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        Ok(self.look(key, Errand::Acquire).await?.map(|held| held.holder))
    }

    /// Lists the grants of this program by key, and those of peers by UUID, which is a key of the
    /// same lock.
    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let make = || query(self.texts.list.safe()).bind(self.namespace());
        let rows = self.link.rows(Errand::Acquire, make).await?;
        rows.iter()
            .map(|row| {
                let key = self.column::<Option<Vec<u8>>>(row, 7)?;
                let key = key.and_then(|key| String::from_utf8(key).ok());
                let key = match key {
                    Some(key) => key,
                    None => self.column(row, 6)?,
                };
                let key = Key::new(&key)
                    .map_err(|_| self.damaged("a row's key is not one that can be locked"))?;
                Ok(self.held(Holder::new(key), row)?.holder)
            })
            .collect()
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let make = || query(self.texts.force_release.safe()).bind(lock_key(key));
        let done = self.link.change(Errand::Release, Repeat::Never, make).await?;
        Ok(if done.rows_affected() > 0 { Release::Freed } else { Release::NotHeld })
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let mut findings = super::diagnose::look_around(&self.link).await?;
        findings.push(Finding::note(spring::CLOCKS));
        Ok(findings)
    }

    async fn close(&self) {
        self.link.close().await;
    }
}

/// Finds or creates Spring's table. Returns its quoted name.
async fn find_or_make(
    config: &MySqlConfig,
    table: &SpringTable,
    link: &Link,
) -> Result<String, BackendError> {
    let (database, name) = table.name();
    let database = database.or_else(|| config.server.get_database()).unwrap_or_default().to_owned();
    let lock = format!("{}.{}", quoted(&database), quoted(&name));
    let columns = async || {
        let make = || query(sql::COLUMNS).bind(database.clone()).bind(name.clone());
        let rows = link.rows(Errand::Acquire, make).await?;
        let columns = rows.iter().map(|row| row.try_get::<String, _>(0));
        columns.collect::<Result<Vec<_>, _>>().map_err(|error| link.explain(error))
    };
    let mut found = columns().await?;
    if found.is_empty() {
        if !config.create_schema {
            return Err(unusable(&format!(
                "Spring's table {lock} is missing; have it made by Spring's schema-mysql.sql, or let this program make it"
            )));
        }
        let make = || query(sql::make(&lock, table.generation));
        let made = link.change(Errand::Acquire, Repeat::Harmless, make).await;
        found = columns().await?;
        if found.is_empty() {
            // Only if the table is still missing: another process may have created it.
            made.map_err(BackendError::as_refused)?;
        }
    }
    let tells_end = found.iter().any(|column| column == "EXPIRED_AFTER");
    match (table.generation, tells_end) {
        (Generation::V7, false) => Err(unusable(&spring::is_older(&lock))),
        (Generation::V6 { .. }, true) => Err(unusable(&spring::is_newer(&lock))),
        _ => Ok(lock),
    }
}

impl fmt::Debug for MySqlSpringBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlSpringBackend")
            .field("config", &self.config)
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}
