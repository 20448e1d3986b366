//! Statements with inlined values, for connections of the caller, whose futures may be dropped at
//! any time.
//!
//! sqlx prepares a statement before it sends the values. A future that is dropped between the two
//! leaves uncounted responses on the connection. The next statement, usually the rollback, then
//! waits forever (seen with sqlx 0.9.0). The store closes its own connections in that case. sqlx
//! always counts the response to a statement that is sent as text.

use std::fmt::Write as _;

use sqlx::{AssertSqlSafe, RawSql, raw_sql};

use super::sql::MySqlStatementText;

/// The value for a question mark.
#[derive(Debug)]
pub(super) enum InlineValue {
    Bytes(Vec<u8>),
    MaybeBytes(Option<Vec<u8>>),
    Number(i64),
    /// A constant or a generated id: letters, digits and hyphens.
    Identifier(String),
}

/// Returns the statement with the values inlined.
pub(super) fn inline(text: &MySqlStatementText, values: &[InlineValue]) -> RawSql {
    raw_sql(AssertSqlSafe(inline_values(text.as_str(), values)))
}

fn inline_values(text: &str, values: &[InlineValue]) -> String {
    let mut inline = String::with_capacity(text.len() * 2);
    let mut values = values.iter();
    // Question marks inside quoted names and strings are not parameters. Quotes inside them are
    // doubled.
    let mut quote = None;
    for sign in text.chars() {
        match (sign, quote) {
            ('`' | '\'', None) => quote = Some(sign),
            _ if quote == Some(sign) => quote = None,
            _ => {}
        }
        if sign == '?' && quote.is_none() {
            values.next().expect("there is a value for each question mark").write_to(&mut inline);
        } else {
            inline.push(sign);
        }
    }
    debug_assert!(values.next().is_none(), "too many values");
    inline
}

impl InlineValue {
    fn write_to(&self, text: &mut String) {
        match self {
            Self::Bytes(bytes) | Self::MaybeBytes(Some(bytes)) => {
                text.push_str("x'");
                for byte in bytes {
                    _ = write!(text, "{byte:02x}");
                }
                text.push('\'');
            }
            Self::MaybeBytes(None) => text.push_str("NULL"),
            // In parentheses, because a minus sign binds less tightly than an operator before it
            // may.
            Self::Number(number) => _ = write!(text, "({number})"),
            Self::Identifier(word) => {
                debug_assert!(word.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'));
                _ = write!(text, "'{word}'");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_replace_the_question_marks() {
        let values = [
            InlineValue::Bytes(vec![0, 255, b'\'']),
            InlineValue::MaybeBytes(None),
            InlineValue::MaybeBytes(Some(vec![])),
            InlineValue::Number(-1),
            InlineValue::Identifier("1b-2".to_owned()),
        ];
        assert_eq!(
            inline_values(
                "`a?``'?` = ? AND b <=> ? AND c = ? AND d=? AND e = ? AND f = '?'",
                &values
            ),
            "`a?``'?` = x'00ff27' AND b <=> NULL AND c = x'' AND d=(-1) AND e = '1b-2' AND f = '?'"
        );
    }
}
