//! A resource that compares fencing tokens, in the test's process. The work of jobs and of leaders
//! runs in other processes and writes to the resource over TCP. The resource refuses outdated
//! tokens and records violations.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lock_registry::FencingToken;
use registry_testkit::history::host_clock;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufStream, Lines};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// A message from the work of a job or a leader. The resource accepts or refuses it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Write {
    pub(crate) key: String,
    pub(crate) token: FencingToken,
    pub(crate) step: Step,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Step {
    /// The work was called at this time of the host's clock, in this process.
    Begin { at: u64, process: u32, tick: Option<u64> },
    /// The guard was valid at some time between these two.
    Valid { from: u64, to: u64 },
    /// The work has ended.
    End,
    /// The engine has reported that this tick is recorded.
    Recorded(u64),
    /// The work has observed something that must not happen.
    Violation(String),
}

/// The connection of one run of the work to the resource. The resource counts the work as running
/// until it receives [`Step::End`] or the connection is closed.
pub(crate) struct Work {
    stream: Lines<BufStream<TcpStream>>,
    key: String,
    token: FencingToken,
}

impl Work {
    pub(crate) async fn connect(resource: SocketAddr, key: &str, token: FencingToken) -> Self {
        let stream = TcpStream::connect(resource).await.expect("the test lives");
        stream.set_nodelay(true).unwrap();
        Self { stream: BufStream::new(stream).lines(), key: key.to_owned(), token }
    }

    /// Returns whether the resource has accepted the write.
    pub(crate) async fn write(&mut self, step: Step) -> bool {
        let write = Write { key: self.key.clone(), token: self.token, step };
        let line = serde_json::to_string(&write).unwrap() + "\n";
        let stream = self.stream.get_mut();
        stream.write_all(line.as_bytes()).await.expect("the test lives");
        stream.flush().await.expect("the test lives");
        let reply = self.stream.next_line().await.expect("the test lives");
        serde_json::from_str(&reply.expect("the test lives")).unwrap()
    }
}

/// The work that runs under a key.
#[derive(Debug, Clone, Copy)]
struct Running {
    connection: u64,
    process: u32,
    token: FencingToken,
    begin: u64,
}

/// What the resource knows about a key.
#[derive(Debug, Default)]
pub(crate) struct KeyState {
    last: Option<FencingToken>,
    running: Option<Running>,
    /// For each token: its guard was valid at some time no later than the first value, and at some
    /// time no earlier than the second.
    valid: BTreeMap<FencingToken, (u64, u64)>,
    begun: usize,
    /// The ticks whose work has ended.
    pub(crate) finished: BTreeSet<u64>,
    recorded: BTreeSet<u64>,
}

impl KeyState {
    fn begin(&mut self, begun: Running, tick: Option<u64>, lease: Duration) -> Result<(), String> {
        self.begun += 1;
        if let Some(tick) = tick {
            if let Some(recorded) = self.recorded.last().filter(|recorded| **recorded >= tick) {
                return Err(format!("tick {tick} begins after {recorded} was recorded"));
            }
        } else if self.valid.contains_key(&begun.token) {
            return Err(format!("{} has two terms", begun.token));
        }
        let earlier = self.running.replace(begun);
        // Within half a lease, the earlier lease has not expired, so the earlier work must have
        // ended. Later, the earlier work may be that of a stalled process.
        match earlier.filter(|_| tick.is_some()) {
            Some(earlier)
                if Duration::from_nanos(begun.begin.saturating_sub(earlier.begin)) < lease / 2 =>
            {
                Err(format!("{begun:?} begins while {earlier:?} runs"))
            }
            _ => Ok(()),
        }
    }

    /// Checks that no guard was valid after a guard with a larger token was valid.
    fn valid(&mut self, token: FencingToken, from: u64, to: u64) -> Result<(), String> {
        let (first, last) = self.valid.entry(token).or_insert((to, from));
        (*first, *last) = (to.min(*first), from.max(*last));
        let overlapping = self.valid.iter().find(|(other, (other_first, other_last))| {
            **other < token && *other_last > to || **other > token && *other_first < from
        });
        match overlapping {
            Some((other, times)) => {
                Err(format!("{token} is valid in {from}..{to}, and {other} in {times:?}"))
            }
            None => Ok(()),
        }
    }
}

#[derive(Debug, Default)]
struct State {
    keys: BTreeMap<String, KeyState>,
    violations: Vec<String>,
    refused: usize,
}

