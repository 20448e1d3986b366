//! One server that holds locks: the way to it, and the ears that listen there.

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

/// Makes a connection to the server, with this to hear what the server says unasked.
pub(crate) type Dial = Arc<dyn Fn(Pushes) -> Dialled + Send + Sync>;

/// Hears what a server says unasked.
pub(crate) type Pushes = Arc<dyn Fn(PushInfo) + Send + Sync>;

pub(crate) struct Node {
    name: String,
    commands: Arc<Wire>,
    reconnecting: JoinHandle<()>,
    renewed_at: Mutex<Option<Instant>>,
    /// For grants that replicas are waited for: whoever waits holds up all that comes after on the same connection.
    durable: Vec<Wire>,
    next_durable: AtomicUsize,
    durability: Durability,
    pub(crate) ears: Ears,
    rumours: Rumours,
}

impl Node {
    /// The server that `dial` reaches; `name` is for people.
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
                // What changes from now on is not heard of.
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
            // A server may take that long to wait for its replicas.
            durable: (0..wires).map(|_| wire(silence + config.durability.limit)).collect(),
            next_durable: AtomicUsize::new(0),
            durability: config.durability,
            ears: Ears::new(Arc::clone(&dial), hearing),
            rumours: rumours.clone(),
        }
    }

    /// The server's address, for people.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Connects, if that is yet to be done.
    pub(crate) async fn connect(&self) -> RedisResult<()> {
        self.commands.connect().await
    }

    /// Gives up all connections: the server is another one now.
    pub(crate) fn renew(&self) {
        self.commands.renew();
        for wire in &self.durable {
            wire.renew();
        }
        self.ears.renew();
        // What the new one does not have is lost, and what it has it must be asked for before it tells of changes.
        self.rumours.spread_all();
    }

    /// The same, unless it was done a moment ago: whatever the name leads to then is a replica, too.
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

    /// Runs a script; with `asking` although the slot of its keys is only on its way to this server.
    pub(crate) async fn run(&self, call: &Call<'_>, asking: bool) -> RedisResult<Value> {
        let preface = self.preface(call, asking);
        if preface.is_none() {
            return self.commands.run(call).await;
        }
        let mut answers = self.run_among(&self.commands, call, preface, None).await?;
        answers.swap_remove(1).extract_error()
    }

    /// What must be said right before a script. Of two things only one can be: each counts for the very next command. So while a slot is
    /// on its way nobody tells of its locks, and they are looked at until it has come.
    fn preface(&self, call: &Call<'_>, asking: bool) -> Option<Preface> {
        if asking {
            if call.watches() {
                self.rumours.spread_soon(call.keys());
            }
            return Some(Preface::Asking);
        }
        (call.watches() && self.rumours.are_told()).then_some(Preface::Watching)
    }

    /// Runs a script between other commands. Answers for each of them, in their order.
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
            // This user may not. Losses are noticed at the next renewal.
            self.rumours.note(false);
        }
        Ok(answers)
    }

    /// Runs a script and waits until its writes are as safe as was asked for.
    pub(crate) async fn run_durably(&self, call: &Call<'_>, asking: bool) -> RedisResult<Durable> {
        // What is to be told of is always asked for over the first one: a server takes what comes over another one for changes by somebody
        // else, and each renewal would call for a look.
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

    /// Asks for the safety that was asked for, with nothing to be made safe and no time for it.
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

    /// What is missing of the safety that was asked for.
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

/// What a script answered, and what is missing of the safety that was asked for.
pub(crate) struct Durable {
    pub(crate) answer: Value,
    pub(crate) missing: Option<String>,
}

/// What a server has to be told before a script.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Preface {
    /// The slot is on its way here.
    Asking,
    /// Changes to what is read are to be told.
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

/// Connects again when a connection is lost, so that holders verify their claims as soon as the server is back.
async fn reconnect(commands: Arc<Wire>, rumours: Rumours, lost: Arc<Notify>) {
    loop {
        lost.notified().await;
        let began = Instant::now();
        let mut was_down = false;
        // Without a registry there is no holder; after that long, leases are over.
        while rumours.are_wanted() && began.elapsed() < RECONNECT_LIMIT {
            if commands.connect().await.is_ok() {
                break;
            }
            was_down = true;
            sleep((began.elapsed() / 10).clamp(RECONNECT_MIN, RECONNECT_MAX)).await;
        }
        if was_down {
            // What was asked meanwhile has failed, and would be asked again only after a pause.
            rumours.spread_all();
        }
    }
}

/// A connection whose server tells of changes to locks, of those that it is asked about with [`Preface::Watching`].
fn tracking(dial: Dial, rumours: Rumours, ended: Ended, lost: Arc<Notify>) -> Dialled {
    Box::pin(async move {
        let pushes: Pushes = Arc::new({
            let rumours = rumours.clone();
            move |push| match push.kind {
                PushKind::Invalidate => rumours.spread(&push.data),
                // What changes from now on is not heard of. Whoever looks then needs another connection.
                PushKind::Disconnection => {
                    ended.store(true, Ordering::Release);
                    rumours.spread_all();
                    lost.notify_one();
                }
                _ => {}
            }
        });
        let mut connection = dial(pushes).await?;
        // Changes that come over this connection are our own. A server or a user that cannot do this tells of nothing, and losses are
        // noticed at the next renewal.
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
/// How long nothing may arrive while a command waits, until a second connection is tried. Short enough for a lease of 5 s.
const SILENCE: Duration = Duration::from_secs(1);
/// The least time between two renewals of all connections to a server that says that it is a replica.
const RENEWALS_APART: Duration = Duration::from_secs(1);
/// The pauses between tries to connect are a tenth of the outage, within these limits.
const RECONNECT_MIN: Duration = Duration::from_millis(20);
const RECONNECT_MAX: Duration = Duration::from_secs(1);
const RECONNECT_LIMIT: Duration = Duration::from_secs(300);
