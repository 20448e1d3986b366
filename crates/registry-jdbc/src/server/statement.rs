//! A statement with its values, sent either as a prepared statement or as plain text.
//!
//! The texts number their parameters: `$1` is the first value. `$1...` is a list of values, which
//! the text encloses in parentheses. A [`Dialect`] converts the parameters to its own form.
//!
//! Plain text needs no escaping, because all values are numbers, bytes in hexadecimal digits, or
//! plain words. It serves three purposes:
//!
//! - A pooler may give each transaction another connection. The next connection may lack a prepared
//!   statement, or have another client's statement of the same name.
//! - Several statements can be sent in one message.
//! - On a caller's connection, a future may be dropped at any time, and the connection is used
//!   again. sqlx prepares a statement before it sends the values. If the future is dropped between
//!   these two steps, sqlx miscounts the pending responses of a MySQL connection. The next
//!   statement, usually the rollback, then waits forever (seen with sqlx 0.9.0). For plain text,
//!   sqlx always counts the response.

use std::borrow::Borrow;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim, FencingToken, Holder, Key, LockRecord, Release};
use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

use super::dialect::Dialect;
use super::error;

/// The text of one statement, with the names of the tables filled in.
#[derive(Debug, Clone)]
pub(crate) struct StatementText {
    /// The text with numbered parameters.
    text: Arc<str>,
    /// The texts for prepared statements, one for each list length.
    pub(crate) prepared: Arc<[Arc<str>]>,
    /// The index of the value of each question mark in `prepared`. A list has several question
    /// marks and one index.
    #[cfg_attr(
        not(feature = "mysql"),
        expect(dead_code, reason = "PostgreSQL numbers parameters")
    )]
    pub(crate) parameters: Arc<[usize]>,
}

/// A part of a statement's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    Text(&'a str),
    /// The value with this index.
    Value(usize),
    /// The items of the value with this index.
    List(usize),
}

impl StatementText {
    /// Creates the text of a server that numbers parameters itself.
    #[cfg(feature = "postgres")]
    pub(crate) fn numbered(text: &str) -> Self {
        let text: Arc<str> = text.into();
        Self { prepared: Arc::new([Arc::clone(&text)]), parameters: Arc::new([]), text }
    }

    /// Creates the text of a server whose parameters are question marks. Prepares one text for each
    /// of the list lengths `sizes`.
    #[cfg(feature = "mysql")]
    pub(crate) fn positional(text: &str, sizes: &[usize]) -> Self {
        let parts = parts(text);
        let has_list = parts.iter().any(|part| matches!(part, Part::List(_)));
        let with_lists_of = |size: usize| {
            let questions = parts.iter().map(|part| match part {
                Part::Text(text) => (*text).to_owned(),
                Part::Value(_) => "?".to_owned(),
                Part::List(_) => vec!["?"; size].join(", "),
            });
            Arc::from(questions.collect::<String>())
        };
        let sizes = if has_list { sizes } else { &[1] };
        let parameters = parts.iter().filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Value(index) | Part::List(index) => Some(*index),
        });
        Self {
            prepared: sizes.iter().copied().map(with_lists_of).collect(),
            parameters: parameters.collect(),
            text: text.into(),
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }
}

/// Replaces each placeholder of `names` in a text by its name. Call this last: a name may contain
/// braces, and is not searched for placeholders.
pub(crate) fn with_names(text: &str, names: &[(&str, String)]) -> String {
    let mut filled = String::with_capacity(text.len() * 2);
    let mut rest = text;
    while let Some(at) = rest.find('{') {
        filled.push_str(&rest[..at]);
        rest = &rest[at..];
        let found = names.iter().find(|(placeholder, _)| rest.starts_with(*placeholder));
        let (placeholder, name) =
            found.map_or(("{", "{"), |(placeholder, name)| (*placeholder, name.as_str()));
        filled.push_str(name);
        rest = &rest[placeholder.len()..];
    }
    filled + rest
}

/// Converts a text for sqlx, and asserts that the text contains no untrusted value.
pub(crate) fn trusted_sql(text: &Arc<str>) -> SqlStr {
    AssertSqlSafe(Arc::clone(text)).into_sql_str()
}

