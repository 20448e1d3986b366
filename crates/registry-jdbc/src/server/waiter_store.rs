//! The table of waiting claims, for listings. No statement that grants a key uses this table.

use std::time::Duration;

use async_trait::async_trait;
use registry_core::{BackendError, Claim, ClaimMode, Key, WaiterStore, WaitingClaim};

use super::backend::{BackendTable, SqlBackend};
use super::dialect::{Dialect, SpringDialect, decode_key};
use super::lease_table::LeaseTable;
use super::statement::{bytes, from_micros, micros, number};
use super::{ConnectionUse, Resend, Statement, StatementText, Value, purge};

/// The statements of waiting claims.
#[derive(Debug, Clone)]
pub(crate) struct WaiterStatements {
    /// Inserts the claim, or extends its registration.
    ///
    /// Parameters: id, namespace, key, claim, mode, label, microseconds waited, lease.
    pub(crate) register: StatementText,
    /// Parameters: id, claim.
    pub(crate) unregister: StatementText,
    /// Returns, for each registered claim of a key: key, mode, label, microseconds waited, and
    /// microseconds until its registration expires. Omits expired registrations.
    ///
    /// Parameter: id.
    pub(crate) of_key: StatementText,
    /// As `of_key`, for all keys of a namespace.
    ///
    /// Parameter: namespace.
    pub(crate) of_namespace: StatementText,
    /// Deletes the expired registrations. Processes that ended during a wait leave such
    /// registrations.
    pub(crate) purge: StatementText,
}

#[async_trait]
impl<D: SpringDialect> WaiterStore for SqlBackend<D> {
    async fn register(&self, claim: &Claim, waited_for: Duration) -> Result<(), BackendError> {
        let registered = match self.table() {
            BackendTable::Native(table) => table.register(claim, waited_for).await,
            BackendTable::Spring(_) => Ok(()),
        };
        registered.map_err(|error| self.with_address(error))
    }

    async fn unregister(&self, claim: &Claim) -> Result<(), BackendError> {
        let unregistered = match self.table() {
            BackendTable::Native(table) => table.unregister(claim).await,
            BackendTable::Spring(_) => Ok(()),
        };
        unregistered.map_err(|error| self.with_address(error))
    }

    async fn waiting(&self, key: Option<&Key>) -> Result<Vec<WaitingClaim>, BackendError> {
        let waiting = match self.table() {
            BackendTable::Native(table) => table.waiting(key).await,
            BackendTable::Spring(_) => Ok(Vec::new()),
        };
        waiting.map_err(|error| self.with_address(error))
    }
}

impl<D: Dialect> LeaseTable<D> {
    async fn register(&self, claim: &Claim, waited_for: Duration) -> Result<(), BackendError> {
        let values = [
            self.id_value(claim.key()),
            self.namespace_value(),
            Value::key(claim.key()),
            Value::claim(claim),
            Value::bytes(claim.mode().to_string().as_bytes()),
            Value::label(claim),
            Value::Number(micros(waited_for)),
            Value::lease(claim),
        ];
        self.send(&self.statements().waiters.register, values.to_vec()).await
    }

    async fn unregister(&self, claim: &Claim) -> Result<(), BackendError> {
        let statements = &self.statements().waiters;
        let values = vec![self.id_value(claim.key()), Value::claim(claim)];
        self.send(&statements.unregister, values).await?;
        purge::maybe_purge(claim.id(), |_| self.send(&statements.purge, Vec::new())).await;
        Ok(())
    }

    async fn send(&self, text: &StatementText, values: Vec<Value>) -> Result<(), BackendError> {
        let statement = Statement::new(text, values);
        let client = &self.store.client;
        client.send(ConnectionUse::Acquire, Resend::Allowed, &statement).await.map(drop)
    }

    async fn waiting(&self, key: Option<&Key>) -> Result<Vec<WaitingClaim>, BackendError> {
        let statements = &self.statements().waiters;
        let rows = match key {
            Some(key) => self.store.query(&statements.of_key, [self.id_value(key)]).await?,
            None => self.store.query(&statements.of_namespace, [self.namespace_value()]).await?,
        };
        rows.iter().map(decode_waiting::<D>).collect()
    }
}

fn decode_waiting<D: Dialect>(row: &D::Row) -> Result<WaitingClaim, BackendError> {
    let text = |index| {
        let text = bytes::<D>(row, index)?;
        Ok::<_, BackendError>(text.and_then(|text| String::from_utf8(text).ok()))
    };
    let mode = text(1)?.and_then(|mode| mode.parse().ok()).unwrap_or(ClaimMode::Exclusive);
    let (waited_for, left) = (number::<D>(row, 3)?, number::<D>(row, 4)?);
    Ok(WaitingClaim::new(decode_key::<D>(text(0)?.as_deref())?)
        .with_mode(mode)
        .with_label(text(2)?)
        .with_times(Some(from_micros(waited_for)), Some(from_micros(left))))
}
