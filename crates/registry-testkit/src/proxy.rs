//! A TCP proxy that does to connections what networks and dying servers do to them. It knows no protocol: it counts
//! and spoils bytes.
//!
//! `connection` carries one connection, this file accepts them and holds the strings.

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

use crate::eventually::NotInTime;
use crate::ports::Port;

/// What the proxy does to connections, living and new ones alike.
///
/// No mode makes a gap in a stream, because no network does: a connection that lost reply bytes never
/// delivers later ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mode {
    /// Carries everything.
    #[default]
    Pass,
    /// Carries everything this much later, in each direction. Latency, not rate: bytes on their way overlap.
    Delay(Duration),
    /// Carries this many bytes per second and connection, in each direction.
    Throttle {
        /// The rate; at least one.
        bytes_per_second: u32,
    },
    /// Accepts and says nothing, in neither direction. As behind a silent firewall, bytes wait and are carried when the
    /// mode changes.
    BlackHole,
    /// Carries requests and keeps the replies waiting until the mode changes: then they arrive late.
    HoldReplies,
    /// Carries requests and loses the replies. A connection that lost any is reset when the mode changes.
    DropReplies,
    /// Carries requests. The first byte of a reply proves that the server acted; then the client gets a reset instead.
    ResetAfterRequest,
    /// Carries requests and the next so many bytes of replies, counted for each connection from now on; then it closes.
    CutAfter {
        /// How many bytes still arrive. With zero, the connection closes as soon as a reply comes.
        reply_bytes: u64,
    },
    /// Ends the stream to the client and goes on carrying its requests. The client's end of stream is final.
    HalfClose,
    /// Refuses new connections, as a port on which nobody listens. Living ones go on; see [`FaultProxy::cut_all`].
    Refuse,
}

/// What went through a [`FaultProxy`] since it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counts {
    /// Connections that were accepted.
    pub accepted: u64,
    /// Connections that live.
    pub live: u64,
    /// Connections that ended with a reset, whether by the mode or by the server.
    pub reset: u64,
    /// Requests that were handed to the server: runs of client bytes with no server byte between them. Exact for a client that
    /// waits for each reply, too few for one that pipelines.
    pub requests: u64,
    /// Bytes that were handed to the server.
    pub request_bytes: u64,
    /// Bytes that were handed to clients.
    pub reply_bytes: u64,
    /// Bytes from the server that were thrown away.
    pub reply_bytes_lost: u64,
}

/// A TCP proxy in front of one server. It and all its connections end with this handle.
///
/// A mode that was set before a client sends is applied to what the client sends, without a race.
#[derive(Debug)]
pub struct FaultProxy {
    port: Arc<Port>,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

#[derive(Debug)]
struct Shared {
    target: SocketAddr,
    mode: watch::Sender<Mode>,
    counts: watch::Sender<Counts>,
    listening: watch::Sender<Listening>,
    /// Told to the connections that shall be cut; each of them holds a receiver until it has ended.
    cut: Mutex<watch::Sender<()>>,
    /// Told to the connections that shall carry nothing more.
    silenced: watch::Sender<()>,
    /// The next request is to be stranded.
    strand_next: AtomicBool,
    stranded: Mutex<Vec<Stranded>>,
}

/// A request that has left its client and not reached its server, and the connection that it is for.
#[derive(Debug)]
struct Stranded {
    server: TcpStream,
    bytes: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Listening {
    Yes,
    No,
    Failed(String),
}

impl FaultProxy {
    /// Starts a proxy in front of `target`, on a free loopback port, in [`Mode::Pass`].
    ///
    /// # Errors
    /// The operating system's, when there is no port to listen on.
    ///
    /// # Panics
    /// Outside a tokio runtime with I/O and time enabled.
    pub fn start(target: SocketAddr) -> io::Result<Self> {
        let port = Arc::new(Port::reserve()?);
        let listener = port.listen()?;
        let shared = Arc::new(Shared {
            target,
            mode: watch::Sender::default(),
            counts: watch::Sender::default(),
            listening: watch::Sender::new(Listening::Yes),
            cut: Mutex::default(),
            silenced: watch::Sender::default(),
            strand_next: AtomicBool::new(false),
            stranded: Mutex::default(),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(Arc::clone(&port), listener, Arc::clone(&shared)));
        Ok(Self { port, shared, _tasks: tasks })
    }

    /// Where clients connect to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// What the proxy does at present.
    #[must_use]
    pub fn mode(&self) -> Mode {
        *self.shared.mode.borrow()
    }

    /// Changes what the proxy does. Whatever a client sends or opens after this has returned meets the new mode.
    ///
    /// # Errors
    /// The operating system's, when listening again after [`Mode::Refuse`] fails.
    ///
    /// # Cancel safety
    /// The mode is changed at the first poll; a dropped future only does not wait until the port refuses or listens.
    pub async fn set_mode(&self, mode: Mode) -> io::Result<()> {
        self.shared.mode.send_replace(mode);
        let mut listening = self.shared.listening.subscribe();
        let settled = listening.wait_for(|listening| match listening {
            Listening::Failed(_) => true,
            // Another task may have changed the mode since.
            Listening::Yes => self.mode() != Mode::Refuse,
            Listening::No => self.mode() == Mode::Refuse,
        });
        match settled.await.as_deref() {
            Ok(Listening::Failed(problem)) => Err(io::Error::other(problem.clone())),
            // The sender is our own, so the wait does not fail.
            Ok(Listening::Yes | Listening::No) | Err(_) => Ok(()),
        }
    }

    /// Resets all living connections, and returns when they have ended. New ones are not touched.
    ///
    /// # Cancel safety
    /// The connections are told at the first poll; a dropped future only does not wait for their end.
    pub async fn cut_all(&self) {
        let old = {
            let mut cut = self.shared.cut.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *cut)
        };
        // Without living connections there is nobody to tell.
        _ = old.send(());
        old.closed().await;
    }

