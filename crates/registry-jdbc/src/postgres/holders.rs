//! Lists and breaks locks. A key may be held by a lease, by a row that a transaction of the store
//! has locked, or by a caller's transaction.

use std::time::Duration;

use registry_core::{BackendError, Holder, Key, Release};
use sqlx::postgres::PgRow;

use super::backend::{PgRows, bytes, column, decode_holder, release_outcome};
use super::error::{self, corrupt};
use super::statement::{BoundStatement, PgParam};
use crate::server::{ConnectionUse, Resend};

impl PgRows {
    /// Returns the holder of `key`. Of a caller's transaction only its existence is known.
    pub(super) async fn find_any_holder(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        // The key may change its holder or become free between the two queries.
        const TRIES_MAX: u32 = 3;
        for _ in 0..TRIES_MAX {
            let statement =
                BoundStatement::new(&self.texts.holder, [bytes(self.row_id(key).bytes())]);
            let rows =
                self.client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await?;
            if let Some(row) = rows.first() {
                return decode_holder(Holder::new(key.clone()), row, 1).map(Some);
            }
            if !self.is_locked_by_transaction(key).await? {
                return Ok(None);
            }
        }
        Ok(Some(Holder::new(key.clone())))
    }

    /// Returns the holders of the namespace. Keys of callers' transactions are not listed: their
    /// rows are not visible to others before these transactions end.
    pub(super) async fn holders(&self) -> Result<Vec<Holder>, BackendError> {
        let namespace = bytes(self.config.namespace.as_bytes());
        let statement = BoundStatement::new(&self.texts.list, [namespace]);
        let rows = self.client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await?;
        rows.iter().map(holder_of).collect()
    }

    /// Frees `key`: ends a lease, or the connection that has the row locked for a claim.
    pub(super) async fn force_release_key(&self, key: &Key) -> Result<Release, BackendError> {
        let id = self.row_id(key);
        let [channel, message, presence_lock] = self.notification_params(id);
        let values = [bytes(id.bytes()), channel.clone(), message.clone()];
        let statement = BoundStatement::new(&self.texts.force_release, values);
        let rows = self.client.rows(ConnectionUse::Release, &statement, Resend::Never).await?;
        if release_outcome(&rows) == Release::Freed {
            return Ok(Release::Freed);
        }
        let timeout_millis = END_WAIT.min(self.config.response_timeout / 2).as_millis();
        let timeout_millis = PgParam::Number(i64::try_from(timeout_millis).unwrap_or(i64::MAX));
        let statement =
            BoundStatement::new(&self.texts.end_row_holder, [bytes(id.bytes()), timeout_millis]);
        let rows = self.client.rows(ConnectionUse::Release, &statement, Resend::Never).await;
        let rows = rows.map_err(error::explain_not_ended)?;
        match rows.first() {
            Some(row) if column(row, 0)? => {
                // The ended transaction was not committed, so it has sent no notification.
                let statement =
                    BoundStatement::new(&self.texts.row_notify, [channel, message, presence_lock]);
                self.client.rows(ConnectionUse::Release, &statement, Resend::Allowed).await?;
                Ok(Release::Freed)
            }
            Some(_) => Err(error::still_connected(error::STORE)),
            None if self.is_locked_by_transaction(key).await? => {
                Err(error::held_by_caller_transaction(error::STORE))
            }
            None => Ok(Release::NotHeld),
        }
    }
}

fn holder_of(row: &PgRow) -> Result<Holder, BackendError> {
    let key = String::from_utf8(column(row, 0)?).ok();
    let key = key.and_then(|key| Key::new(&key).ok());
    let key = key.ok_or_else(|| corrupt("a row's key is invalid"))?;
    decode_holder(Holder::new(key), row, 1)
}

/// The maximum time to wait for the end of a connection that the server was requested to end.
const END_WAIT: Duration = Duration::from_secs(1);
