//! Value blocks in a table of their own. A write is one statement, which also finds the row of the
//! claim, as a fence does.

use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use registry_core::{
    BackendError, Claim, ClaimMode, FencingToken, Key, LockValue, ValueRead, ValueStore, ValueWrite,
};

use super::backend::SqliteBackend;

#[async_trait]
impl ValueStore for SqliteBackend {
    /// The returned time is this host's wall clock, because all clients run on this host.
    async fn value(&self, key: &Key) -> Result<ValueRead, BackendError> {
        let (statements, key) = (Arc::clone(&self.statements), key.clone());
        let rows = self.reader.fetch_all(move || statements.read_value(&key)).await?;
        let value = match rows.first() {
            Some(row) => {
                let token = self.fencing_token(self.column(row, 0)?)?;
                Some(LockValue::new(self.column(row, 1)?, token))
            }
            None => None,
        };
        Ok(ValueRead::new(value).with_now(SystemTime::now()))
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
        let (statements, claim) = (Arc::clone(&self.statements), claim.clone());
        let value = value.to_vec();
        let write = move || statements.write_value(&claim, token, value.clone());
        let changes = self.writer.execute_synced(write).await?;
        Ok(if changes > 0 { ValueWrite::Written } else { ValueWrite::NotHeld })
    }
}
