//! Binds values to the statements of `sql`.

use std::time::Duration;

use registry_core::{Claim, ClaimId, FencingToken, Key};
use sqlx::mysql::MySqlArguments;
use sqlx::query::Query;
use sqlx::{Encode, MySql, RawSql, Type, query};

use super::inline::{InlineValue, inline};
use super::sql::{self, MySqlStatementText, MySqlStatements};
use crate::server::RowId;

pub(super) type MySqlQuery = Query<'static, MySql, MySqlArguments>;

/// What all statements of one backend have in common.
#[derive(Debug)]
pub(super) struct StatementBinder {
    pub(super) texts: MySqlStatements,
    pub(super) namespace: String,
}

/// Which kinds of holder a query includes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HolderKinds {
    All,
    Lease,
}

impl StatementBinder {
    pub(super) fn row(&self, key: &Key) -> RowId {
        RowId::new(&self.namespace, key)
    }

    pub(super) fn meta(&self) -> MySqlQuery {
        query(self.texts.meta.safe())
    }

    /// Like [`meta`](Self::meta), for a connection of the caller. Reads the latest version instead
    /// of the snapshot.
    pub(super) fn meta_now_inline(&self) -> RawSql {
        inline(&self.texts.meta_now, &[])
    }

    pub(super) fn acquire(&self, claim: &Claim) -> MySqlQuery {
        let id = self.row(claim.key());
        let block = i64::from(claim.token_block());
        let statement = self.granting(&self.texts.acquire, id, claim, block);
        statement.bind(micros(claim.lease())).bind(id_bytes(id))
    }

    /// Like [`acquire`](Self::acquire), for a row that exists.
    pub(super) fn reacquire(&self, claim: &Claim) -> MySqlQuery {
        query(self.texts.reacquire.safe())
            .bind(i64::from(claim.token_block()))
            .bind(claim.label().map(|label| label.as_bytes().to_vec()))
            .bind(claim_bytes(claim))
            .bind(micros(claim.lease()))
            .bind(id_bytes(self.row(claim.key())))
    }

    /// A grant without a lease that reserves `block` tokens. For lease claims the row is free, but
    /// its tokens count.
    pub(super) fn session_write_claim(&self, claim: &Claim, block: i64) -> MySqlQuery {
        let id = self.row(claim.key());
        let statement = self.granting(&self.texts.session_write_claim, id, claim, block);
        statement.bind(id_bytes(id))
    }

    fn granting(
        &self,
        text: &MySqlStatementText,
        id: RowId,
        claim: &Claim,
        block: i64,
    ) -> MySqlQuery {
        query(text.safe())
            .bind(id_bytes(id))
            .bind(self.namespace.clone().into_bytes())
            .bind(claim.key().as_str().as_bytes().to_vec())
            .bind(claim_bytes(claim))
            .bind(block)
            .bind(claim.label().map(|label| label.as_bytes().to_vec()))
    }

    pub(super) fn current_grant(&self, key: &Key) -> MySqlQuery {
        self.of_key(&self.texts.current_grant, key)
    }

    pub(super) fn holder(&self, key: &Key, by: HolderKinds) -> MySqlQuery {
        let text =
            if by == HolderKinds::Lease { &self.texts.holder_by_lease } else { &self.texts.holder };
        self.of_key(text, key)
    }

    pub(super) fn holder_connection(&self, key: &Key) -> MySqlQuery {
        self.of_key(&self.texts.holder_connection, key)
    }

    pub(super) fn list(&self, by: HolderKinds) -> MySqlQuery {
        let text =
            if by == HolderKinds::Lease { &self.texts.list_by_lease } else { &self.texts.list };
        query(text.safe()).bind(self.namespace.clone().into_bytes())
    }

    pub(super) fn release(&self, claim: &Claim) -> MySqlQuery {
        query(self.texts.release.safe())
            .bind(i64::from(claim.token_block()))
            .bind(id_bytes(self.row(claim.key())))
            .bind(claim_bytes(claim))
    }

