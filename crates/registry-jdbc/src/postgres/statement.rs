//! A statement with its values, sent either as a prepared statement or as plain text.
//!
//! Plain text is for poolers that give each transaction another connection. There, a statement
//! prepared on one connection is missing on the next, or another client has prepared a different
//! one under the same name. All values are numbers, bytes in hexadecimal digits, or plain words, so
//! escaping is not necessary.

use std::fmt::Write as _;
use std::time::Duration;

use sqlx::postgres::{PgArguments, PgConnection, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Executor as _, Postgres, query, raw_sql};

use super::sql::PgStatementText;

/// The value of a parameter.
#[derive(Debug, Clone)]
pub(super) enum PgParam {
    Bytes(Vec<u8>),
    MaybeBytes(Option<Vec<u8>>),
    Number(i64),
    /// A text of this program: letters, digits and underscores.
    Identifier(String),
    ManyBytes(Vec<Vec<u8>>),
    Numbers(Vec<i64>),
}

/// How statements are sent.
#[derive(Debug, Clone, Copy)]
pub(super) enum QueryMode {
    /// As prepared statements. `after_connect` has set how long they wait for their
    /// tables.
    Prepared,
    /// As plain text.
    Simple {
        /// How long they wait for their tables. Without a limit, a statement that waits for a table
        /// rebuild could grant a lock that its caller has given up.
        lock_timeout: Duration,
    },
}

#[derive(Debug)]
pub(super) struct BoundStatement<'a> {
    text: &'a PgStatementText,
    values: Vec<PgParam>,
    /// The answer has at most one row, which the client reads with less work.
    is_at_most_one: bool,
}

impl<'a> BoundStatement<'a> {
    pub(super) fn new(text: &'a PgStatementText, values: impl Into<Vec<PgParam>>) -> Self {
        Self { text, values: values.into(), is_at_most_one: false }
    }

    /// Declares that the answer has at most one row.
    pub(super) fn at_most_one(self) -> Self {
        Self { is_at_most_one: true, ..self }
    }

    /// Sends the statement and returns its rows.
    pub(super) async fn send(
        &self,
        connection: &mut PgConnection,
        query_mode: QueryMode,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        match query_mode {
            QueryMode::Prepared if self.is_at_most_one => {
                let row = self.query().fetch_optional(connection).await?;
                Ok(Vec::from_iter(row))
            }
            QueryMode::Prepared => self.query().fetch_all(connection).await,
            QueryMode::Simple { lock_timeout } => {
                // Two statements in one message are one transaction. The first completes before the
                // second waits for anything. Its setting ends with that transaction, so it does not
                // reach a pooler's next client.
                let lock_timeout = lock_timeout.as_millis().max(1);
                let text = format!("SET LOCAL lock_timeout = {lock_timeout}; {}", self.inlined());
                connection.fetch_all(raw_sql(AssertSqlSafe(text))).await
            }
        }
    }

    /// Returns whether the caller's transaction finds a row. A pooler keeps the connection for the
    /// duration of a transaction, so an unnamed prepared statement is still present.
    pub(super) async fn find_in(
        &self,
        connection: &mut PgConnection,
        is_prepared: bool,
    ) -> Result<Option<bool>, sqlx::Error> {
        let found = self.query().persistent(is_prepared).fetch_all(connection).await?;
        Ok((!found.is_empty()).then_some(true))
    }

    /// Returns the statement with bound values.
    fn query(&self) -> Query<'_, Postgres, PgArguments> {
        self.values.iter().fold(query(self.text.safe()), |query, value| match value {
            PgParam::Bytes(bytes) => query.bind(bytes),
            PgParam::MaybeBytes(bytes) => query.bind(bytes),
            PgParam::Number(number) => query.bind(number),
            PgParam::Identifier(payload) => query.bind(payload),
            PgParam::ManyBytes(many) => query.bind(many),
            PgParam::Numbers(numbers) => query.bind(numbers),
        })
    }

    /// Returns the statement as text that contains its values.
    pub(super) fn inlined(&self) -> String {
        let mut inlined = String::with_capacity(self.text.as_str().len() * 2);
        let mut parts = self.text.as_str().split('$');
        inlined.push_str(parts.next().unwrap_or_default());
        for part in parts {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            let (number, rest) = part.split_at(digits);
            let number: usize = number.parse().expect("the statements have no other use for a $");
            self.values[number - 1].write_to(&mut inlined);
            inlined.push_str(rest);
        }
        inlined
    }
}

impl PgParam {
    fn write_to(&self, text: &mut String) {
        match self {
            Self::Bytes(bytes) => write_bytes(text, bytes),
            Self::MaybeBytes(Some(bytes)) => write_bytes(text, bytes),
            Self::MaybeBytes(None) => text.push_str("NULL"),
            Self::Number(number) => write_number(text, *number),
            Self::Identifier(payload) => {
                debug_assert!(payload.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'));
                text.push('\'');
                text.push_str(payload);
                text.push('\'');
            }
            Self::ManyBytes(many) => {
                write_array(text, many, |text, bytes| write_bytes(text, bytes))
            }
            Self::Numbers(many) => {
                write_array(text, many, |text, number| write_number(text, *number))
            }
        }
    }
}

/// Writes bytes in a form that does not depend on the server's setting for backslashes.
fn write_bytes(text: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    text.push_str("E'\\\\x");
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text.push('\'');
}

fn write_number(text: &mut String, number: i64) {
    // In parentheses, because a type cast binds tighter than a sign.
    let _ = write!(text, "({number})");
}

fn write_array<T>(text: &mut String, items: &[T], write: impl Fn(&mut String, &T)) {
    text.push_str("ARRAY[");
    for (n, item) in items.iter().enumerate() {
        if n > 0 {
            text.push(',');
        }
        write(text, item);
    }
    text.push(']');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::config::TableNames;
    use crate::postgres::sql::PgStatements;

    #[test]
    fn simple_queries_contain_their_values() {
        let names = TableNames { schema: "public".to_owned(), prefix: "lock_registry".to_owned() };
        let texts = PgStatements::new(&names);
        let values = [
            PgParam::ManyBytes(vec![vec![0, 255], b"';--".to_vec()]),
            PgParam::ManyBytes(vec![]),
            PgParam::Numbers(vec![-1, 2]),
        ];
        let inlined = BoundStatement::new(&texts.renew, values).inlined();
        assert!(!inlined.contains('$') && !inlined.contains(';'), "{inlined}");
        assert!(
            inlined.contains(r"ARRAY[E'\\x00ff',E'\\x273b2d2d']::bytea[], ARRAY[]::bytea[], ARRAY[(-1),(2)]::bigint[]"),
            "{inlined}"
        );
    }
}
