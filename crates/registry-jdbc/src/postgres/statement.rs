//! A statement with its values, ready to be sent: as one that the server keeps prepared, or as plain text.
//!
//! Plain text is for poolers that give each transaction another connection. What was prepared on one connection would be missing on the
//! next, or worse: be what somebody else has prepared there under the same name. All values are numbers and bytes, and bytes are written
//! in hexadecimal digits, so there is nothing to escape.

use std::fmt::Write as _;
use std::time::Duration;

use sqlx::postgres::{PgArguments, PgConnection, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Executor as _, Postgres, query, raw_sql};

use super::sql::Text;

/// What a parameter stands for.
#[derive(Debug, Clone)]
pub(super) enum Value {
    Bytes(Vec<u8>),
    MaybeBytes(Option<Vec<u8>>),
    Number(i64),
    /// A word of ours: letters, digits and underscores.
    Word(String),
    ManyBytes(Vec<Vec<u8>>),
    Numbers(Vec<i64>),
}

/// In which way statements are sent.
#[derive(Debug, Clone, Copy)]
pub(super) enum Manner {
    /// The server keeps them prepared. How long they wait for their tables the connection was told before.
    Prepared,
    /// As text.
    Plain {
        /// How long they wait for their tables: whoever waited for ever, for somebody who rebuilds one, would be granted a lock after all when nobody
        /// wants it any more.
        patience: Duration,
    },
}

#[derive(Debug)]
pub(super) struct Statement<'a> {
    text: &'a Text,
    values: Vec<Value>,
    /// Whether one row is all that it can be answered with, which the client takes in with less ado.
    is_for_one: bool,
}

impl<'a> Statement<'a> {
    pub(super) fn new(text: &'a Text, values: impl Into<Vec<Value>>) -> Self {
        Self { text, values: values.into(), is_for_one: false }
    }

    /// One that is answered with one row, or none.
    pub(super) fn for_one(self) -> Self {
        Self { is_for_one: true, ..self }
    }

    /// Asks and collects the answer.
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
                // Two statements in one message are one transaction, and the first is over before the second one waits for anything. What it
                // sets ends with that transaction, so a pooler leaves it to nobody.
                let patience = patience.as_millis().max(1);
                let text = format!("SET LOCAL lock_timeout = {patience}; {}", self.plain());
                connection.fetch_all(raw_sql(AssertSqlSafe(text))).await
            }
        }
    }

    /// With its values beside it.
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

    /// With its values in it.
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

/// In the way that all servers read alike, whatever they are told of backslashes.
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
    // In brackets, because a sign binds less than a type does.
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
