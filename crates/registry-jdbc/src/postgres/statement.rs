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

use super::sql::Text;

/// The value of a parameter.
#[derive(Debug, Clone)]
pub(super) enum Value {
    Bytes(Vec<u8>),
    MaybeBytes(Option<Vec<u8>>),
    Number(i64),
    /// A text of this program: letters, digits and underscores.
    Word(String),
    ManyBytes(Vec<Vec<u8>>),
    Numbers(Vec<i64>),
}

/// How statements are sent.
#[derive(Debug, Clone, Copy)]
pub(super) enum Manner {
    /// As prepared statements. The connection's greeting has set how long they wait for their
    /// tables.
    Prepared,
    /// As plain text.
    Plain {
        /// How long they wait for their tables. Without a limit, a statement that waits for a table
        /// rebuild could grant a lock that its caller has given up.
        patience: Duration,
    },
}

#[derive(Debug)]
pub(super) struct Statement<'a> {
    text: &'a Text,
    values: Vec<Value>,
    /// The answer has at most one row, which the client reads with less work.
    is_for_one: bool,
}

impl<'a> Statement<'a> {
    pub(super) fn new(text: &'a Text, values: impl Into<Vec<Value>>) -> Self {
        Self { text, values: values.into(), is_for_one: false }
    }

    /// Declares that the answer has at most one row.
    pub(super) fn for_one(self) -> Self {
        Self { is_for_one: true, ..self }
    }

    /// Sends the statement and returns its rows.
    pub(super) async fn send(
        &self,
        connection: &mut PgConnection,
        manner: Manner,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        match manner {
            Manner::Prepared if self.is_for_one => {
                let row = self.query().fetch_optional(connection).await?;
                Ok(Vec::from_iter(row))
            }
            Manner::Prepared => self.query().fetch_all(connection).await,
            Manner::Plain { patience } => {
                // Two statements in one message are one transaction. The first completes before the
                // second waits for anything. Its setting ends with that transaction, so it does not
                // reach a pooler's next client.
                let patience = patience.as_millis().max(1);
                let text = format!("SET LOCAL lock_timeout = {patience}; {}", self.plain());
                connection.fetch_all(raw_sql(AssertSqlSafe(text))).await
            }
        }
    }

    /// Returns the statement with bound values.
    pub(super) fn query(&self) -> Query<'_, Postgres, PgArguments> {
        self.values.iter().fold(query(self.text.safe()), |query, value| match value {
            Value::Bytes(bytes) => query.bind(bytes),
            Value::MaybeBytes(bytes) => query.bind(bytes),
            Value::Number(number) => query.bind(number),
            Value::Word(word) => query.bind(word),
            Value::ManyBytes(many) => query.bind(many),
            Value::Numbers(numbers) => query.bind(numbers),
        })
    }

    /// Returns the statement as text that contains its values.
    pub(super) fn plain(&self) -> String {
        let mut plain = String::with_capacity(self.text.as_str().len() * 2);
        let mut parts = self.text.as_str().split('$');
        plain.push_str(parts.next().unwrap_or_default());
        for part in parts {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            let (number, rest) = part.split_at(digits);
            let number: usize = number.parse().expect("the statements have no other use for a $");
            self.values[number - 1].write_to(&mut plain);
            plain.push_str(rest);
        }
        plain
    }
}

impl Value {
    fn write_to(&self, text: &mut String) {
        match self {
            Self::Bytes(bytes) => write_bytes(text, bytes),
            Self::MaybeBytes(Some(bytes)) => write_bytes(text, bytes),
            Self::MaybeBytes(None) => text.push_str("NULL"),
            Self::Number(number) => write_number(text, *number),
            Self::Word(word) => {
                debug_assert!(word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'));
                text.push('\'');
                text.push_str(word);
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
    use crate::postgres::sql::Texts;

    #[test]
    fn plain_text_has_its_values_in_it() {
        let names = TableNames { schema: "public".to_owned(), prefix: "lock_registry".to_owned() };
        let texts = Texts::new(&names);
        let values = [
            Value::ManyBytes(vec![vec![0, 255], b"';--".to_vec()]),
            Value::ManyBytes(vec![]),
            Value::Numbers(vec![-1, 2]),
        ];
        let plain = Statement::new(&texts.renew, values).plain();
        assert!(!plain.contains('$') && !plain.contains(';'), "{plain}");
        assert!(
            plain.contains(r"ARRAY[E'\\x00ff',E'\\x273b2d2d']::bytea[], ARRAY[]::bytea[], ARRAY[(-1),(2)]::bigint[]"),
            "{plain}"
        );
    }
}
