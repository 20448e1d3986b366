//! Carries the bytes of one connection, with one pump for each direction. Each pump reads the mode
//! again before it handles received bytes, so a mode change also applies to open connections.

use std::collections::VecDeque;
use std::future::pending;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use super::{ProxyMode, ProxyState, WithheldRequest};

const BUFFER_BYTES: usize = 16 * 1_024;
/// The number of queued bytes in one direction at which the proxy stops reading, so the sender sees
/// backpressure. The last read may exceed it.
const QUEUE_BYTES_MAX: usize = 1_024 * 1_024;
/// The duration of one piece of a throttled stream, in seconds.
const THROTTLE_PIECE_SECS: f64 = 0.05;

/// How the proxy ends a connection before both sides have closed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    Close,
    Reset,
}

pub(super) async fn serve(
    mut client: TcpStream,
    shared: Arc<ProxyState>,
    mut cut: watch::Receiver<()>,
    mut silenced: watch::Receiver<()>,
) {
    let ended = {
        let mut relay = pin!(relay(&mut client, &shared));
        tokio::select! {
            biased;
            _ = cut.changed() => Err(Cut::Reset),
            // The relay keeps both sockets open and is no longer polled.
            _ = silenced.changed() => {
                _ = cut.changed().await;
                Err(Cut::Reset)
            }
            ended = &mut relay => ended,
        }
    };
    match ended {
        Ok(()) => {}
        // Ends the stream before closing: closing with unread requests would send a reset.
        Err(Cut::Close) => _ = client.shutdown().await,
        // With a linger time of zero, closing sends a reset. A failure means that the client has
        // already disconnected.
        Err(Cut::Reset) => _ = client.set_zero_linger(),
    }
    drop(client);
    shared.count(|counts| {
        counts.live -= 1;
        counts.reset += u64::from(ended == Err(Cut::Reset));
    });
    // Held until now, because `cut_all` waits until all receivers are dropped.
    drop(cut);
}

async fn relay(client: &mut TcpStream, shared: &ProxyState) -> Result<(), Cut> {
    let mut modes = shared.mode.subscribe();
    // A black hole also delays the connection to the server.
    modes.wait_for(|mode| *mode != ProxyMode::BlackHole).await.map_err(|_| Cut::Close)?;
    let mut server = TcpStream::connect(shared.target).await.map_err(|_| Cut::Reset)?;
    // Without Nagle's algorithm, the client sees the server's timing.
    _ = client.set_nodelay(true);
    _ = server.set_nodelay(true);

    let state = ConnectionState::default();
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let requests = Pump::new(Direction::Requests, to_server, shared, &state);
    let replies = Pump::new(Direction::Replies, to_client, shared, &state);
    // A direction that ended cleanly leaves the other one open, as in TCP.
    let ended = tokio::try_join!(requests.run(from_client), replies.run(from_server)).map(|_| ());
    if let Some(bytes) = state.withheld.into_inner().unwrap_or_else(PoisonError::into_inner) {
        let mut withheld = shared.withheld.lock().unwrap_or_else(PoisonError::into_inner);
        withheld.push(WithheldRequest { server, bytes });
    }
    ended
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Requests,
    Replies,
}

/// The state that the two pumps of a connection share.
#[derive(Debug, Default)]
struct ConnectionState {
    /// A request was carried, and no byte of its reply has arrived.
    awaits_reply: AtomicBool,
    /// Notified when the client has ended its stream.
    client_done: Notify,
    /// A request that was withheld from the server.
    withheld: Mutex<Option<Vec<u8>>>,
}

struct Pump<'a> {
    direction: Direction,
    to: WriteHalf<'a>,
    shared: &'a ProxyState,
    state: &'a ConnectionState,
    /// Queued bytes, each with the time at which it is delivered.
    queue: VecDeque<(Instant, Vec<u8>)>,
    queued_bytes: usize,
    /// The delivery time of the last queued byte. Bytes never overtake each other.
    last_deliver_at: Instant,
    /// Reply bytes were discarded, so no later byte may be delivered.
    has_gap: bool,
    /// The stream to the receiver has been ended.
    ended: bool,
    /// The number of bytes that [`ProxyMode::CutAfter`] still allows.
    bytes_left: u64,
}

