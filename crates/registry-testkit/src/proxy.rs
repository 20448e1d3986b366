//! A TCP proxy that causes the connection faults of networks and crashing servers. It parses no
//! protocol: it counts, delays and discards bytes.
//!
//! `connection` carries one connection. This file accepts connections and controls them.

mod connection;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::eventually::TimeoutError;
use crate::ports::Port;

/// The proxy's behaviour for existing and new connections.
///
/// No mode leaves a gap in a stream, because no network does. A connection that lost reply bytes
/// never delivers later ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ProxyMode {
    /// Carries everything.
    #[default]
    Pass,
    /// Carries everything with this delay in each direction. The delay adds latency and does not
    /// limit the rate.
    Delay(Duration),
    /// Carries this many bytes per second for each connection and direction.
    Throttle {
        /// The rate, at least 1.
        bytes_per_second: u32,
    },
    /// Accepts connections and carries nothing in either direction, like a firewall that drops
    /// packets. The bytes are carried once the mode changes.
    BlackHole,
    /// Carries requests and holds the replies until the mode changes.
    HoldReplies,
    /// Carries requests and discards the replies. A connection that lost reply bytes is reset when
    /// the mode changes.
    DropReplies,
    /// Carries requests. On the first byte of a reply, which proves that the server acted, the
    /// proxy resets the client's connection instead of delivering the byte.
    ResetAfterRequest,
    /// Carries requests and the given number of reply bytes, then closes the connection. Each
    /// connection counts from the mode change, or from its own start if that is later.
    CutAfter {
        /// The number of reply bytes to deliver. With zero, the connection closes as soon as a
        /// reply arrives.
        reply_bytes: u64,
    },
    /// Ends the stream to the client and continues to carry its requests. A later mode does not
    /// reopen the stream.
    HalfClose,
    /// Refuses new connections, like a port without a listener. Existing connections continue; see
    /// [`FaultProxy::cut_all`].
    Refuse,
}

/// The traffic of a [`FaultProxy`] since it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counts {
    /// Accepted connections.
    pub accepted: u64,
    /// Open connections.
    pub live: u64,
    /// Connections that the proxy ended with a reset: because of its mode, [`FaultProxy::cut_all`]
    /// or a withheld request, or after any connection error except a failed write to the client.
    pub reset: u64,
    /// Requests passed to the server, counted as runs of client bytes without a server byte between
    /// them. Exact for a client that waits for each reply, too low for a client that pipelines.
    pub requests: u64,
    /// Bytes passed to the server.
    pub request_bytes: u64,
    /// Bytes passed to clients.
    pub reply_bytes: u64,
    /// Bytes from the server that were discarded when they arrived. Queued bytes of a connection
    /// that ends are not counted.
    pub reply_bytes_lost: u64,
}

/// A TCP proxy in front of one server. Dropping this handle ends the proxy and all its connections.
///
/// A mode that is set before a client sends bytes applies to these bytes without a race.
#[derive(Debug)]
pub struct FaultProxy {
    port: Arc<Port>,
    shared: Arc<ProxyState>,
    _tasks: JoinSet<()>,
}

#[derive(Debug)]
struct ProxyState {
    target: SocketAddr,
    mode: watch::Sender<ProxyMode>,
    counts: watch::Sender<Counts>,
    listening: watch::Sender<ProxyListenerState>,
    /// Notifies connections to reset. Each connection holds a receiver until it has ended.
    cut: Mutex<watch::Sender<()>>,
    /// Notifies connections to stop carrying bytes.
    silenced: watch::Sender<()>,
    /// Whether to withhold the next request.
    withhold_next: AtomicBool,
    withheld: Mutex<Vec<WithheldRequest>>,
}

