//! Binds parameters to the statements of `sql`. Each function that binds a time reads the clock.
//! Exceptions: the module `records` sets the times of
//! [`write_row`](SqliteStatementBinder::write_row), and the caller of a purge sets `free_since`.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{Claim, FencingToken, Key, LockRecord};
use sqlx::query::Query;
use sqlx::sqlite::SqliteArguments;
use sqlx::{Sqlite, query};

use super::clock::{StoreClock, to_micros};
use super::records::{RECORD_MARKER, SqliteRowColumns};
use super::sql::{self, BatchStatement};

pub(crate) type SqliteQuery = Query<'static, Sqlite, SqliteArguments>;

/// Binds the parameters of statements. The fields are the clock, and the two parameters that most
/// statements need.
#[derive(Debug)]
pub(super) struct SqliteStatementBinder {
    pub(super) clock: Arc<dyn StoreClock>,
    pub(super) namespace: Arc<str>,
    pub(super) boot: Arc<Vec<u8>>,
}

/// The primary key of a row: namespace and key.
pub(super) type RowKey = (String, Vec<u8>);

impl SqliteStatementBinder {
    pub(super) fn new(clock: Arc<dyn StoreClock>, namespace: &str) -> Self {
        let boot = Arc::new(clock.boot().bytes().to_vec());
        Self { clock, namespace: namespace.into(), boot }
    }

    /// Binds [`sql::ACQUIRE_AT`] or [`sql::ACQUIRE_ABOVE`].
    pub(super) fn acquire(&self, sql: &'static str, claim: &Claim, token: i64) -> SqliteQuery {
        let (now, label) = (self.clock.now(), claim.label().map(str::to_owned));
        self.grant(sql, claim, claim_bytes(claim), token, label, now)
    }

    /// Binds [`sql::ACQUIRE_AT`] for a claim that becomes the only entry of the key's record.
    pub(super) fn acquire_single_entry(&self, claim: &Claim, token: FencingToken) -> SqliteQuery {
        let now = self.clock.now();
        let until = now.saturating_add(to_micros(claim.lease()));
        let (since, until) = (now.cast_unsigned(), until.cast_unsigned());
        let mut record = LockRecord::new();
        record.insert(LockRecord::granted_entry(claim, token, since, until));
        let record_text = Some(record.to_text());
        self.grant(
            sql::ACQUIRE_AT,
            claim,
            RECORD_MARKER.to_vec(),
            token.get().cast_signed(),
            record_text,
            now,
        )
    }