    pub(super) fn force_release(&self, key: &Key) -> MySqlQuery {
        self.of_key(&self.texts.force_release, key)
    }

    pub(super) fn fence(&self, claim: &Claim, token: FencingToken) -> RawSql {
        self.fence_by(&self.texts.fence, claim, token)
    }

    pub(super) fn fence_held(&self, claim: &Claim, token: FencingToken) -> RawSql {
        self.fence_by(&self.texts.fence_held, claim, token)
    }

    fn fence_by(&self, text: &MySqlStatementText, claim: &Claim, token: FencingToken) -> RawSql {
        let token = i64::from(token);
        let row = self.value(claim.key());
        let claim = InlineValue::Bytes(claim_bytes(claim));
        inline(text, &[row, claim, InlineValue::Number(token), InlineValue::Number(token)])
    }

    pub(super) fn session_ensure_row(&self, claim: &Claim, token: FencingToken) -> MySqlQuery {
        self.of_key(&self.texts.session_ensure_row, claim.key())
            .bind(self.namespace.clone().into_bytes())
            .bind(claim.key().as_str().as_bytes().to_vec())
            .bind(claim_bytes(claim))
            .bind(i64::from(token))
            .bind(i64::from(claim.token_block()))
    }

    /// The named lock's name is the row's id.
    pub(super) fn session_try_lock(
        &self,
        key: &Key,
        row_claim: ClaimId,
        lock_timeout_seconds: i64,
    ) -> MySqlQuery {
        let id = self.row(key);
        let statement = query(self.texts.session_try_lock.safe()).bind(id_bytes(id));
        statement.bind(row_claim.to_bytes().to_vec()).bind(id.hex()).bind(lock_timeout_seconds)
    }

    /// The named lock's name is the row's id.
    pub(super) fn session_is_free(&self, key: &Key) -> MySqlQuery {
        let id = self.row(key);
        query(self.texts.session_is_free.safe()).bind(id.hex()).bind(id_bytes(id))
    }

    pub(super) fn session_update_claim(
        &self,
        claim: &Claim,
        token: FencingToken,
        row_claim: ClaimId,
    ) -> MySqlQuery {
        let token = i64::from(token);
        query(self.texts.session_update_claim.safe())
            .bind(claim_bytes(claim))
            .bind(token)
            .bind(i64::from(claim.token_block()))
            .bind(id_bytes(self.row(claim.key())))
            .bind(row_claim.to_bytes().to_vec())
            .bind(token)
            .bind(token)
    }

    pub(super) fn row_write_claim(&self, claim: &Claim) -> MySqlQuery {
        self.of_key(&self.texts.row_write_claim, claim.key())
            .bind(claim_bytes(claim))
            .bind(i64::from(claim.token_block()))
            .bind(claim.label().map(|label| label.as_bytes().to_vec()))
    }

    pub(super) fn row_lock(&self, claim: &Claim) -> MySqlQuery {
        self.of_key(&self.texts.row_lock, claim.key()).bind(claim_bytes(claim))
    }

    pub(super) fn row_seen(&self, key: &Key) -> MySqlQuery {
        self.of_key(&self.texts.row_seen, key)
    }

    pub(super) fn clear_ended(&self, key: &Key) -> MySqlQuery {
        self.of_key(&self.texts.clear_ended, key)
    }

    pub(super) fn is_free(&self, key: &Key) -> MySqlQuery {
        self.of_key(&self.texts.is_free, key)
    }

    pub(super) fn insert_row(&self, key: &Key) -> MySqlQuery {
        self.of_key(&self.texts.insert_row, key)
            .bind(self.namespace.clone().into_bytes())
            .bind(key.as_str().as_bytes().to_vec())
    }

    pub(super) fn lock_row(&self, key: &Key) -> MySqlQuery {
        self.of_key(&self.texts.lock_row, key)
    }