impl State {
    fn apply(&mut self, write: Write, connection: u64, lease: Duration) -> bool {
        let Write { key, token, step } = write;
        let state = self.keys.entry(key.clone()).or_default();
        if let Step::Violation(text) = step {
            self.violations.push(format!("{key}: {text}, under {token}"));
            return true;
        }
        if let Step::Recorded(tick) = step {
            if !state.recorded.insert(tick) {
                self.violations.push(format!("{key}: tick {tick} is recorded twice"));
            }
            return true;
        }
        if state.last > Some(token) {
            self.refused += 1;
            return false;
        }
        state.last = Some(token);
        let judged = match step {
            Step::Begin { at, process, tick } => {
                let begun = Running { connection, process, token, begin: at };
                state.begin(begun, tick, lease)
            }
            Step::Valid { from, to } => state.valid(token, from, to),
            _ => Ok(()),
        };
        self.violations.extend(judged.err().map(|text| format!("{key}: {text}")));
        true
    }

    fn end(&mut self, connection: u64) {
        for state in self.keys.values_mut() {
            state.running.take_if(|running| running.connection == connection);
        }
    }
}

/// The resource. Dropping it ends its connections.
pub(crate) struct Resource {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
    changes: watch::Receiver<()>,
    _server: JoinSet<()>,
}

impl Resource {
    pub(crate) async fn start(lease: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::<Mutex<State>>::default();
        let (changed, changes) = watch::channel(());
        let (served, changed) = (Arc::clone(&state), Arc::new(changed));
        let mut server = JoinSet::new();
        server.spawn(async move {
            let mut connections = JoinSet::new();
            for connection in 0.. {
                let (stream, _) = listener.accept().await.unwrap();
                let (state, changed) = (Arc::clone(&served), Arc::clone(&changed));
                connections.spawn(async move {
                    serve(stream, connection, &state, &changed, lease).await;
                    state.lock().unwrap().end(connection);
                    changed.send_replace(());
                });
            }
        });
        Self { address, state, changes, _server: server }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Waits until work has begun `number` times. Panics at the first violation.
    pub(crate) async fn wait_until_begun(&self, number: usize, limit: Duration) {
        let mut changes = self.changes.clone();
        let wait = async {
            loop {
                changes.borrow_and_update();
                self.assert_no_violation();
                if self.begun() >= number {
                    return;
                }
                changes.changed().await.unwrap();
            }
        };
        if timeout(limit, wait).await.is_err() {
            panic!("work has not begun {number} times within {limit:?}: {:#?}", self.state());
        }
    }

    pub(crate) fn assert_no_violation(&self) {
        let violations = self.state().violations.clone();
        assert!(violations.is_empty(), "{violations:#?}");
    }

    /// Returns how often work has begun.
    pub(crate) fn begun(&self) -> usize {
        self.state().keys.values().map(|state| state.begun).sum()
    }

    /// Returns the number of refused writes.
    pub(crate) fn refused(&self) -> usize {
        self.state().refused
    }

    /// Waits until the work of this key runs, and returns its process. `None` after the limit.
    pub(crate) async fn wait_for_work(&self, key: &str, limit: Duration) -> Option<u32> {
        let mut changes = self.changes.clone();
        let wait = async {
            loop {
                changes.borrow_and_update();
                if let Some(process) = self.process(key) {
                    return process;
                }
                changes.changed().await.unwrap();
            }
        };
        timeout(limit, wait).await.ok()
    }

    /// Returns the process in which the work of this key runs.
    pub(crate) fn process(&self, key: &str) -> Option<u32> {
        self.state().keys.get(key)?.running.map(|running| running.process)
    }

    pub(crate) fn finished(&self, key: &str) -> BTreeSet<u64> {
        self.state().keys.get(key).map(|state| state.finished.clone()).unwrap_or_default()
    }
}

/// Serves one connection, until the client closes it or is killed.
async fn serve(
    stream: TcpStream,
    connection: u64,
    state: &Mutex<State>,
    changed: &watch::Sender<()>,
    lease: Duration,
) {
    _ = stream.set_nodelay(true);
    let mut tick_of_work = None;
    let mut lines = BufStream::new(stream).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // A killed process may have sent an incomplete line.
        let Ok(write) = serde_json::from_str::<Write>(&line) else { return };
        let accepted = {
            let mut state = state.lock().unwrap();
            let (key, step) = (write.key.clone(), write.step.clone());
            let accepted = state.apply(write, connection, lease);
            match step {
                Step::Begin { tick, .. } => tick_of_work = tick,
                Step::End if accepted => {
                    let finished = tick_of_work.take();
                    state.keys.entry(key).or_default().finished.extend(finished);
                    state.end(connection);
                }
                _ => {}
            }
            accepted
        };
        changed.send_replace(());
        let stream = lines.get_mut();
        let reply = format!("{accepted}\n");
        if stream.write_all(reply.as_bytes()).await.is_err() || stream.flush().await.is_err() {
            return;
        }
    }
}

/// Returns the time on the clock of [`Step::Begin`] and [`Step::Valid`].
pub(crate) fn now() -> u64 {
    host_clock()()
}
