//! An operator's connection to one server: it sends commands and reads whole answers.

use std::fmt;
use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::reply::Reply;

trait Stream: AsyncRead + AsyncWrite + Send + Sync + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> Stream for T {}

/// A connection for commands that must come from one client, such as `MULTI` or a write and its `WAIT`. See
/// [`RedisServer::connect`](super::RedisServer::connect).
pub struct RedisConnection {
    stream: Box<dyn Stream>,
    /// Bytes of answers that were not asked for yet.
    unread: Vec<u8>,
}

impl RedisConnection {
    pub(super) fn new(stream: impl AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static) -> Self {
        Self { stream: Box::new(stream), unread: Vec::new() }
    }

    /// Sends one command, given as its words, and returns the answer. Words may contain anything.
    ///
    /// # Errors
    /// The connection's. A refusal is an answer.
    ///
    /// # Cancel safety
    /// None: a later answer would be taken for that of another command. Drop the connection as well.
    pub async fn ask_args(&mut self, words: &[impl AsRef<[u8]> + Sync]) -> io::Result<Reply> {
        let mut command = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            let word = word.as_ref();
            command.extend(format!("${}\r\n", word.len()).as_bytes());
            command.extend(word);
            command.extend(b"\r\n");
        }
        self.stream.write_all(&command).await?;
        self.next_reply().await
    }

    /// The next answer, for connections that were told to listen.
    ///
    /// # Errors
    /// The connection's; `UnexpectedEof` when the server has closed it.
    ///
    /// # Cancel safety
    /// No answer is lost.
    pub async fn next_reply(&mut self) -> io::Result<Reply> {
        loop {
            if let Some((reply, used)) = Reply::parse(&self.unread)? {
                self.unread.drain(..used);
                return Ok(reply);
            }
            if self.stream.read_buf(&mut self.unread).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Sends one line and returns the answer as it comes, or what came of it before the server closed the connection.
    pub(super) async fn ask_line(mut self, line: &str) -> io::Result<String> {
        self.stream.write_all(format!("{line}\r\n").as_bytes()).await?;
        while Reply::parse(&self.unread)?.is_none() {
            if self.stream.read_buf(&mut self.unread).await? == 0 {
                break;
            }
        }
        Ok(String::from_utf8_lossy(&self.unread).into_owned())
    }
}

impl fmt::Debug for RedisConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConnection")
            .field("unread", &self.unread.len())
            .finish_non_exhaustive()
    }
}