    /// Binds the parameters that [`sql::ACQUIRE_AT`] and [`sql::ACQUIRE_ABOVE`] share. With
    /// [`RECORD_MARKER`] in the column `claim`, the column `label` contains the record.
    fn grant(
        &self,
        sql: &'static str,
        claim: &Claim,
        claim_column: Vec<u8>,
        token: i64,
        label_column: Option<String>,
        now: i64,
    ) -> SqliteQuery {
        query(sql)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(claim.key()))
            .bind(claim_column)
            .bind(token)
            .bind(i64::from(claim.token_block()))
            .bind(label_column)
            .bind(now)
            .bind(now.saturating_add(to_micros(claim.lease())))
            .bind(Arc::clone(&self.boot))
    }

    pub(super) fn current_grant(&self, key: &Key) -> SqliteQuery {
        query(sql::CURRENT_GRANT).bind(Arc::clone(&self.namespace)).bind(key_bytes(key))
    }

    pub(super) fn list(&self) -> SqliteQuery {
        query(sql::LIST_GRANTS)
            .bind(Arc::clone(&self.namespace))
            .bind(self.clock.now())
            .bind(Arc::clone(&self.boot))
    }

    pub(super) fn release(&self, claim: &Claim) -> SqliteQuery {
        query(sql::RELEASE)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(claim.key()))
            .bind(claim_bytes(claim))
            .bind(self.clock.now())
            .bind(Arc::clone(&self.boot))
            .bind(i64::from(claim.token_block()))
    }

    pub(super) fn release_single_entry(&self, claim: &Claim) -> SqliteQuery {
        query(sql::RELEASE_SINGLE_ENTRY)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(claim.key()))
            .bind(LockRecord::entry_prefix(claim))
            .bind(self.clock.now())
            .bind(Arc::clone(&self.boot))
            .bind(i64::from(claim.token_block()))
    }

    pub(super) fn force_release(&self, key: &Key) -> SqliteQuery {
        query(sql::FORCE_RELEASE)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(key))
            .bind(self.clock.now())
            .bind(Arc::clone(&self.boot))
    }

    pub(super) fn fence(&self, claim: &Claim, token: FencingToken) -> SqliteQuery {
        self.with_grant(sql::FENCE, claim, token)
    }

    /// Binds a statement that finds the row with this grant.
    fn with_grant(&self, sql: &'static str, claim: &Claim, token: FencingToken) -> SqliteQuery {
        query(sql)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(claim.key()))
            .bind(claim_bytes(claim))
            .bind(i64::from(token))
            .bind(self.clock.now())
            .bind(Arc::clone(&self.boot))
            .bind(claim.id().to_string())
    }

    /// Binds [`sql::WRITE_VALUE`].
    pub(super) fn write_value(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: Vec<u8>,
    ) -> SqliteQuery {
        self.with_grant(sql::WRITE_VALUE, claim, token).bind(value)
    }

    pub(super) fn read_value(&self, key: &Key) -> SqliteQuery {
        query(sql::READ_VALUE).bind(Arc::clone(&self.namespace)).bind(key_bytes(key))
    }

    pub(super) fn register_waiter(&self, claim: &Claim, waited_for: Duration) -> SqliteQuery {
        let now = self.clock.now();
        query(sql::REGISTER_WAITER)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(claim.key()))
            .bind(claim_bytes(claim))
            .bind(claim.mode().to_string())
            .bind(claim.label().map(str::to_owned))
            .bind(now.saturating_sub(to_micros(waited_for)))
            .bind(now.saturating_add(to_micros(claim.lease())))
            .bind(Arc::clone(&self.boot))
    }

    pub(super) fn unregister_waiter(&self, claim: &Claim) -> SqliteQuery {
        query(sql::UNREGISTER_WAITER)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(claim.key()))
            .bind(claim_bytes(claim))
    }

    /// Binds [`sql::WAITERS`].
    pub(super) fn waiters(&self, key: Option<&Key>) -> SqliteQuery {
        query(sql::WAITERS)
            .bind(Arc::clone(&self.namespace))
            .bind(self.clock.now())
            .bind(Arc::clone(&self.boot))
            .bind(key.map(key_bytes))
    }

    pub(super) fn purge_waiters(&self) -> SqliteQuery {
        query(sql::PURGE_WAITERS).bind(self.clock.now()).bind(Arc::clone(&self.boot))
    }

    pub(super) fn read_row(&self, key: &Key) -> SqliteQuery {
        query(sql::READ_ROW)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(key))
            .bind(Arc::clone(&self.boot))
    }

    /// Binds [`sql::WRITE_ROW`]: `new` replaces `old`.
    pub(super) fn write_row(
        &self,
        key: &Key,
        old: &SqliteRowColumns,
        new: &SqliteRowColumns,
    ) -> SqliteQuery {
        query(sql::WRITE_ROW)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(key))
            .bind(new.claim.clone())
            .bind(new.token)
            .bind(new.block)
            .bind(new.label.clone())
            .bind(new.since)
            .bind(new.until)
            .bind(Arc::clone(&self.boot))
            .bind(old.claim.clone())
            .bind(old.token)
            .bind(old.label.clone())
            .bind(old.until)
    }

    /// Binds [`sql::ACQUIRE_ALL`].
    pub(super) fn acquire_all(
        &self,
        batch: &'static BatchStatement,
        claims: &[Claim],
        token: i64,
    ) -> SqliteQuery {
        let now = self.clock.now();
        let first = claims.first();
        let lease = first.map_or(0, |claim| to_micros(claim.lease()));
        let mut statement = self
            .batch_query(batch, now)
            .bind(token)
            .bind(first.map(|claim| i64::from(claim.token_block())))
            .bind(first.and_then(Claim::label).map(str::to_owned))
            .bind(now.saturating_add(lease))
            .bind(i64::try_from(claims.len()).unwrap_or(i64::MAX));
        for claim in claims {
            statement = statement.bind(key_bytes(claim.key())).bind(claim_bytes(claim));
        }
        for _ in claims.len()..batch.items_max {
            statement = statement.bind(None::<Vec<u8>>).bind(None::<Vec<u8>>);
        }
        statement
    }

    /// Binds [`sql::RELEASE_ALL`].
    pub(super) fn release_all(
        &self,
        batch: &'static BatchStatement,
        claims: &[Claim],
    ) -> SqliteQuery {
        // At a release, the claim's token block is the number of tokens that may have been used.
        let used_tokens = |claim: &Claim, _| i64::from(claim.token_block());
        self.claims_query(batch, claims, used_tokens)
    }

    /// Binds [`sql::RENEW`] or [`sql::RENEW_RETURNING`].
    ///
    /// This function reads the clock before the statement runs. After a pause in between, the
    /// statement may renew an expired grant. This is safe: the row must still contain this claim,
    /// so no other claim was granted the key.
    pub(super) fn renew(&self, batch: &'static BatchStatement, claims: &[Claim]) -> SqliteQuery {
        let until = |claim: &Claim, now: i64| now.saturating_add(to_micros(claim.lease()));
        self.claims_query(batch, claims, until)
    }

    /// Binds three parameters for each claim: key, claim and the result of `third_parameter`, which
    /// also receives the current time.
    fn claims_query(
        &self,
        batch: &'static BatchStatement,
        claims: &[Claim],
        third_parameter: impl Fn(&Claim, i64) -> i64,
    ) -> SqliteQuery {
        let now = self.clock.now();
        let mut statement = self.batch_query(batch, now);
        for claim in claims {
            statement = statement
                .bind(key_bytes(claim.key()))
                .bind(claim_bytes(claim))
                .bind(third_parameter(claim, now));
        }
        for _ in claims.len()..batch.items_max {
            statement = statement.bind(None::<Vec<u8>>).bind(None::<Vec<u8>>).bind(None::<i64>);
        }
        statement
    }

    /// Binds [`sql::HELD_VERSIONS`], which returns those of `keys` that are held, each with the
    /// version of its row.
    pub(super) fn held_versions(
        &self,
        batch: &'static BatchStatement,
        keys: &[Key],
    ) -> SqliteQuery {
        let mut statement = self.batch_query(batch, self.clock.now());
        for key in keys {
            statement = statement.bind(key_bytes(key));
        }
        for _ in keys.len()..batch.items_max {
            statement = statement.bind(None::<Vec<u8>>);
        }
        statement
    }

    fn batch_query(&self, batch: &'static BatchStatement, now: i64) -> SqliteQuery {
        query(batch.text.as_str())
            .bind(now)
            .bind(Arc::clone(&self.boot))
            .bind(Arc::clone(&self.namespace))
    }

    pub(super) fn purge_candidates(&self, after: &RowKey, free_since: i64) -> SqliteQuery {
        self.purge_query(sql::PURGE_CANDIDATES, after, free_since)
    }

    pub(super) fn purge(&self, after: &RowKey, to: &RowKey, free_since: i64) -> SqliteQuery {
        self.purge_query(sql::PURGE, after, free_since).bind(to.0.clone()).bind(to.1.clone())
    }

    fn purge_query(&self, sql: &'static str, after: &RowKey, free_since: i64) -> SqliteQuery {
        query(sql)
            .bind(after.0.clone())
            .bind(after.1.clone())
            .bind(free_since)
            .bind(Arc::clone(&self.boot))
    }

    pub(super) fn save_purge_position(position: &RowKey) -> SqliteQuery {
        query(sql::SAVE_PURGE_POSITION).bind(position.0.clone()).bind(position.1.clone())
    }
}

/// Returns the key as a BLOB, because SQLite compares a BLOB only by its bytes.
fn key_bytes(key: &Key) -> Vec<u8> {
    key.as_str().as_bytes().to_vec()
}

fn claim_bytes(claim: &Claim) -> Vec<u8> {
    claim.id().to_bytes().to_vec()
}
