//! Low-level requests to a server: four-letter words, and the end of another client's session. No
//! locks and no nodes.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// A connection to a server, as listed by `cons`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientStats {
    /// The session id, which ephemeral nodes contain as their owner.
    pub session: i64,
    /// The number of packets received from the client: requests and pings.
    pub received: u64,
    /// The number of packets sent to the client: one for each received packet, and one for each
    /// watch event.
    pub sent: u64,
}

impl ClientStats {
    /// Returns the number of watch events sent to the client.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.sent.saturating_sub(self.received)
    }

    /// Parses a line such as ` /127.0.0.1:4[1](queued=0,recved=12,sent=12,sid=0x10,…)`. Returns
    /// `None` for a connection without a session.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let fields = line.trim().split_once('(')?.1.trim_end_matches(')');
        let field = |name: &str| {
            let mut fields = fields.split(',').filter_map(|field| field.split_once('='));
            fields.find(|(field, _)| *field == name).map(|(_, value)| value)
        };
        let session = u64::from_str_radix(field("sid")?.strip_prefix("0x")?, 16).ok()?;
        Some(Self {
            session: session.cast_signed(),
            received: field("recved")?.parse().ok()?,
            sent: field("sent")?.parse().ok()?,
        })
    }
}

/// Sends a four-letter word and returns the answer.
pub(super) async fn send_command(addr: SocketAddr, word: &str) -> io::Result<String> {
    let mut server = TcpStream::connect(addr).await?;
    server.write_all(word.as_bytes()).await?;
    let mut answer = String::new();
    server.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// The type of the request that ends a session.
const CLOSE_SESSION: i32 = -11;
/// The session timeout in the request, in milliseconds. It is short because only the end of the
/// session follows.
const TIMEOUT: i32 = 1_000;
/// The number of attempts to end a session, and the pause after a failed attempt.
const TRIES: usize = 500;
const PAUSE: Duration = Duration::from_millis(20);
/// The maximum time of one attempt. When two connections claim the same session concurrently, one
/// of them may receive no answer.
const TRY_LIMIT: Duration = Duration::from_secs(1);

/// Takes over a session and ends it, as its own client could from another connection.
///
/// If the session's own client is connected to the same server, the take-over closes its
/// connection. The client reconnects at once and takes the session back, possibly before the server
/// processes the close request. This function therefore retries.
pub(super) async fn end(addr: SocketAddr, session: i64) -> io::Result<()> {
    for attempt in 0..TRIES {
        let tried = timeout(TRY_LIMIT, take_over_and_close(addr, session)).await;
        match tried.unwrap_or_else(|late| Err(late.into())) {
            Ok(false) if attempt == 0 => {
                return Err(io::Error::other(format!("the server knows no session {session:#x}")));
            }
            // Only the answer that the session is unknown proves that it has ended.
            Ok(false) => return Ok(()),
            Ok(true) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Err(error),
            // The server may still have received the request.
            Err(_) => sleep(PAUSE).await,
        }
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("session {session:#x} does not end")))
}

/// Takes over the session and ends it. Returns whether the server knew the session.
async fn take_over_and_close(addr: SocketAddr, session: i64) -> io::Result<bool> {
    let mut server = TcpStream::connect(addr).await?;
    let mut connect_request = Vec::new();
    connect_request.extend(0_i32.to_be_bytes()); // version
    connect_request.extend(0_i64.to_be_bytes()); // newest transaction seen
    connect_request.extend(TIMEOUT.to_be_bytes());
    connect_request.extend(session.to_be_bytes());
    connect_request.extend(16_i32.to_be_bytes());
    connect_request.extend(password(session));
    connect_request.push(0); // not read-only
    let close_request = [1_i32.to_be_bytes(), CLOSE_SESSION.to_be_bytes()].concat();
    server.write_all(&[packet(&connect_request), packet(&close_request)].concat()).await?;
    let answer = receive(&mut server).await?;
    let known = answer.get(8..16).is_some_and(|id| id == session.to_be_bytes());
    if known {
        // The server may close the connection instead of answering the close request.
        _ = receive(&mut server).await;
    }
    Ok(known)
}

fn packet(content: &[u8]) -> Vec<u8> {
    // These packets have about 50 bytes, so the conversion cannot fail.
    let length = u32::try_from(content.len()).unwrap_or_default();
    [&length.to_be_bytes(), content].concat()
}

async fn receive(server: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut packet = vec![0; server.read_u32().await?.min(1 << 20) as usize];
    server.read_exact(&mut packet).await?;
    Ok(packet)
}

/// Returns the password of a session. ZooKeeper derives it from the session id and a constant in
/// `ZooKeeperServer` with Java's random number generator, so anyone with the id can compute it.
fn password(session: i64) -> [u8; 16] {
    const SECRET: i64 = 0xB341_5C00;
    const FACTOR: u64 = 0x5_DEEC_E66D;
    const BITS: u64 = (1 << 48) - 1;
    let mut state = ((session ^ SECRET).cast_unsigned() ^ FACTOR) & BITS;
    let mut password = [0; 16];
    for chunk in password.chunks_mut(4) {
        state = (state.wrapping_mul(FACTOR) + 0xB) & BITS;
        chunk.copy_from_slice(&((state >> 16) as u32).to_le_bytes());
    }
    password
}