/// Splits a text at its parameters. A `$` in a quoted name or string begins no parameter. A doubled
/// quote inside quotes ends one quoted part and begins the next, so it needs no special case.
fn parts(text: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let (mut rest, mut at, mut quote) = (text, 0, None);
    while let Some(&sign) = rest.as_bytes().get(at) {
        match (sign, quote) {
            (b'`' | b'\'' | b'"', None) => quote = Some(sign),
            (_, Some(open)) if open == sign => quote = None,
            (b'$', None) => {
                let (before, parameter) = rest.split_at(at);
                let digits = parameter[1..].find(|c: char| !c.is_ascii_digit());
                let end = digits.map_or(parameter.len(), |length| length + 1);
                let number = parameter[1..end].parse::<usize>();
                let index = number.expect("the statements have no other use for a $") - 1;
                parts.push(Part::Text(before));
                rest = &parameter[end..];
                let list = rest.strip_prefix("...");
                parts.push(if list.is_some() { Part::List(index) } else { Part::Value(index) });
                (rest, at) = (list.unwrap_or(rest), 0);
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    parts.push(Part::Text(rest));
    parts
}

/// The value of a parameter.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    Bytes(Vec<u8>),
    MaybeBytes(Option<Vec<u8>>),
    Number(i64),
    /// A text. In a plain statement, it must consist of ASCII letters and digits, underscores and
    /// hyphens.
    Text(String),
    ManyBytes(Vec<Vec<u8>>),
    ManyTexts(Vec<String>),
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "only PostgreSQL has arrays"))]
    Numbers(Vec<i64>),
}

impl Value {
    pub(crate) fn bytes(bytes: &[u8]) -> Self {
        Self::Bytes(bytes.to_vec())
    }

    pub(crate) fn key(key: &Key) -> Self {
        Self::bytes(key.as_str().as_bytes())
    }

    pub(crate) fn claim(claim: &Claim) -> Self {
        Self::bytes(&claim.id().to_bytes())
    }

    pub(crate) fn entry_prefix(claim: &Claim) -> Self {
        Self::bytes(LockRecord::entry_prefix(claim).as_bytes())
    }

    pub(crate) fn claims<C: Borrow<Claim>>(claims: &[C]) -> Self {
        let ids = claims.iter().map(|claim| claim.borrow().id().to_bytes().to_vec());
        Self::ManyBytes(ids.collect())
    }

    pub(crate) fn token_block(claim: &Claim) -> Self {
        Self::Number(i64::from(claim.token_block()))
    }

    pub(crate) fn label(claim: &Claim) -> Self {
        Self::MaybeBytes(claim.label().map(|label| label.as_bytes().to_vec()))
    }

    pub(crate) fn lease(claim: &Claim) -> Self {
        Self::Number(micros(claim.lease()))
    }

    pub(crate) fn token(token: FencingToken) -> Self {
        Self::Number(i64::from(token))
    }

    fn write_to<D: Dialect>(&self, text: &mut String) {
        match self {
            Self::Bytes(bytes) | Self::MaybeBytes(Some(bytes)) => write_bytes::<D>(text, bytes),
            Self::MaybeBytes(None) => text.push_str("NULL"),
            Self::Number(number) => write_number(text, *number),
            Self::Text(word) => write_word(text, word),
            Self::ManyBytes(many) => write_array(text, many, |text, bytes| {
                write_bytes::<D>(text, bytes);
            }),
            Self::ManyTexts(many) => write_array(text, many, |text, word| write_word(text, word)),
            Self::Numbers(many) => {
                write_array(text, many, |text, number| write_number(text, *number))
            }
        }
    }
}

fn write_bytes<D: Dialect>(text: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    text.push_str(D::BYTES_PREFIX);
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text.push('\'');
}

fn write_number(text: &mut String, number: i64) {
    // The parentheses are necessary: a type cast, and possibly an operator before the number, has a
    // higher precedence than the sign.
    let _ = write!(text, "({number})");
}