/// A request that was read from its client and not sent to its server, with the connection to the
/// server.
#[derive(Debug)]
struct WithheldRequest {
    server: TcpStream,
    bytes: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum ProxyListenerState {
    Open,
    Closed,
    Failed(String),
}

impl FaultProxy {
    /// Starts a proxy in front of `target`, on a free loopback port, in [`ProxyMode::Pass`].
    ///
    /// # Panics
    /// Panics outside a tokio runtime with I/O and time enabled.
    pub fn start(target: SocketAddr) -> io::Result<Self> {
        let port = Arc::new(Port::reserve()?);
        let listener = port.listen()?;
        let shared = Arc::new(ProxyState {
            target,
            mode: watch::Sender::default(),
            counts: watch::Sender::default(),
            listening: watch::Sender::new(ProxyListenerState::Open),
            cut: Mutex::default(),
            silenced: watch::Sender::default(),
            withhold_next: AtomicBool::new(false),
            withheld: Mutex::default(),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(Arc::clone(&port), listener, Arc::clone(&shared)));
        Ok(Self { port, shared, _tasks: tasks })
    }

    /// Returns the address for clients.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Returns the current mode.
    #[must_use]
    pub fn mode(&self) -> ProxyMode {
        *self.shared.mode.borrow()
    }

    /// Changes the mode. Everything that a client sends or opens after this returns is subject to
    /// the new mode.
    ///
    /// # Cancel safety
    /// The first poll changes the mode. Dropping the future only ends the wait until the port
    /// refuses or listens.
    pub async fn set_mode(&self, mode: ProxyMode) -> io::Result<()> {
        self.shared.mode.send_replace(mode);
        let mut listening = self.shared.listening.subscribe();
        let settled = listening.wait_for(|listening| match listening {
            ProxyListenerState::Failed(_) => true,
            // Another task may have changed the mode since.
            ProxyListenerState::Open => self.mode() != ProxyMode::Refuse,
            ProxyListenerState::Closed => self.mode() == ProxyMode::Refuse,
        });
        match settled.await.as_deref() {
            Ok(ProxyListenerState::Failed(problem)) => Err(io::Error::other(problem.clone())),
            // `self` owns the sender, so the wait cannot fail.
            Ok(ProxyListenerState::Open | ProxyListenerState::Closed) | Err(_) => Ok(()),
        }
    }

    /// Resets all open connections and returns once they have ended. New connections are
    /// unaffected.
    ///
    /// # Cancel safety
    /// The first poll notifies the connections. Dropping the future only ends the wait for their
    /// end.
    pub async fn cut_all(&self) {
        let old = {
            let mut cut = self.shared.cut.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *cut)
        };
        // Sending fails only if there are no open connections.
        _ = old.send(());
        old.closed().await;
    }

    /// Makes all open connections half-open: they stay connected and carry nothing in either
    /// direction until they are [cut](Self::cut_all). New connections are unaffected.
    pub fn silence_connections(&self) {
        self.shared.silenced.send_replace(());
    }

    /// Withholds the next request of any connection and resets the connection of its client. Later
    /// requests are unaffected.
    ///
    /// A request is the result of one read by the proxy, so the client must write it in one piece.
    pub fn withhold_next_request(&self) {
        self.shared.withhold_next.store(true, Ordering::SeqCst);
    }

    /// Passes the withheld requests to the server, waits for the first byte of each reply, and
    /// closes their connections. Returns the number of requests, which are not in the counts.
    ///
    /// # Cancel safety
    /// Requests that were not passed on yet are lost with the future. An error loses them as well.
    pub async fn deliver_withheld(&self) -> io::Result<usize> {
        let withheld = std::mem::take(
            &mut *self.shared.withheld.lock().unwrap_or_else(PoisonError::into_inner),
        );
        let count = withheld.len();
        for WithheldRequest { mut server, bytes } in withheld {
            server.write_all(&bytes).await?;
            server.read_u8().await?;
        }
        Ok(count)
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        *self.shared.counts.borrow()
    }

    /// Waits until `predicate` returns true for the counts, and returns them.
    ///
    /// # Errors
    /// Returns [`TimeoutError`], with the counts, if `limit` expires.
    pub async fn until(
        &self,
        limit: Duration,
        predicate: impl FnMut(&Counts) -> bool,
    ) -> Result<Counts, TimeoutError> {
        let mut counts = self.shared.counts.subscribe();
        match timeout(limit, counts.wait_for(predicate)).await {
            Ok(Ok(found)) => Ok(*found),
            Ok(Err(_)) | Err(_) => {
                let seen = self.counts();
                Err(TimeoutError::new(format!("the proxy still has {seen:?} after {limit:?}")))
            }
        }
    }
}

impl ProxyState {
    fn count(&self, change: impl FnOnce(&mut Counts)) {
        self.counts.send_modify(change);
    }
}

async fn accept(port: Arc<Port>, listener: TcpListener, shared: Arc<ProxyState>) {
    let mut modes = shared.mode.subscribe();
    let mut connections = JoinSet::new();
    let mut listener = Some(listener);
    loop {
        let refuses = *modes.borrow_and_update() == ProxyMode::Refuse;
        let listening = match (refuses, &listener) {
            (true, _) => {
                listener = None;
                ProxyListenerState::Closed
            }
            (false, Some(_)) => ProxyListenerState::Open,
            (false, None) => match port.listen() {
                Ok(again) => {
                    listener = Some(again);
                    ProxyListenerState::Open
                }
                Err(error) => ProxyListenerState::Failed(error.to_string()),
            },
        };
        shared.listening.send_replace(listening);
        let incoming = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            changed = modes.changed() => if changed.is_err() { return },
            // Without this branch, finished connections would accumulate in a long test.
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            accepted = incoming => {
                // A connection that was closed before `accept` is not counted.
                let Ok((client, _)) = accepted else { continue };
                let cut = shared.cut.lock().unwrap_or_else(PoisonError::into_inner).subscribe();
                let silenced = shared.silenced.subscribe();
                shared.count(|counts| {
                    counts.accepted += 1;
                    counts.live += 1;
                });
                connections.spawn(connection::serve(client, Arc::clone(&shared), cut, silenced));
            }
        }
    }
}
