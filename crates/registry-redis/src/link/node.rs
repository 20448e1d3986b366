//! One server that holds locks: its command connections and its subscriber connection.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::{Cmd, PushInfo, PushKind, RedisResult, Value};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::config::{Durability, RedisConfig};
use crate::ears::{Ears, Hearing};
use crate::link::wire::{Dialled, Ended, Wire, is_end, is_unknown_script};
use crate::rumours::Rumours;
use crate::script::Call;

/// Opens a connection to the server. The argument receives the server's push messages.
pub(crate) type Dial = Arc<dyn Fn(Pushes) -> Dialled + Send + Sync>;

/// Receives push messages.
pub(crate) type Pushes = Arc<dyn Fn(PushInfo) + Send + Sync>;

pub(crate) struct Node {
    name: String,
    commands: Arc<Wire>,
    reconnecting: JoinHandle<()>,
    renewed_at: Mutex<Option<Instant>>,
    /// Connections for scripts that wait for replicas or disks. `WAIT` blocks all later commands on
    /// its connection.
    durable: Vec<Wire>,
    next_durable: AtomicUsize,
    durability: Durability,
    pub(crate) ears: Ears,
    rumours: Rumours,
}

impl Node {
    /// Creates the node that `dial` reaches; `name` appears in messages.
    pub(crate) fn new(
        name: String,
        dial: Dial,
        config: &RedisConfig,
        hearing: Hearing,
        rumours: &Rumours,
    ) -> Self {
        let lost = Arc::new(Notify::new());
        let silence = SILENCE.min(config.response_timeout);
        let wire = |silence| {
            let (dial, rumours, deaf) = (Arc::clone(&dial), rumours.clone(), rumours.clone());
            let (lost, given_up) = (Arc::clone(&lost), Arc::clone(&lost));
            Wire::new(
                move |ended| tracking(Arc::clone(&dial), rumours.clone(), ended, Arc::clone(&lost)),
                // Invalidations are missed from now on.
                move || {
                    deaf.spread_all();
                    given_up.notify_one();
                },
                silence,
            )
        };
        let commands = Arc::new(wire(silence));
        let reconnecting =
            tokio::spawn(reconnect(Arc::clone(&commands), rumours.clone(), Arc::clone(&lost)));
        let wires = if config.durability.is_wanted() { DURABLE_WIRES } else { 0 };
        Self {
            name,
            commands,
            reconnecting,
            renewed_at: Mutex::default(),
            // The server may take this long to wait for its replicas.
            durable: (0..wires).map(|_| wire(silence + config.durability.limit)).collect(),
            next_durable: AtomicUsize::new(0),
            durability: config.durability,
            ears: Ears::new(Arc::clone(&dial), hearing),
            rumours: rumours.clone(),
        }
    }

    /// Returns the server's address, for messages.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Connects, unless it is connected.
    pub(crate) async fn connect(&self) -> RedisResult<()> {
        self.commands.connect().await
    }

    /// Replaces all connections, because another server has taken the place of this one.
    pub(crate) fn renew(&self) {
        self.commands.renew();
        for wire in &self.durable {
            wire.renew();
        }
        self.ears.renew();
        // Locks that the new server does not have are lost. It sends no invalidations for the
        // others until it is asked to track them.
        self.rumours.spread_all();
    }

    /// Calls [`renew`](Self::renew) unless that happened within the last second: the name then
    /// still leads to a replica.
    pub(crate) fn renew_seldom(&self) {
        let now = Instant::now();
        {
            let mut renewed_at = self.renewed_at.lock().unwrap_or_else(PoisonError::into_inner);
            if renewed_at.is_some_and(|at| now.duration_since(at) < RENEWALS_APART) {
                return;
            }
            *renewed_at = Some(now);
        }
        self.renew();
    }

    /// Sends a command.
    pub(crate) async fn ask(&self, command: &Cmd) -> RedisResult<Value> {
        self.commands.send(command).await
    }