fn write_word(text: &mut String, word: &str) {
    debug_assert!(word.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-')));
    let _ = write!(text, "'{word}'");
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

/// How statements are sent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum QueryMode {
    /// Statements are prepared. The settings of `after_connect` limit the wait for table locks.
    Prepared,
    /// Statements are plain text. One text may contain several statements.
    Plain,
    /// Statements are plain text that passes through a pooler.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "for poolers of PostgreSQL"))]
    PlainPooled {
        /// How long a statement waits for table locks. Without a limit, a statement could wait for
        /// a table rebuild, and then grant a lock whose caller has timed out.
        lock_timeout: Duration,
    },
}

#[derive(Debug)]
pub(crate) struct Statement<'a> {
    pub(crate) text: &'a StatementText,
    pub(crate) values: Vec<Value>,
    /// Whether the answer has at most one row, which the client can then read with less work.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "MySQL has no such request"))]
    pub(crate) has_at_most_one_row: bool,
}

impl<'a> Statement<'a> {
    pub(crate) fn new(text: &'a StatementText, values: impl Into<Vec<Value>>) -> Self {
        Self { text, values: values.into(), has_at_most_one_row: false }
    }

    /// Declares that the answer has at most one row.
    pub(crate) fn with_at_most_one_row(self) -> Self {
        Self { has_at_most_one_row: true, ..self }
    }

    /// Returns the statement as plain text that contains the values.
    pub(crate) fn inlined<D: Dialect>(&self) -> String {
        let mut inlined = String::with_capacity(self.text.as_str().len() * 2);
        for part in parts(self.text.as_str()) {
            match part {
                Part::Text(text) => inlined.push_str(text),
                Part::Value(index) | Part::List(index) => {
                    self.values[index].write_to::<D>(&mut inlined);
                }
            }
        }
        inlined
    }
}

/// The answer to a statement.
#[derive(Debug)]
pub(crate) struct Answer<R> {
    pub(crate) rows: Vec<R>,
    /// The number of changed rows. Zero if the server returns rows instead.
    pub(crate) affected_rows: u64,
    /// The number that the statement has passed to `LAST_INSERT_ID`, on servers that do not return
    /// the number as a row.
    #[cfg_attr(
        not(feature = "mysql"),
        expect(dead_code, reason = "PostgreSQL returns the number as a row")
    )]
    pub(crate) last_insert_id: u64,
}

impl<R> Answer<R> {
    pub(crate) fn of_rows(rows: Vec<R>) -> Self {
        Self { rows, affected_rows: 0, last_insert_id: 0 }
    }

    /// Returns the outcome of a statement that ends grants.
    pub(crate) fn release_outcome(&self) -> Release {
        if self.changed_a_row() { Release::Freed } else { Release::NotHeld }
    }

    /// Returns whether a statement that writes at most one row has written it.
    pub(crate) fn changed_a_row(&self) -> bool {
        !self.rows.is_empty() || self.affected_rows > 0
    }
}

/// Reads a number that is not null.
pub(crate) fn number<D: Dialect>(row: &D::Row, index: usize) -> Result<i64, BackendError> {
    maybe_number::<D>(row, index)?.ok_or_else(|| corrupt::<D>("a row has no number"))
}

pub(crate) fn maybe_number<D: Dialect>(
    row: &D::Row,
    index: usize,
) -> Result<Option<i64>, BackendError> {
    D::number(row, index).map_err(D::explain)
}

pub(crate) fn bytes<D: Dialect>(
    row: &D::Row,
    index: usize,
) -> Result<Option<Vec<u8>>, BackendError> {
    D::bytes(row, index).map_err(D::explain)
}

pub(crate) fn text<D: Dialect>(row: &D::Row, index: usize) -> Result<Option<String>, BackendError> {
    D::text(row, index).map_err(D::explain)
}

pub(crate) fn flag<D: Dialect>(row: &D::Row, index: usize) -> Result<bool, BackendError> {
    D::flag(row, index).map_err(D::explain)
}

/// Returns the first row of a statement that always returns a row.
pub(crate) fn one_row<D: Dialect>(rows: &[D::Row]) -> Result<&D::Row, BackendError> {
    rows.first().ok_or_else(|| corrupt::<D>("a statement returned no row"))
}

