//! Lists and breaks locks. A key may be held by a lease, by a row that a transaction of the store
//! has locked, or by a caller's transaction.

use std::time::Duration;

use registry_core::{BackendError, Holder, Key, Release};
use sqlx::postgres::PgRow;

use super::backend::{PostgresBackend, bytes, column, freed, told_of};
use super::error::{self, damaged};
use super::link::Repeat;
use super::statement::{Statement, Value};
use crate::server::Errand;

impl PostgresBackend {
    /// Returns the holder of `key`. Of a caller's transaction only its existence is known.
    pub(super) async fn holder(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        // The key may change its holder or become free between the two queries.
        const TRIES_MAX: u32 = 3;
        for _ in 0..TRIES_MAX {
            let statement = Statement::new(&self.texts.holder, [bytes(self.row_id(key).bytes())]);
            let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
            if let Some(row) = rows.first() {
                return told_of(Holder::new(key.clone()), row, 1).map(Some);
            }
            if !self.is_locked_in(key).await? {
                return Ok(None);
            }
        }
        Ok(Some(Holder::new(key.clone())))
    }

    /// Returns the holders of the namespace. Keys of callers' transactions are not listed: their
    /// rows are not visible to others before these transactions end.
    pub(super) async fn holders(&self) -> Result<Vec<Holder>, BackendError> {
        let namespace = bytes(self.namespace().as_bytes());
        let statement = Statement::new(&self.texts.list, [namespace]);
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
        rows.iter().map(holder_of).collect()
    }

    /// Frees `key`: ends a lease, or the connection that has the row locked for a claim.
    pub(super) async fn free_by_force(&self, key: &Key) -> Result<Release, BackendError> {
        let id = self.row_id(key);
        let [channel, message, mark] = self.news(id);
        let values = [bytes(id.bytes()), channel.clone(), message.clone()];
        let statement = Statement::new(&self.texts.force_release, values);
        let rows = self.link.rows(Errand::Release, &statement, Repeat::Never).await?;
        if freed(&rows) == Release::Freed {
            return Ok(Release::Freed);
        }
        let patience = END_WAIT.min(self.config.response_timeout / 2).as_millis();
        let patience = Value::Number(i64::try_from(patience).unwrap_or(i64::MAX));
        let statement = Statement::new(&self.texts.end_row_holder, [bytes(id.bytes()), patience]);
        let rows = self.link.rows(Errand::Release, &statement, Repeat::Never).await;
        let rows = rows.map_err(error::not_ended)?;
        match rows.first() {
            Some(row) if column(row, 0)? => {
                // The ended transaction was not committed, so it has sent no notification.
                let statement = Statement::new(&self.texts.row_tell, [channel, message, mark]);
                self.link.rows(Errand::Release, &statement, Repeat::Harmless).await?;
                Ok(Release::Freed)
            }
            Some(_) => Err(error::still_there()),
            None if self.is_locked_in(key).await? => Err(error::is_a_callers()),
            None => Ok(Release::NotHeld),
        }
    }
}

fn holder_of(row: &PgRow) -> Result<Holder, BackendError> {
    let key = String::from_utf8(column(row, 0)?).ok();
    let key = key.and_then(|key| Key::new(&key).ok());
    let key = key.ok_or_else(|| damaged("a row's key is not one that can be locked"))?;
    told_of(Holder::new(key), row, 1)
}

/// The maximum time to wait for the end of a connection that the server was asked to end.
const END_WAIT: Duration = Duration::from_secs(1);
