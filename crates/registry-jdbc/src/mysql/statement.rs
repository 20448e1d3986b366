//! Binds values to the statements of `sql`.

use std::time::Duration;

use registry_core::{Claim, ClaimId, FencingToken, Key};
use sqlx::mysql::MySqlArguments;
use sqlx::query::Query;
use sqlx::{Encode, MySql, RawSql, Type, query};

use super::plain::{Value, plain};
use super::sql::{self, Text, Texts};
use crate::server::RowId;

pub(super) type Statement = Query<'static, MySql, MySqlArguments>;

/// What all statements of one backend have in common.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) texts: Texts,
    pub(super) namespace: String,
}

/// Which kinds of holder a query includes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    Whatever,
    Lease,
}

impl Statements {
    pub(super) fn row(&self, key: &Key) -> RowId {
        RowId::of(&self.namespace, key)
    }

    pub(super) fn meta(&self) -> Statement {
        query(self.texts.meta.safe())
    }

    /// Like [`meta`](Self::meta), for a connection of the caller.
    pub(super) fn meta_there(&self) -> RawSql {
        plain(&self.texts.meta, &[])
    }

    /// Like [`meta_there`](Self::meta_there), but reads the latest version instead of the snapshot.
    pub(super) fn meta_now_there(&self) -> RawSql {
        plain(&self.texts.meta_now, &[])
    }

    pub(super) fn acquire(&self, claim: &Claim) -> Statement {
        let id = self.row(claim.key());
        let block = i64::from(claim.token_block());
        let statement = self.granting(&self.texts.acquire, id, claim, block);
        statement.bind(micros(claim.lease())).bind(id_bytes(id))
    }

    /// Like [`acquire`](Self::acquire), for a row that exists.
    pub(super) fn take_again(&self, claim: &Claim) -> Statement {
        query(self.texts.take_again.safe())
            .bind(i64::from(claim.token_block()))
            .bind(claim.label().map(|label| label.as_bytes().to_vec()))
            .bind(claim_bytes(claim))
            .bind(micros(claim.lease()))
            .bind(id_bytes(self.row(claim.key())))
    }

    /// A grant without a lease that reserves `block` tokens. For lease claims the row is free, but
    /// its tokens count.
    pub(super) fn session_note(&self, claim: &Claim, block: i64) -> Statement {
        let id = self.row(claim.key());
        let statement = self.granting(&self.texts.session_note, id, claim, block);
        statement.bind(id_bytes(id))
    }

    fn granting(&self, text: &Text, id: RowId, claim: &Claim, block: i64) -> Statement {
        query(text.safe())
            .bind(id_bytes(id))
            .bind(self.namespace.clone().into_bytes())
            .bind(claim.key().as_str().as_bytes().to_vec())
            .bind(claim_bytes(claim))
            .bind(block)
            .bind(claim.label().map(|label| label.as_bytes().to_vec()))
    }

    pub(super) fn look(&self, key: &Key) -> Statement {
        self.of_key(&self.texts.look, key)
    }

    pub(super) fn holder(&self, key: &Key, by: By) -> Statement {
        let text = if by == By::Lease { &self.texts.holder_by_lease } else { &self.texts.holder };
        self.of_key(text, key)
    }

    pub(super) fn holding(&self, key: &Key) -> Statement {
        self.of_key(&self.texts.holding, key)
    }

    pub(super) fn list(&self, by: By) -> Statement {
        let text = if by == By::Lease { &self.texts.list_by_lease } else { &self.texts.list };
        query(text.safe()).bind(self.namespace.clone().into_bytes())
    }

    pub(super) fn release(&self, claim: &Claim) -> Statement {
        query(self.texts.release.safe())
            .bind(i64::from(claim.token_block()))
            .bind(id_bytes(self.row(claim.key())))
            .bind(claim_bytes(claim))
    }

    pub(super) fn force_release(&self, key: &Key) -> Statement {
        self.of_key(&self.texts.force_release, key)
    }

    pub(super) fn fence(&self, claim: &Claim, token: FencingToken) -> RawSql {
        self.fence_by(&self.texts.fence, claim, token)
    }

    pub(super) fn fence_held(&self, claim: &Claim, token: FencingToken) -> RawSql {
        self.fence_by(&self.texts.fence_held, claim, token)
    }

    fn fence_by(&self, text: &Text, claim: &Claim, token: FencingToken) -> RawSql {
        let token = i64::from(token);
        let row = self.value(claim.key());
        let claim = Value::Bytes(claim_bytes(claim));
        plain(text, &[row, claim, Value::Number(token), Value::Number(token)])
    }

    pub(super) fn session_keep(&self, claim: &Claim, token: FencingToken) -> Statement {
        self.of_key(&self.texts.session_keep, claim.key())
            .bind(self.namespace.clone().into_bytes())
            .bind(claim.key().as_str().as_bytes().to_vec())
            .bind(claim_bytes(claim))
            .bind(i64::from(token))
            .bind(i64::from(claim.token_block()))
    }

    /// The named lock's name is the row's id.
    pub(super) fn session_look(
        &self,
        key: &Key,
        noted: ClaimId,
        patience_seconds: i64,
    ) -> Statement {
        let id = self.row(key);
        let statement = query(self.texts.session_look.safe()).bind(id_bytes(id));
        statement.bind(noted.to_bytes().to_vec()).bind(id.hex()).bind(patience_seconds)
    }