pub(crate) fn fencing_token<D: Dialect>(token: i64) -> Result<FencingToken, BackendError> {
    FencingToken::try_from(token).map_err(|_| corrupt::<D>("a row's token is negative"))
}

/// Reads token, label and times from four adjacent columns, beginning at `first`.
pub(crate) fn decode_holder<D: Dialect>(
    holder: Holder,
    row: &D::Row,
    first: usize,
) -> Result<Holder, BackendError> {
    let label = bytes::<D>(row, first + 1)?;
    let (held_for, left) = (number::<D>(row, first + 2)?, maybe_number::<D>(row, first + 3)?);
    Ok(holder
        .with_label(label.map(|label| String::from_utf8_lossy(&label).into_owned()))
        .with_token(Some(fencing_token::<D>(number::<D>(row, first)?)?))
        .with_times(Some(from_micros(held_for)), left.map(from_micros)))
}

pub(crate) fn corrupt<D: Dialect>(message: &str) -> BackendError {
    error::corrupt(D::STORE, message)
}

/// Converts a duration to microseconds, the unit of the tables. Limits the result to
/// [`MICROS_MAX`], so that a sum with the clock cannot overflow.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).map_or(MICROS_MAX, |micros| micros.min(MICROS_MAX))
}

/// A thousand years.
const MICROS_MAX: i64 = 1000 * 366 * 24 * 60 * 60 * 1_000_000;

/// Converts microseconds of a row to a duration; negative values become zero.
pub(crate) fn from_micros(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_braces_stays_unchanged() {
        let names = [("{a}", "x{b}{now}{".to_owned()), ("{b}", "y".to_owned())];
        assert_eq!(with_names("{a}.{b} {c}{a}", &names), "x{b}{now}{.y {c}x{b}{now}{");
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn plain_text_for_postgresql_contains_the_values() {
        let text = StatementText::numbered("SELECT $1::bytea[], $2::bytea[], $3::bigint[], $1");
        let values = [
            Value::ManyBytes(vec![vec![0, 255], b"';--".to_vec()]),
            Value::ManyBytes(vec![]),
            Value::Numbers(vec![-1, 2]),
        ];
        assert_eq!(
            Statement::new(&text, values).inlined::<sqlx::Postgres>(),
            r"SELECT ARRAY[E'\\x00ff',E'\\x273b2d2d']::bytea[], ARRAY[]::bytea[], ARRAY[(-1),(2)]::bigint[], ARRAY[E'\\x00ff',E'\\x273b2d2d']"
        );
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn quoted_names_contain_no_parameters() {
        let text = StatementText::numbered(r#"SELECT "a$1"."o'b" FROM "c""$1" WHERE d = $1"#);
        assert_eq!(
            Statement::new(&text, [Value::Number(7)]).inlined::<sqlx::Postgres>(),
            r#"SELECT "a$1"."o'b" FROM "c""$1" WHERE d = (7)"#
        );
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn plain_text_for_mysql_contains_the_values() {
        let values = [
            Value::Bytes(vec![0, 255, b'\'']),
            Value::MaybeBytes(None),
            Value::Bytes(Vec::new()),
            Value::Number(-1),
            Value::Text("1b-2".to_owned()),
        ];
        let text = "`a$1``'$1` = $1 AND b <=> $2 AND c = $3 AND d=$4 AND e = $5 AND f = '$1'";
        let text = StatementText::positional(text, &[1]);
        assert_eq!(
            Statement::new(&text, values).inlined::<sqlx::MySql>(),
            "`a$1``'$1` = x'00ff27' AND b <=> NULL AND c = x'' AND d=(-1) AND e = '1b-2' AND f = '$1'"
        );
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn prepared_text_for_mysql_has_question_marks() {
        let text = StatementText::positional("a = $2 AND b IN ($1...) AND c = $2", &[1, 3]);
        let prepared: Vec<&str> = text.prepared.iter().map(|text| &**text).collect();
        assert_eq!(
            prepared,
            ["a = ? AND b IN (?) AND c = ?", "a = ? AND b IN (?, ?, ?) AND c = ?"]
        );
        assert_eq!(*text.parameters, [1, 0, 1]);
    }
}
