//! Binds values to the statements of `sql`. Each new statement reads the clock; no other code sets
//! the times of a row.

use std::sync::Arc;

use registry_core::{Claim, FencingToken, Key};
use sqlx::query::Query;
use sqlx::sqlite::SqliteArguments;
use sqlx::{Sqlite, query};

use super::clock::{Clock, micros};
use super::sql::{self, Sized};

pub(crate) type Statement = Query<'static, Sqlite, SqliteArguments>;

/// What all statements of one backend have in common, in types that are bound without a deep copy.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) clock: Arc<dyn Clock>,
    pub(super) namespace: Arc<str>,
    pub(super) boot: Arc<Vec<u8>>,
}

/// A position between the rows of all namespaces.
pub(super) type RowKey = (String, Vec<u8>);

impl Statements {
    pub(super) fn new(clock: Arc<dyn Clock>, namespace: &str) -> Self {
        let boot = Arc::new(clock.boot().bytes().to_vec());
        Self { clock, namespace: namespace.into(), boot }
    }

    /// Binds [`sql::ACQUIRE_AT`] or [`sql::ACQUIRE_ABOVE`].
    pub(super) fn acquire(&self, sql: &'static str, claim: &Claim, token: i64) -> Statement {
        let now = self.clock.now();
        query(sql)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(claim.key()))
            .bind(claim_bytes(claim))
            .bind(token)
            .bind(i64::from(claim.token_block()))
            .bind(claim.label())
            .bind(now)
            .bind(now.saturating_add(micros(claim.lease())))
            .bind(Arc::clone(&self.boot))
    }

    pub(super) fn look(&self, key: &Key) -> Statement {
        query(sql::LOOK).bind(Arc::clone(&self.namespace)).bind(key_bytes(key))
    }

    pub(super) fn list(&self) -> Statement {
        query(sql::LIST)
            .bind(Arc::clone(&self.namespace))
            .bind(self.clock.now())
            .bind(Arc::clone(&self.boot))
    }

    pub(super) fn release(&self, claim: &Claim) -> Statement {
        query(sql::RELEASE)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(claim.key()))
            .bind(claim_bytes(claim))
            .bind(self.clock.now())
            .bind(Arc::clone(&self.boot))
            .bind(i64::from(claim.token_block()))
    }

    pub(super) fn force_release(&self, key: &Key) -> Statement {
        query(sql::FORCE_RELEASE)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(key))
            .bind(self.clock.now())
            .bind(Arc::clone(&self.boot))
    }

    pub(super) fn fence(&self, claim: &Claim, token: FencingToken) -> Statement {
        query(sql::FENCE)
            .bind(Arc::clone(&self.namespace))
            .bind(key_bytes(claim.key()))
            .bind(claim_bytes(claim))
            .bind(i64::from(token))
            .bind(self.clock.now())
            .bind(Arc::clone(&self.boot))
    }

    /// Binds [`sql::RENEW`] or [`sql::RENEW_TELLING`].
    ///
    /// A process may be paused after it read the clock, and resume after a lease has expired. The
    /// statement then prolongs that lease if the key was not granted meanwhile. This is safe: no
    /// other claim was granted the key, and from then on none is.
    pub(super) fn renew(&self, size: &'static Sized, claims: &[Claim]) -> Statement {
        let now = self.clock.now();
        let mut statement = self.of_many(size, now);
        for claim in claims {
            statement = statement
                .bind(key_bytes(claim.key()))
                .bind(claim_bytes(claim))
                .bind(now.saturating_add(micros(claim.lease())));
        }
        for _ in claims.len()..size.items_max {
            statement = statement.bind(None::<Vec<u8>>).bind(None::<Vec<u8>>).bind(None::<i64>);
        }
        statement
    }

    /// Binds [`sql::HELD`].
    pub(super) fn held(&self, size: &'static Sized, keys: &[Key]) -> Statement {
        let mut statement = self.of_many(size, self.clock.now());
        for key in keys {
            statement = statement.bind(key_bytes(key));
        }
        for _ in keys.len()..size.items_max {
            statement = statement.bind(None::<Vec<u8>>);
        }
        statement
    }

    fn of_many(&self, size: &'static Sized, now: i64) -> Statement {
        query(size.text.as_str())
            .bind(now)
            .bind(Arc::clone(&self.boot))
            .bind(Arc::clone(&self.namespace))
    }

    pub(super) fn survey(&self, from: &RowKey, dead_since: i64) -> Statement {
        self.of_dead(sql::SURVEY, from, dead_since)
    }

    pub(super) fn purge(&self, from: &RowKey, to: &RowKey, dead_since: i64) -> Statement {
        self.of_dead(sql::PURGE, from, dead_since).bind(to.0.clone()).bind(to.1.clone())
    }

    fn of_dead(&self, sql: &'static str, from: &RowKey, dead_since: i64) -> Statement {
        query(sql)
            .bind(from.0.clone())
            .bind(from.1.clone())
            .bind(dead_since)
            .bind(Arc::clone(&self.boot))
    }

    pub(super) fn swept(next: &RowKey) -> Statement {
        query(sql::SWEPT).bind(next.0.clone()).bind(next.1.clone())
    }
}

/// A BLOB is compared only by its bytes.
fn key_bytes(key: &Key) -> Vec<u8> {
    key.as_str().as_bytes().to_vec()
}

fn claim_bytes(claim: &Claim) -> Vec<u8> {
    claim.id().to_bytes().to_vec()
}
