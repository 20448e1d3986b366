//! Sends a statement, as a prepared one or as plain text.

use futures_util::FutureExt as _;
use futures_util::TryStreamExt as _;
use futures_util::future::BoxFuture;
use registry_core::Key;
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{
    AssertSqlSafe, Either, Encode, Executor as _, MySql, MySqlConnection, Type, query, raw_sql,
};
use std::sync::Arc;

use super::sql::{self, MySqlStatements};
use crate::server::statement::trusted_sql;
use crate::server::{Answer, QueryMode, RowId, Statement, Value};

pub(super) fn send<'c>(
    connection: &'c mut MySqlConnection,
    statement: &'c Statement<'_>,
    mode: QueryMode,
) -> BoxFuture<'c, Result<Answer<MySqlRow>, sqlx::Error>> {
    async move {
        if !matches!(mode, QueryMode::Prepared) {
            let rows = simple_query(connection, statement.inlined::<MySql>()).await?;
            return Ok(Answer::of_rows(rows));
        }
        let mut results = connection.fetch_many(bound(statement));
        let mut answer = Answer::of_rows(Vec::new());
        while let Some(result) = results.try_next().await? {
            match result {
                Either::Left(done) => {
                    answer.affected_rows += done.rows_affected();
                    answer.last_insert_id = done.last_insert_id();
                }
                Either::Right(row) => answer.rows.push(row),
            }
        }
        Ok(answer)
    }
    .boxed()
}

pub(super) fn simple_query(
    connection: &mut MySqlConnection,
    text: String,
) -> BoxFuture<'_, Result<Vec<MySqlRow>, sqlx::Error>> {
    async move { connection.fetch_all(raw_sql(AssertSqlSafe(text))).await }.boxed()
}

/// Returns the statement with bound values. Lists are padded with NULLs.
fn bound<'a>(statement: &'a Statement<'_>) -> Query<'a, MySql, MySqlArguments> {
    let lengths = statement.values.iter().map(|value| match value {
        Value::ManyBytes(many) => many.len(),
        Value::ManyTexts(many) => many.len(),
        _ => 1,
    });
    let length = sql::list_size(lengths.max().unwrap_or(1));
    let text = match &*statement.text.prepared {
        [text] => text,
        texts => {
            let index = sql::LIST_SIZES.iter().position(|&size| size == length);
            &texts[index.expect("the length is one of these sizes")]
        }
    };
    let query = query(trusted_sql(text));
    let values = statement.text.parameters.iter().map(|&index| &statement.values[index]);
    values.fold(query, |query, value| match value {
        Value::Bytes(bytes) => query.bind(bytes),
        Value::MaybeBytes(bytes) => query.bind(bytes),
        Value::Number(number) => query.bind(number),
        Value::Text(word) => query.bind(word),
        Value::ManyBytes(many) => bind_list(query, many, length),
        Value::ManyTexts(many) => bind_list(query, many, length),
        Value::Numbers(numbers) => bind_list(query, numbers, length),
    })
}

fn bind_list<'a, T>(
    query: Query<'a, MySql, MySqlArguments>,
    items: &'a [T],
    length: usize,
) -> Query<'a, MySql, MySqlArguments>
where
    T: Encode<'a, MySql> + Type<MySql> + 'a,
    &'a T: Encode<'a, MySql> + Type<MySql>,
    Option<T>: Encode<'a, MySql> + Type<MySql>,
{
    let query = items.iter().fold(query, |query, item| query.bind(item));
    (items.len()..length).fold(query, |query, _| query.bind(None::<T>))
}

/// The statements of the task that polls for waiters, for the keys of one namespace.
#[derive(Debug)]
pub(super) struct PollStatements {
    pub(super) statements: Arc<MySqlStatements>,
    pub(super) namespace: String,
}

impl PollStatements {
    pub(super) fn row_id(&self, key: &Key) -> RowId {
        RowId::new(&self.namespace, key)
    }

    pub(super) fn held_rows(&self, rows: &[RowId]) -> Statement<'_> {
        let ids = rows.iter().map(|row| row.bytes().to_vec()).collect();
        Statement::new(&self.statements.held, [Value::ManyBytes(ids)])
    }
}
