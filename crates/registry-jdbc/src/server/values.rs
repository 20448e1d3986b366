//! Value blocks, which have a separate table next to the native lock table. A write is one
//! statement, which also finds and locks the row of the claim, as a fence does.

use std::time::SystemTime;

use async_trait::async_trait;
use registry_core::{
    BackendError, Claim, ClaimMode, FencingToken, Key, LockValue, Renewal, ValueRead, ValueStore,
    ValueWrite,
};

use super::backend::{BackendTable, ModeState, SqlBackend};
use super::dialect::{Dialect, SpringDialect};
use super::lease_table::LeaseTable;
use super::statement::{bytes, fencing_token, from_micros, maybe_number, number, one_row};
use super::{ConnectionUse, Resend, Statement, StatementText, Value};

/// The statements of value blocks.
#[derive(Debug, Clone)]
pub(crate) struct ValueStatements {
    /// Returns token, value and the server's time.
    ///
    /// Parameter: id.
    pub(crate) read: StatementText,
    /// Writes a value if the row of the lock has this claim and token, and the stored value has no
    /// larger token.
    ///
    /// Parameters: id, claim, token, first 33 bytes of the entry, namespace, key, value.
    pub(crate) write: StatementText,
    /// As `write`, for a lock that ends with a connection.
    pub(crate) write_in_session: StatementText,
}

#[async_trait]
impl<D: SpringDialect> ValueStore for SqlBackend<D> {
    async fn value(&self, key: &Key) -> Result<ValueRead, BackendError> {
        match self.table() {
            BackendTable::Native(table) => table.read_value(key).await,
            BackendTable::Spring(_) => Err(values_in_foreign_table::<D>()),
        }
        .map_err(|error| self.with_address(error))
    }

    async fn set_value(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Result<ValueWrite, BackendError> {
        if claim.mode() != ClaimMode::Exclusive {
            return Ok(ValueWrite::NotHeld);
        }
        let written = match &self.mode_state {
            ModeState::Lease(table) => {
                let text = &table.statements().values.write;
                table.write_value(text, claim, token, value).await
            }
            ModeState::Session { table, session } => match session.ensure_row(claim).await {
                Ok(true) => {
                    let text = &table.statements().values.write_in_session;
                    table.write_value(text, claim, token, value).await
                }
                Ok(false) => Ok(ValueWrite::NotHeld),
                Err(error) => Err(error),
            },
            // The row keeps its claim after the end of the grant. So a renewal first checks the
            // connection. If another claim is then granted the key before the write, its grant has
            // replaced the row's claim, and the write finds no row.
            ModeState::Row { table, sessions } => {
                match sessions.renew(std::slice::from_ref(claim)).await.pop() {
                    Some(Ok(Renewal::Renewed(_))) => {
                        let text = &table.statements().values.write_in_session;
                        table.write_value(text, claim, token, value).await
                    }
                    Some(Err(error)) => Err(error),
                    Some(Ok(Renewal::Gone)) | None => Ok(ValueWrite::NotHeld),
                }
            }
            ModeState::Spring(_) => Err(values_in_foreign_table::<D>()),
        };
        written.map_err(|error| self.with_address(error))
    }
}

impl<D: Dialect> LeaseTable<D> {
    async fn read_value(&self, key: &Key) -> Result<ValueRead, BackendError> {
        let statement = self.read_value_statement(key);
        let rows = self.store.client.query(ConnectionUse::Acquire, &statement).await?;
        let row = one_row::<D>(&rows)?;
        let token = maybe_number::<D>(row, 0)?.map(fencing_token::<D>).transpose()?;
        let value = token.zip(bytes::<D>(row, 1)?);
        let value = value.map(|(token, bytes)| LockValue::new(bytes, token));
        let now = from_micros(number::<D>(row, 2)?);
        Ok(ValueRead::new(value).with_now(SystemTime::UNIX_EPOCH + now))
    }

    pub(super) fn value_statements(&self) -> &ValueStatements {
        &self.statements().values
    }

    pub(super) fn read_value_statement(&self, key: &Key) -> Statement<'_> {
        Statement::new(&self.statements().values.read, [self.id_value(key)])
    }

    pub(super) fn write_value_statement<'a>(
        &self,
        text: &'a StatementText,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Statement<'a> {
        let values = [
            self.id_value(claim.key()),
            Value::claim(claim),
            Value::token(token),
            Value::entry_prefix(claim),
            self.namespace_value(),
            Value::key(claim.key()),
            Value::bytes(value),
        ];
        Statement::new(text, values)
    }

    async fn write_value(
        &self,
        text: &StatementText,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Result<ValueWrite, BackendError> {
        let statement =
            self.write_value_statement(text, claim, token, value).with_at_most_one_row();
        // Only the caller may repeat the write. It then knows that the server may still execute the
        // first request, after a later write under the same token.
        let answer =
            self.store.client.send(ConnectionUse::Acquire, Resend::Never, &statement).await?;
        Ok(if answer.changed_a_row() { ValueWrite::Written } else { ValueWrite::NotHeld })
    }
}

fn values_in_foreign_table<D: Dialect>() -> BackendError {
    D::misconfigured("Spring's table has no value blocks; use the native tables")
}
