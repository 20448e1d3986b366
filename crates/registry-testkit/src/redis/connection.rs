//! A connection to one server that sends commands and reads complete replies.

use std::fmt;
use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::reply::RedisReply;

trait Stream: AsyncRead + AsyncWrite + Send + Sync + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> Stream for T {}

/// A connection for commands that must come from the same client, such as `MULTI`, or a write and
/// its `WAIT`. See [`RedisServer::connect`](super::RedisServer::connect).
pub struct RedisConnection {
    stream: Box<dyn Stream>,
    /// Received bytes of replies that have not been returned yet.
    unread: Vec<u8>,
}

impl RedisConnection {
    pub(super) fn new(stream: impl AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static) -> Self {
        Self { stream: Box::new(stream), unread: Vec::new() }
    }

    /// Sends one command, given as its words, and returns the reply. Words may contain arbitrary
    /// bytes.
    ///
    /// # Errors
    /// As [`next_reply`](Self::next_reply). An error reply is returned as `Ok`.
    ///
    /// # Cancel safety
    /// Not cancel safe: the next command receives the reply to this command. Drop the connection as
    /// well.
    pub async fn send_command_args(
        &mut self,
        words: &[impl AsRef<[u8]> + Sync],
    ) -> io::Result<RedisReply> {
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

    /// Returns the next reply, for connections that receive messages without a command, such as
    /// subscribers.
    ///
    /// # Errors
    /// Returns the connection's error, `UnexpectedEof` if the server has closed it, or
    /// `InvalidData` if it has sent something other than a reply.
    ///
    /// # Cancel safety
    /// Dropping the future loses no reply.
    pub async fn next_reply(&mut self) -> io::Result<RedisReply> {
        loop {
            if let Some((reply, used)) = RedisReply::parse(&self.unread)? {
                self.unread.drain(..used);
                return Ok(reply);
            }
            if self.stream.read_buf(&mut self.unread).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Sends one line and returns the raw reply. If the server closes the connection early, returns
    /// the bytes received so far.
    pub(super) async fn send_command_line(mut self, line: &str) -> io::Result<String> {
        self.stream.write_all(format!("{line}\r\n").as_bytes()).await?;
        while RedisReply::parse(&self.unread)?.is_none() {
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