    /// Runs a script. `asking`: the slot of its keys is still migrating to this server.
    pub(crate) async fn run(&self, call: &Call<'_>, asking: bool) -> RedisResult<Value> {
        let preface = self.preface(call, asking);
        if preface.is_none() {
            return self.commands.run(call).await;
        }
        let mut answers = self.run_among(&self.commands, call, preface, None).await?;
        answers.swap_remove(1).extract_error()
    }

    /// Returns the command that must precede a script. `ASKING` and `CLIENT CACHING` both apply to
    /// the very next command, so only one of them is possible. While a slot migrates, its locks are
    /// therefore not tracked, and are verified at short intervals instead.
    fn preface(&self, call: &Call<'_>, asking: bool) -> Option<Preface> {
        if asking {
            if call.watches() {
                self.rumours.spread_soon(call.keys());
            }
            return Some(Preface::Asking);
        }
        (call.watches() && self.rumours.are_told()).then_some(Preface::Watching)
    }

    /// Runs a script between other commands. Returns their responses in order.
    async fn run_among(
        &self,
        wire: &Wire,
        call: &Call<'_>,
        preface: Option<Preface>,
        then: Option<Cmd>,
    ) -> RedisResult<Vec<Value>> {
        let all = |command: &Cmd| {
            let mut all = redis::pipe();
            match preface {
                Some(Preface::Asking) => drop(all.cmd("ASKING")),
                Some(Preface::Watching) => drop(all.cmd("CLIENT").arg("CACHING").arg("YES")),
                None => {}
            }
            all.add_command(command.clone());
            if let Some(then) = &then {
                all.add_command(then.clone());
            }
            all
        };
        let at = usize::from(preface.is_some());
        let count = at + 1 + usize::from(then.is_some());
        let mut answers = wire.send_all(&all(call.known())).await?;
        if answers.get(at).is_some_and(is_from_unknown_script) {
            answers = wire.send_all(&all(&call.unknown())).await?;
        }
        if answers.len() != count {
            return Err((redis::ErrorKind::UnexpectedReturnType, "an answer is missing").into());
        }
        if preface == Some(Preface::Watching)
            && matches!(answers.first(), Some(Value::ServerError(_)))
        {
            // This user may not run the command. Losses are detected at the next renewal.
            self.rumours.note(false);
        }
        Ok(answers)
    }

    /// Runs a script and waits until its writes have the configured durability.
    pub(crate) async fn run_durably(&self, call: &Call<'_>, asking: bool) -> RedisResult<Durable> {
        // Scripts that enable tracking all use the first connection. The server regards writes on
        // another connection as changes by another client, and each renewal would trigger a
        // verification.
        let others = self.durable.len().saturating_sub(1).max(1);
        let wire = if call.watches() {
            &self.durable[0]
        } else {
            &self.durable[1 + self.next_durable.fetch_add(1, Ordering::Relaxed) % others]
        };
        let preface = self.preface(call, asking);
        let answers = self.run_among(wire, call, preface, Some(self.wait())).await?;
        let mut answers = answers.into_iter().skip(usize::from(preface.is_some()));
        let mut next = || answers.next().unwrap_or(Value::Nil).extract_error();
        let answer = next()?;
        let reached = next().map(|reached| self.missing(&reached));
        Ok(Durable { answer, missing: reached.unwrap_or_else(|error| Some(error.to_string())) })
    }

    /// Runs the durability command once, without a pending write and with a 1 ms limit, to find out
    /// whether the server supports it.
    pub(crate) async fn try_durability(&self) -> RedisResult<()> {
        if !self.durability.is_wanted() {
            return Ok(());
        }
        let command = if self.durability.fsync {
            redis::cmd("WAITAOF").arg(1).arg(0).arg(1).to_owned()
        } else {
            redis::cmd("WAIT").arg(0).arg(1).to_owned()
        };
        self.commands.send(&command).await.map(drop)
    }

    fn wait(&self) -> Cmd {
        let limit = u64::try_from(self.durability.limit.as_millis()).unwrap_or(u64::MAX);
        let mut command = redis::cmd(if self.durability.fsync { "WAITAOF" } else { "WAIT" });
        if self.durability.fsync {
            command.arg(1);
        }
        command.arg(self.durability.replicas).arg(limit);
        command
    }