    /// The named lock's name is the row's id.
    pub(super) fn session_is_free(&self, key: &Key) -> Statement {
        let id = self.row(key);
        query(self.texts.session_is_free.safe()).bind(id.hex()).bind(id_bytes(id))
    }

    pub(super) fn session_mark(
        &self,
        claim: &Claim,
        token: FencingToken,
        noted: ClaimId,
    ) -> Statement {
        let token = i64::from(token);
        query(self.texts.session_mark.safe())
            .bind(claim_bytes(claim))
            .bind(token)
            .bind(i64::from(claim.token_block()))
            .bind(id_bytes(self.row(claim.key())))
            .bind(noted.to_bytes().to_vec())
            .bind(token)
            .bind(token)
    }

    pub(super) fn row_note(&self, claim: &Claim) -> Statement {
        self.of_key(&self.texts.row_note, claim.key())
            .bind(claim_bytes(claim))
            .bind(i64::from(claim.token_block()))
            .bind(claim.label().map(|label| label.as_bytes().to_vec()))
    }

    pub(super) fn row_lock(&self, claim: &Claim) -> Statement {
        self.of_key(&self.texts.row_lock, claim.key()).bind(claim_bytes(claim))
    }

    pub(super) fn row_seen(&self, key: &Key) -> Statement {
        self.of_key(&self.texts.row_seen, key)
    }

    pub(super) fn clear_ended(&self, key: &Key) -> Statement {
        self.of_key(&self.texts.clear_ended, key)
    }

    pub(super) fn is_free(&self, key: &Key) -> Statement {
        self.of_key(&self.texts.is_free, key)
    }

    pub(super) fn make_row(&self, key: &Key) -> Statement {
        self.of_key(&self.texts.make_row, key)
            .bind(self.namespace.clone().into_bytes())
            .bind(key.as_str().as_bytes().to_vec())
    }

    pub(super) fn lock_row(&self, key: &Key) -> Statement {
        self.of_key(&self.texts.lock_row, key)
    }

    pub(super) fn lock_row_there(&self, key: &Key) -> RawSql {
        plain(&self.texts.lock_row, &[self.value(key)])
    }

    pub(super) fn row_seen_there(&self, key: &Key, claim: Option<Vec<u8>>, token: i64) -> RawSql {
        let values = [self.value(key), Value::MaybeBytes(claim), Value::Number(token)];
        plain(&self.texts.row_seen_in, &values)
    }

    pub(super) fn raise_token_there(&self, key: &Key, token: i64) -> RawSql {
        plain(&self.texts.raise_token, &[Value::Number(token), self.value(key)])
    }

    /// All claims must have the same lease.
    pub(super) fn renew(&self, claims: &[&Claim], lease: Duration) -> Statement {
        let statement = query(Texts::sized(&self.texts.renew, claims.len()).safe());
        let statement = self.with_rows(statement, claims);
        let statement = filled(statement, claims.iter().map(|claim| claim_bytes(claim)));
        let limit = i64::try_from(claims.len()).unwrap_or(i64::MAX);
        statement.bind(limit).bind(micros(lease))
    }

    pub(super) fn lasting(&self, claims: &[&Claim]) -> Statement {
        self.with_rows(query(Texts::sized(&self.texts.lasting, claims.len()).safe()), claims)
    }

    fn with_rows(&self, statement: Statement, claims: &[&Claim]) -> Statement {
        filled(statement, claims.iter().map(|claim| id_bytes(self.row(claim.key()))))
    }

    pub(super) fn held(&self, rows: &[RowId]) -> Statement {
        let statement = query(Texts::sized(&self.texts.held, rows.len()).safe());
        filled(statement, rows.iter().map(|row| id_bytes(*row)))
    }

    fn value(&self, key: &Key) -> Value {
        Value::Bytes(id_bytes(self.row(key)))
    }

    fn of_key(&self, text: &Text, key: &Key) -> Statement {
        query(text.safe()).bind(id_bytes(self.row(key)))
    }
}

pub(super) fn piece(
    texts: &Texts,
    from: [u8; 32],
    rows_max: usize,
    dead_for: Duration,
) -> Statement {
    query(texts.piece.safe())
        .bind(from.to_vec())
        .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
        .bind(micros(dead_for))
}

pub(super) fn raise_floor(texts: &Texts, token: i64) -> Statement {
    query(texts.raise_floor.safe()).bind(token).bind(token)
}

pub(super) fn purge(texts: &Texts, ids: &[Vec<u8>], dead_for: Duration, token: i64) -> Statement {
    let statement = query(Texts::sized(&texts.purge, ids.len()).safe());
    filled(statement, ids.iter().cloned()).bind(micros(dead_for)).bind(token)
}

/// Binds the items, and NULLs for the remaining parameters of the text.
pub(super) fn filled<T>(statement: Statement, items: impl ExactSizeIterator<Item = T>) -> Statement
where
    T: Encode<'static, MySql> + Type<MySql> + Send + 'static,
    Option<T>: Encode<'static, MySql>,
{
    let nulls = sql::size(items.len()).saturating_sub(items.len());
    let statement = items.fold(statement, Statement::bind);
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
pub(super) fn span(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}