impl<'a> Pump<'a> {
    fn new(
        direction: Direction,
        to: WriteHalf<'a>,
        shared: &'a ProxyState,
        state: &'a ConnectionState,
    ) -> Self {
        Self {
            direction,
            to,
            shared,
            state,
            queue: VecDeque::new(),
            queued_bytes: 0,
            last_deliver_at: Instant::now(),
            has_gap: false,
            ended: false,
            bytes_left: 0,
        }
    }

    /// Carries bytes until the sender has ended its stream and all bytes have been delivered.
    async fn run(mut self, mut from: ReadHalf<'_>) -> Result<(), Cut> {
        let mut modes = self.shared.mode.subscribe();
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut at_end = false;
        let mut mode = *modes.borrow_and_update();
        self.apply_mode(mode).await?;
        loop {
            let held = self.holds_bytes(mode);
            if at_end && self.queue.is_empty() && !held {
                return self.finish(mode, &mut modes).await;
            }
            let has_capacity = self.queued_bytes < QUEUE_BYTES_MAX;
            let deliver_at =
                self.queue.front().map(|(deliver_at, _)| *deliver_at).filter(|_| !held);
            let due = async {
                match deliver_at {
                    // The timer has a resolution of one millisecond. Bytes that are due do not wait
                    // for it.
                    Some(deliver_at) if deliver_at <= Instant::now() => {}
                    Some(deliver_at) => sleep_until(deliver_at).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                biased;
                changed = modes.changed() => {
                    changed.map_err(|_| Cut::Close)?;
                    mode = *modes.borrow_and_update();
                    self.apply_mode(mode).await?;
                }
                () = due => self.deliver_first().await?,
                read = from.read(&mut buffer), if !at_end && !held && has_capacity => {
                    // A reset by the server reaches the client as a reset.
                    let bytes = &buffer[..read.map_err(|_| Cut::Reset)?];
                    if bytes.is_empty() {
                        at_end = true;
                    } else {
                        // The mode may have changed since this iteration began, and the sender may
                        // have sent these bytes after that.
                        if modes.has_changed().map_err(|_| Cut::Close)? {
                            mode = *modes.borrow_and_update();
                            self.apply_mode(mode).await?;
                        }
                        self.receive(mode, bytes).await?;
                    }
                }
            }
        }
    }

    /// Returns whether the mode holds bytes in this direction.
    fn holds_bytes(&self, mode: ProxyMode) -> bool {
        match self.direction {
            Direction::Requests => mode == ProxyMode::BlackHole,
            Direction::Replies => matches!(mode, ProxyMode::BlackHole | ProxyMode::HoldReplies),
        }
    }

    /// Applies the immediate effects of a new mode.
    async fn apply_mode(&mut self, mode: ProxyMode) -> Result<(), Cut> {
        if !matches!(mode, ProxyMode::Delay(_) | ProxyMode::Throttle { .. }) {
            let now = Instant::now();
            self.last_deliver_at = now;
            self.queue.iter_mut().for_each(|(deliver_at, _)| *deliver_at = now);
        }
        if self.direction == Direction::Replies {
            if self.has_gap && mode != ProxyMode::DropReplies {
                return Err(Cut::Reset);
            }
            match mode {
                ProxyMode::CutAfter { reply_bytes } => self.bytes_left = reply_bytes,
                ProxyMode::HalfClose if !self.ended => {
                    self.ended = true;
                    self.queue.clear();
                    self.queued_bytes = 0;
                    self.to.shutdown().await.map_err(|_| Cut::Close)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Queues, delivers, discards or withholds the bytes that the sender sent.
    async fn receive(&mut self, mode: ProxyMode, bytes: &[u8]) -> Result<(), Cut> {
        if self.direction == Direction::Requests
            && self.shared.withhold_next.swap(false, Ordering::SeqCst)
        {
            let mut withheld = self.state.withheld.lock().unwrap_or_else(PoisonError::into_inner);
            *withheld = Some(bytes.to_vec());
            return Err(Cut::Reset);
        }
        if self.direction == Direction::Replies {
            self.state.awaits_reply.store(false, Ordering::Relaxed);
            match mode {
                _ if self.ended => {
                    self.discard(bytes);
                    return Ok(());
                }
                ProxyMode::DropReplies => {
                    self.has_gap = true;
                    self.discard(bytes);
                    return Ok(());
                }
                ProxyMode::ResetAfterRequest => {
                    self.discard(bytes);
                    return Err(Cut::Reset);
                }
                ProxyMode::CutAfter { .. } => return self.deliver_allowed(bytes).await,
                _ => {}
            }
        }
        match mode {
            ProxyMode::Delay(delay) => self.enqueue(Instant::now() + delay, bytes),
            ProxyMode::Throttle { bytes_per_second } => {
                let rate = f64::from(bytes_per_second.max(1));
                let piece_bytes = (rate * THROTTLE_PIECE_SECS).max(1.0) as usize;
                for piece in bytes.chunks(piece_bytes) {
                    let transfer_time = Duration::from_secs_f64(piece.len() as f64 / rate);
                    let begins = self.last_deliver_at.max(Instant::now());
                    self.enqueue(begins + transfer_time, piece);
                }
            }
            _ => self.enqueue(Instant::now(), bytes),
        }
        Ok(())
    }

    fn enqueue(&mut self, deliver_at: Instant, bytes: &[u8]) {
        self.last_deliver_at = self.last_deliver_at.max(deliver_at);
        self.queued_bytes += bytes.len();
        self.queue.push_back((self.last_deliver_at, bytes.to_vec()));
    }

    fn discard(&self, bytes: &[u8]) {
        self.shared.count(|counts| counts.reply_bytes_lost += bytes.len() as u64);
    }

    async fn deliver_first(&mut self) -> Result<(), Cut> {
        let Some((_, bytes)) = self.queue.pop_front() else { return Ok(()) };
        self.queued_bytes -= bytes.len();
        self.deliver(&bytes).await
    }

    async fn deliver(&mut self, bytes: &[u8]) -> Result<(), Cut> {
        let written: io::Result<()> = self.to.write_all(bytes).await;
        written.map_err(|_| match self.direction {
            Direction::Requests => Cut::Reset,
            Direction::Replies => Cut::Close,
        })?;
        let length = bytes.len() as u64;
        match self.direction {
            Direction::Requests => {
                let first = !self.state.awaits_reply.swap(true, Ordering::Relaxed);
                self.shared.count(|counts| {
                    counts.requests += u64::from(first);
                    counts.request_bytes += length;
                });
            }
            Direction::Replies => self.shared.count(|counts| counts.reply_bytes += length),
        }
        Ok(())
    }

    /// Delivers the bytes that [`ProxyMode::CutAfter`] still allows, after all queued bytes.
    async fn deliver_allowed(&mut self, bytes: &[u8]) -> Result<(), Cut> {
        while !self.queue.is_empty() {
            self.deliver_first().await?;
        }
        let allowed = bytes.len().min(usize::try_from(self.bytes_left).unwrap_or(usize::MAX));
        let (allowed, rest) = bytes.split_at(allowed);
        self.deliver(allowed).await?;
        self.discard(rest);
        self.bytes_left -= allowed.len() as u64;
        if self.bytes_left == 0 { Err(Cut::Close) } else { Ok(()) }
    }

    /// Passes the end of the stream on.
    async fn finish(
        &mut self,
        mode: ProxyMode,
        modes: &mut watch::Receiver<ProxyMode>,
    ) -> Result<(), Cut> {
        match self.direction {
            Direction::Requests => self.state.client_done.notify_one(),
            Direction::Replies if mode == ProxyMode::DropReplies => {
                // The server's end of stream is discarded like its other bytes.
                tokio::select! {
                    () = self.state.client_done.notified() => return Ok(()),
                    _ = modes.changed() => return Err(Cut::Reset),
                }
            }
            Direction::Replies => {}
        }
        if !self.ended {
            self.ended = true;
            // A failure means that the receiver has already disconnected.
            _ = self.to.shutdown().await;
        }
        Ok(())
    }
}
