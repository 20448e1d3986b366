//! Sends a statement, as a prepared one or as plain text.

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgArguments, PgConnection, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Executor as _, Postgres, query, raw_sql};

pub(super) use crate::server::QueryMode;
use crate::server::statement::trusted_sql;
use crate::server::{Answer, Statement, Value};

pub(super) fn send<'c>(
    connection: &'c mut PgConnection,
    statement: &'c Statement<'_>,
    mode: QueryMode,
) -> BoxFuture<'c, Result<Answer<PgRow>, sqlx::Error>> {
    async move {
        let rows = match mode {
            QueryMode::Prepared if statement.has_at_most_one_row => {
                Vec::from_iter(bound(statement).fetch_optional(connection).await?)
            }
            QueryMode::Prepared => bound(statement).fetch_all(connection).await?,
            QueryMode::Plain => simple_query(connection, statement.inlined::<Postgres>()).await?,
            QueryMode::PlainPooled { lock_timeout } => {
                // Two statements in one message are one transaction. `SET LOCAL` completes before
                // the second statement waits. Its setting ends with the transaction, so it does not
                // affect the pooler's next client.
                let lock_timeout = lock_timeout.as_millis().max(1);
                let text = statement.inlined::<Postgres>();
                simple_query(connection, format!("SET LOCAL lock_timeout = {lock_timeout}; {text}"))
                    .await?
            }
        };
        Ok(Answer::of_rows(rows))
    }
    .boxed()
}

pub(super) fn simple_query(
    connection: &mut PgConnection,
    text: String,
) -> BoxFuture<'_, Result<Vec<PgRow>, sqlx::Error>> {
    async move { connection.fetch_all(raw_sql(AssertSqlSafe(text))).await }.boxed()
}

/// Returns the statement with bound values.
fn bound<'a>(statement: &'a Statement<'_>) -> Query<'a, Postgres, PgArguments> {
    let query = query(trusted_sql(&statement.text.prepared[0]));
    statement.values.iter().fold(query, |query, value| match value {
        Value::Bytes(bytes) => query.bind(bytes),
        Value::MaybeBytes(bytes) => query.bind(bytes),
        Value::Number(number) => query.bind(number),
        Value::Text(word) => query.bind(word),
        Value::ManyBytes(many) => query.bind(many),
        Value::ManyTexts(many) => query.bind(many),
        Value::Numbers(numbers) => query.bind(numbers),
    })
}