    /// Returns what is missing of the configured durability.
    fn missing(&self, reached: &Value) -> Option<String> {
        let wanted = i64::from(self.durability.replicas);
        let (disk, replicas) = match reached {
            Value::Int(replicas) => (true, *replicas),
            Value::Array(both) => match both[..] {
                [Value::Int(disk), Value::Int(replicas)] => (disk > 0, replicas),
                _ => (false, 0),
            },
            _ => (false, 0),
        };
        if replicas < wanted {
            return Some(format!("{replicas} of {wanted} replicas have it"));
        }
        (!disk).then(|| "the server has not written it to its disk".to_owned())
    }
}

/// A script's response, and what is missing of the configured durability.
pub(crate) struct Durable {
    pub(crate) answer: Value,
    pub(crate) missing: Option<String>,
}

/// The command that precedes a script.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Preface {
    /// `ASKING`: the slot is migrating to this server.
    Asking,
    /// `CLIENT CACHING YES`: the server tracks the keys that the script reads.
    Watching,
}

fn is_from_unknown_script(answer: &Value) -> bool {
    matches!(answer, Value::ServerError(error) if is_unknown_script(&error.clone().into()))
}

impl Drop for Node {
    fn drop(&mut self) {
        self.reconnecting.abort();
    }
}

/// Reconnects after a connection loss, so that holders verify their claims as soon as the server is
/// available.
async fn reconnect(commands: Arc<Wire>, rumours: Rumours, lost: Arc<Notify>) {
    loop {
        lost.notified().await;
        let began = Instant::now();
        let mut was_down = false;
        // Without a registry there is no holder. After the limit, the leases are over.
        while rumours.are_wanted() && began.elapsed() < RECONNECT_LIMIT {
            if commands.connect().await.is_ok() {
                break;
            }
            was_down = true;
            sleep((began.elapsed() / 10).clamp(RECONNECT_MIN, RECONNECT_MAX)).await;
        }
        if was_down {
            // Verifications during the outage failed, and the next ones would follow only after a
            // pause.
            rumours.spread_all();
        }
    }
}

/// Opens a connection with client tracking in the `OPTIN` mode: only keys of scripts after
/// [`Preface::Watching`] are tracked.
fn tracking(dial: Dial, rumours: Rumours, ended: Ended, lost: Arc<Notify>) -> Dialled {
    Box::pin(async move {
        let pushes: Pushes = Arc::new({
            let rumours = rumours.clone();
            move |push| match push.kind {
                PushKind::Invalidate => rumours.spread(&push.data),
                // Invalidations are missed from now on. The verification that follows needs a new
                // connection.
                PushKind::Disconnection => {
                    ended.store(true, Ordering::Release);
                    rumours.spread_all();
                    lost.notify_one();
                }
                _ => {}
            }
        });
        let mut connection = dial(pushes).await?;
        // NOLOOP: changes over this connection are our own. If the server or the user does not
        // support tracking, losses are detected at the next renewal.
        let track =
            redis::cmd("CLIENT").arg("TRACKING").arg("ON").arg("OPTIN").arg("NOLOOP").to_owned();
        match connection.send_packed_command(&track).await.and_then(Value::extract_error) {
            Err(error) if is_end(&error) => return Err(error),
            tracked => rumours.note(tracked.is_ok()),
        }
        Ok(connection)
    })
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Node").field(&self.name).finish()
    }
}

const DURABLE_WIRES: usize = 4;
/// How long a command may wait without any response before a second connection is tried. Short
/// enough for a lease of 5 s.
const SILENCE: Duration = Duration::from_secs(1);
/// The minimum time between two replacements of all connections to a server that reports to be a
/// replica.
const RENEWALS_APART: Duration = Duration::from_secs(1);
/// The limits of the pause between connection attempts, which is a tenth of the outage.
const RECONNECT_MIN: Duration = Duration::from_millis(20);
const RECONNECT_MAX: Duration = Duration::from_secs(1);
const RECONNECT_LIMIT: Duration = Duration::from_secs(300);
