//! What a server answers, in the words of its protocol's second version.

use std::io;

/// One whole answer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reply {
    /// A line such as `OK`.
    Status(String),
    /// A refusal, such as `NOAUTH Authentication required.`
    Error(String),
    /// A number.
    Number(i64),
    /// A value, as bytes.
    Value(Vec<u8>),
    /// Nothing: no such value.
    Nil,
    /// Several answers in one.
    List(Vec<Self>),
}

impl Reply {
    /// The first answer in `bytes` and its length, or nothing when its end is still to come.
    ///
    /// # Errors
    /// `InvalidData` when this is no answer.
    pub(super) fn parse(bytes: &[u8]) -> io::Result<Option<(Self, usize)>> {
        let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") else { return Ok(None) };
        let line = String::from_utf8_lossy(&bytes[..end]);
        let mut used = end + 2;
        let (kind, rest) = line.split_at_checked(1).ok_or_else(|| strange(&line))?;
        let number = || rest.parse::<i64>().map_err(|_| strange(&line));
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
            _ => return Err(strange(&line)),
        };
        Ok(Some((reply, used)))
    }

    /// The text of a status, a value or a number; nothing for the others.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        match self {
            Self::Status(text) => Some(text.clone()),
            Self::Value(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            Self::Number(number) => Some(number.to_string()),
            Self::Error(_) | Self::Nil | Self::List(_) => None,
        }
    }

    /// The number of an answer that is one.
    #[must_use]
    pub fn number(&self) -> Option<i64> {
        match self {
            Self::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// The parts of a list; none for the others.
    #[must_use]
    pub fn items(&self) -> &[Self] {
        match self {
            Self::List(items) => items,
            _ => &[],
        }
    }

    /// The same answer, unless it is a refusal.
    ///
    /// # Errors
    /// The refusal.
    pub fn granted(self) -> io::Result<Self> {
        match self {
            Self::Error(refusal) => Err(io::Error::other(refusal)),
            granted => Ok(granted),
        }
    }

    /// What a list of names and values, one after the other, says of `name`.
    pub(super) fn field(&self, name: &str) -> Option<String> {
        let mut pairs = self.items().chunks_exact(2);
        pairs.find(|pair| pair[0].text().as_deref() == Some(name)).and_then(|pair| pair[1].text())
    }
}

fn strange(line: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{line:?} begins no answer"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_once_it_is_whole() {
        let bytes = b"*4\r\n:42\r\n$4\r\na\r\nb\r\n*2\r\n+OK\r\n-ERR no\r\n$-1\r\n";
        let (reply, used) = Reply::parse(bytes).unwrap().unwrap();
        let inner = vec![Reply::Status("OK".into()), Reply::Error("ERR no".into())];
        let value = Reply::Value(b"a\r\nb".to_vec());
        assert_eq!(
            reply,
            Reply::List(vec![Reply::Number(42), value, Reply::List(inner), Reply::Nil])
        );
        assert_eq!(used, bytes.len());
        for length in 0..bytes.len() {
            assert_eq!(Reply::parse(&bytes[..length]).unwrap(), None, "{length} bytes");
        }
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        for bytes in ["hello\r\n", "\r\n", "$four\r\n", "é\r\n"] {
            Reply::parse(bytes.as_bytes()).unwrap_err();
        }
    }
}
