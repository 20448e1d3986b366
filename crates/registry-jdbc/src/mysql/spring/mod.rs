//! Locks in the table of a Spring Integration `JdbcLockRegistry`. What differs from the native layout, and no more: see `backend` beside for the
//! rest of the store, and `server::spring` for what a lock is called.

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

/// Locks in the table of a Spring Integration `JdbcLockRegistry` in a MariaDB or MySQL database: this program and those in Java exclude each
/// other.
///
/// For what both sides must know, see [`SpringTable`]; here the table's name has the letters that it is given, big and small. Everything else is as with
/// [`MySqlBackend`](crate::MySqlBackend): the server's clock ends grants, tokens only grow, a claim is its own owner, and a
/// [`Fence`](crate::Fence) works. Nobody is told of releases: they are found by the
/// registry's [poll](registry_core::RegistryBuilder::poll).
pub struct MySqlSpringBackend {
    config: MySqlConfig,
    table: SpringTable,
    store: Vec<u8>,
    native: NativeTexts,
    texts: Texts,
    link: Link,
    /// Tells the rows beside those of this table and region from all others, and from those of native namespaces.
    part: String,
}

impl MySqlSpringBackend {
    /// Refuses what cannot work, without I/O. Opening the store asks this first.
    ///
    /// # Errors
    /// [`BackendError`], `Misconfigured`, for the first thing that is wrong.
    pub fn check(config: &MySqlConfig, table: &SpringTable) -> Result<(), BackendError> {
        table.check().map_err(|says| unusable(&says))?;
        config.check()
    }

    /// Connects to the server, and makes Spring's table and those of this program if they are absent and this is not
    /// [turned off](MySqlConfig::with_create_schema). The namespace is of no use here: Spring has regions.
    ///
    /// # Errors
    /// As of [`MySqlBackend::open`](crate::MySqlBackend::open); `Misconfigured` also for a table of another generation of Spring.
    ///
    /// # Cancel safety
    /// Dropping the future may leave some of the tables behind; the next one who opens the store makes the others.
    pub async fn open(config: MySqlConfig, table: SpringTable) -> Result<Self, BackendError> {
        Self::check(&config, &table)?;
        let link = Link::new(&config);
        let Opened { texts: native, store } = open::open(&config, &link).await?;
        let lock = find_or_make(&config, &table, &link).await?;
        let database = config.server.get_database().unwrap_or_default();
        let texts =
            Texts::new(database, &config.table_prefix, &lock, table.region(), table.generation);
        // Most collations take regions for the same that differ in case alone.
        let part = format!("{lock} {}", table.region().to_ascii_lowercase());
        Ok(Self { config, table, store, native, texts, link, part })
    }

    /// The row of tokens.
    fn row_id(&self, lock_key: &str) -> Vec<u8> {
        RowId::beside(&self.part, lock_key).bytes().to_vec()
    }

    /// What native namespaces, which are UTF-8, are not. A table's name may be longer than there is room for.
    fn namespace(&self) -> Vec<u8> {
        let part = RowId::beside(&self.part, "");
        [b"\xffspring ", part.bytes()].concat()
    }

    /// What a fence asks.
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