    pub(super) fn lock_row_inline(&self, key: &Key) -> RawSql {
        inline(&self.texts.lock_row, &[self.value(key)])
    }

    pub(super) fn row_seen_inline(&self, key: &Key, claim: Option<Vec<u8>>, token: i64) -> RawSql {
        let values = [self.value(key), InlineValue::MaybeBytes(claim), InlineValue::Number(token)];
        inline(&self.texts.row_seen_in, &values)
    }

    pub(super) fn raise_token_inline(&self, key: &Key, token: i64) -> RawSql {
        inline(&self.texts.raise_token, &[InlineValue::Number(token), self.value(key)])
    }

    /// All claims must have the same lease.
    pub(super) fn renew(&self, claims: &[&Claim], lease: Duration) -> MySqlQuery {
        let statement = query(MySqlStatements::sized(&self.texts.renew, claims.len()).safe());
        let statement = self.with_rows(statement, claims);
        let statement = bind_padded(statement, claims.iter().map(|claim| claim_bytes(claim)));
        let limit = i64::try_from(claims.len()).unwrap_or(i64::MAX);
        statement.bind(limit).bind(micros(lease))
    }

    pub(super) fn unexpired(&self, claims: &[&Claim]) -> MySqlQuery {
        self.with_rows(
            query(MySqlStatements::sized(&self.texts.unexpired, claims.len()).safe()),
            claims,
        )
    }

    fn with_rows(&self, statement: MySqlQuery, claims: &[&Claim]) -> MySqlQuery {
        bind_padded(statement, claims.iter().map(|claim| id_bytes(self.row(claim.key()))))
    }

    pub(super) fn held(&self, rows: &[RowId]) -> MySqlQuery {
        let statement = query(MySqlStatements::sized(&self.texts.held, rows.len()).safe());
        bind_padded(statement, rows.iter().map(|row| id_bytes(*row)))
    }

    fn value(&self, key: &Key) -> InlineValue {
        InlineValue::Bytes(id_bytes(self.row(key)))
    }

    fn of_key(&self, text: &MySqlStatementText, key: &Key) -> MySqlQuery {
        query(text.safe()).bind(id_bytes(self.row(key)))
    }
}

pub(super) fn purge_candidates(
    texts: &MySqlStatements,
    from: [u8; 32],
    rows_max: usize,
    min_age: Duration,
) -> MySqlQuery {
    query(texts.purge_candidates.safe())
        .bind(from.to_vec())
        .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
        .bind(micros(min_age))
}

pub(super) fn raise_floor(texts: &MySqlStatements, token: i64) -> MySqlQuery {
    query(texts.raise_floor.safe()).bind(token).bind(token)
}

pub(super) fn purge(
    texts: &MySqlStatements,
    ids: &[Vec<u8>],
    min_age: Duration,
    token: i64,
) -> MySqlQuery {
    let statement = query(MySqlStatements::sized(&texts.purge, ids.len()).safe());
    bind_padded(statement, ids.iter().cloned()).bind(micros(min_age)).bind(token)
}

/// Binds the items, and NULLs for the remaining parameters of the text.
pub(super) fn bind_padded<T>(
    statement: MySqlQuery,
    items: impl ExactSizeIterator<Item = T>,
) -> MySqlQuery
where
    T: Encode<'static, MySql> + Type<MySql> + Send + 'static,
    Option<T>: Encode<'static, MySql>,
{
    let nulls = sql::size(items.len()).saturating_sub(items.len());
    let statement = items.fold(statement, MySqlQuery::bind);
    (0..nulls).fold(statement, |statement, _| statement.bind(None::<T>))
}

fn id_bytes(row: RowId) -> Vec<u8> {
    row.bytes().to_vec()
}

fn claim_bytes(claim: &Claim) -> Vec<u8> {
    claim.id().to_bytes().to_vec()
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Converts microseconds of a row to a duration; negative values become zero.
pub(super) fn from_micros(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}
