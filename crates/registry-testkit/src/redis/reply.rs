//! Replies of a server, in version 2 of the Redis protocol (RESP2).

use std::io;

/// A complete reply.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RedisReply {
    /// A status line, such as `OK`.
    Status(String),
    /// An error, such as `NOAUTH Authentication required.`
    Error(String),
    /// An integer.
    Number(i64),
    /// A bulk string.
    Value(Vec<u8>),
    /// A null reply: the value does not exist.
    Nil,
    /// An array of replies.
    List(Vec<Self>),
}

impl RedisReply {
    /// Parses the first reply in `bytes` and returns it with its length. Returns `None` if the
    /// reply is incomplete.
    ///
    /// # Errors
    /// Returns `InvalidData` if `bytes` do not start with a reply.
    pub(super) fn parse(bytes: &[u8]) -> io::Result<Option<(Self, usize)>> {
        let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") else { return Ok(None) };
        let line = String::from_utf8_lossy(&bytes[..end]);
        let mut used = end + 2;
        let (kind, rest) = line.split_at_checked(1).ok_or_else(|| unexpected_reply(&line))?;
        let number = || rest.parse::<i64>().map_err(|_| unexpected_reply(&line));
        let reply = match kind {
            "+" => Self::Status(rest.to_owned()),
            "-" => Self::Error(rest.to_owned()),
            ":" => Self::Number(number()?),
            "$" | "*" => match (usize::try_from(number()?), kind) {
                (Err(_), _) => Self::Nil,
                (Ok(length), "$") => {
                    let Some(value) = bytes.get(used..used + length) else { return Ok(None) };
                    if bytes.len() < used + length + 2 {
                        return Ok(None);
                    }
                    used += length + 2;
                    Self::Value(value.to_vec())
                }
                (Ok(length), _) => {
                    let mut list = Vec::new();
                    for _ in 0..length {
                        let Some((item, more)) = Self::parse(&bytes[used..])? else {
                            return Ok(None);
                        };
                        list.push(item);
                        used += more;
                    }
                    Self::List(list)
                }
            },
            _ => return Err(unexpected_reply(&line)),
        };
        Ok(Some((reply, used)))
    }

    /// Returns the text of a status, a value or a number, otherwise `None`.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        match self {
            Self::Status(text) => Some(text.clone()),
            Self::Value(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            Self::Number(number) => Some(number.to_string()),
            Self::Error(_) | Self::Nil | Self::List(_) => None,
        }
    }

    /// Returns the number of a reply that is a number, otherwise `None`.
    #[must_use]
    pub fn number(&self) -> Option<i64> {
        match self {
            Self::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// Returns the items of a list; empty for other replies.
    #[must_use]
    pub fn items(&self) -> &[Self] {
        match self {
            Self::List(items) => items,
            _ => &[],
        }
    }

    /// Returns the reply, unless it is an error.
    ///
    /// # Errors
    /// Returns the text of an error reply as an error.
    pub fn into_result(self) -> io::Result<Self> {
        match self {
            Self::Error(refusal) => Err(io::Error::other(refusal)),
            reply => Ok(reply),
        }
    }

    /// Returns the value that follows `name` in a list of alternating names and values.
    pub(super) fn field(&self, name: &str) -> Option<String> {
        let mut pairs = self.items().chunks_exact(2);
        pairs.find(|pair| pair[0].text().as_deref() == Some(name)).and_then(|pair| pair[1].text())
    }
}

fn unexpected_reply(line: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{line:?} is not the start of a reply"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_is_parsed_once_it_is_complete() {
        let bytes = b"*4\r\n:42\r\n$4\r\na\r\nb\r\n*2\r\n+OK\r\n-ERR no\r\n$-1\r\n";
        let (reply, used) = RedisReply::parse(bytes).unwrap().unwrap();
        let inner = vec![RedisReply::Status("OK".into()), RedisReply::Error("ERR no".into())];
        let value = RedisReply::Value(b"a\r\nb".to_vec());
        assert_eq!(
            reply,
            RedisReply::List(vec![
                RedisReply::Number(42),
                value,
                RedisReply::List(inner),
                RedisReply::Nil
            ])
        );
        assert_eq!(used, bytes.len());
        for length in 0..bytes.len() {
            assert_eq!(RedisReply::parse(&bytes[..length]).unwrap(), None, "{length} bytes");
        }
    }

    #[test]
    fn invalid_replies_are_rejected() {
        for bytes in ["hello\r\n", "\r\n", "$four\r\n", "é\r\n"] {
            RedisReply::parse(bytes.as_bytes()).unwrap_err();
        }
    }
}