    /// As in the native layout.
    async fn wait_for_fence(&self, claim: &Claim) -> Result<(), BackendError> {
        for pause in UNLOCK_PAUSES.into_iter().map(Some).chain([None]) {
            // Nothing was released if this fails.
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
        // A fence locks both rows; the one beside is there as long as the claim is.
        let id = self.row_id(&lock_key(claim.key()));
        let look = || query(self.native.lock_row.safe()).bind(id.clone());
        if !self.link.rows(Errand::Release, look).await?.is_empty() {
            return Ok(false);
        }
        let held = self.look(claim.key(), Errand::Release).await?;
        Ok(held.is_some_and(|held| held.client == Some(client_id(claim.id()))))
    }

    /// Who has the key.
    async fn look(&self, key: &Key, errand: Errand) -> Result<Option<Held>, BackendError> {
        let lock_key = lock_key(key);
        let make =
            || query(self.texts.look.safe()).bind(self.row_id(&lock_key)).bind(lock_key.clone());
        let rows = self.link.rows(errand, make).await?;
        rows.first().map(|row| self.held(Holder::new(key.clone()), row)).transpose()
    }

    /// Takes the key if it is free, and tells who has it then.
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

    /// What is beside belongs to the holder if its claim does.
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

    /// Claims of one lease.
    async fn renew_chunk(
        &self,
        claims: &[&Claim],
        lease: Duration,
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let asked_at = Instant::now();
        let keys: Vec<String> = claims.iter().map(|claim| lock_key(claim.key())).collect();
        let clients: Vec<String> = claims.iter().map(|claim| client_id(claim.id())).collect();
        let limit = i64::try_from(claims.len()).unwrap_or(i64::MAX);
        // Two renewals do what one does.
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
        // The grants are renewed; what this is for comes an hour later.
        let _ = self.link.change(Errand::Renew(lease), Repeat::Harmless, make).await;
        let wanted: HashSet<_> = claims.iter().map(|claim| claim.id()).collect();
        if usize::try_from(done.rows_affected()) == Ok(wanted.len()) {
            return Ok(claims.iter().map(|_| Ok(Renewal::Renewed(lease))).collect());
        }
        // Some are gone, or kept by a fence. The rows tell which.
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
            // As in the native layout.
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

    /// Reads the row of all, when nothing was granted although nobody has the key: without that row nothing has a token, nor at a replica.
    async fn check_meta(&self) -> Result<(), BackendError> {
        let rows = self.link.rows(Errand::Acquire, || query(self.native.meta.safe())).await?;
        let row = rows.first();
        let row =
            row.ok_or_else(|| self.damaged("the meta table has lost its row").as_refused())?;
        if self.column::<i64>(row, 2)? == 0 {
            // Connections that are made anew may lead to its successor.
            self.link.forget();
            return Err(error::read_only(self.link.place()));
        }
        Ok(())
    }

    fn key_and_client(text: &super::sql::Text, claim: &Claim) -> Statement {
        query(text.safe()).bind(lock_key(claim.key())).bind(client_id(claim.id()))
    }
}

/// A grant as the tables tell it.
#[derive(Debug)]
struct Held {
    client: Option<String>,
    lease_left: Duration,
    holder: Holder,
}

#[async_trait]
impl LockBackend for MySqlSpringBackend {
    /// Class C, for the peers' sake: whether a lock is over they decide by their own hosts' clocks.
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("mysql", GuaranteeClass::C, Reach::Network)
            .with_fencing()
            .with_peer_poll(PEER_POLL)
            .with_labels()
            .with_inspect()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        // Between an attempt and the look at who is there the key may come free, and again. Whoever is that unlucky is told "busy" without
        // a name and comes back at once.
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
                // Whatever keeps one statement from being answered would make every other wait as long.
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
        // Asked twice, it would say that the claim held nothing. Who repeats it must know that.
        let make = || Self::key_and_client(&self.texts.release, claim);
        let done = self.link.change(Errand::Release, Repeat::Never, make).await?;
        let freed = done.rows_affected() > 0;
        if !freed {
            // It is free already; nobody else is to find it.
            let make = || Self::key_and_client(&self.texts.clear, claim);
            self.link.change(Errand::Release, Repeat::Harmless, make).await?;
        }
        purge::by_chance(claim, &self.link, &self.native, self.config.purge_after).await;
        Ok(if freed { Release::Freed } else { Release::NotHeld })
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        Ok(self.look(key, Errand::Acquire).await?.map(|held| held.holder))
    }

    /// What this program holds is told by its key; what others hold by its UUID, which is a key of the same lock.
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

/// Finds Spring's table, or makes it. Answers with its name, quoted.
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
            // Unless somebody else was faster, the error says why.
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