    /// Makes all living connections half open: they stay connected and carry nothing more, in neither direction, until they
    /// are [cut](Self::cut_all). New ones are not touched.
    pub fn silence_living(&self) {
        self.shared.silenced.send_replace(());
    }

    /// Keeps the next request of any connection on its way, and resets its client. Later requests are not touched.
    ///
    /// A request is what one read of the proxy returns, so the client must write it at once.
    pub fn strand_next_request(&self) {
        self.shared.strand_next.store(true, Ordering::SeqCst);
    }

    /// Hands the stranded requests to the server, waits for the first byte of each reply, and closes their connections.
    /// Returns how many there were.
    ///
    /// # Errors
    /// The operating system's, when the server does not take a request.
    ///
    /// # Cancel safety
    /// A request that was not handed over yet is lost with the future.
    pub async fn deliver_stranded(&self) -> io::Result<usize> {
        let stranded = std::mem::take(
            &mut *self.shared.stranded.lock().unwrap_or_else(PoisonError::into_inner),
        );
        let count = stranded.len();
        for Stranded { mut server, bytes } in stranded {
            server.write_all(&bytes).await?;
            server.read_u8().await?;
        }
        Ok(count)
    }

    /// What went through so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        *self.shared.counts.borrow()
    }

    /// Waits until the counts are such, instead of sleeping until they should be.
    ///
    /// # Errors
    /// [`NotInTime`], with the counts, when `limit` is over.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn until(
        &self,
        limit: Duration,
        such: impl FnMut(&Counts) -> bool,
    ) -> Result<Counts, NotInTime> {
        let mut counts = self.shared.counts.subscribe();
        match timeout(limit, counts.wait_for(such)).await {
            Ok(Ok(found)) => Ok(*found),
            Ok(Err(_)) | Err(_) => {
                let seen = self.counts();
                Err(NotInTime::new(format!("the proxy still has {seen:?} after {limit:?}")))
            }
        }
    }
}

impl Shared {
    fn count(&self, change: impl FnOnce(&mut Counts)) {
        self.counts.send_modify(change);
    }
}

async fn accept(port: Arc<Port>, listener: TcpListener, shared: Arc<Shared>) {
    let mut modes = shared.mode.subscribe();
    let mut connections = JoinSet::new();
    let mut listener = Some(listener);
    loop {
        let refuses = *modes.borrow_and_update() == Mode::Refuse;
        let listening = match (refuses, &listener) {
            (true, _) => {
                listener = None;
                Listening::No
            }
            (false, Some(_)) => Listening::Yes,
            (false, None) => match port.listen() {
                Ok(again) => {
                    listener = Some(again);
                    Listening::Yes
                }
                Err(error) => Listening::Failed(error.to_string()),
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
            // Ended connections are taken out, so that a long test does not pile them up.
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            accepted = incoming => {
                // A connection that is gone before it was accepted is none.
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
