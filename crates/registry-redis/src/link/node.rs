//! One server that holds locks: the way to it, and the ears that listen there.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use redis::{Cmd, PushInfo, PushKind, RedisError, RedisResult, Value};

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
    commands: Wire,
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
        let wire = || {
            let (dial, rumours) = (Arc::clone(&dial), rumours.clone());
            Wire::new(move |ended| tracking(Arc::clone(&dial), rumours.clone(), ended))
        };
        let wires = if config.durability.is_wanted() { DURABLE_WIRES } else { 0 };
        Self {
            name,
            commands: wire(),
            durable: (0..wires).map(|_| wire()).collect(),
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

    /// Sends a command.
    pub(crate) async fn ask(&self, command: &Cmd) -> RedisResult<Value> {
        self.commands.send(command).await
    }

    /// Runs a script; with `asking` although the slot of its keys is only on its way to this server.
    pub(crate) async fn run(&self, call: &Call<'_>, asking: bool) -> RedisResult<Value> {
        if !asking {
            return self.commands.run(call).await;
        }
        let ask = |command: &Cmd| {
            let mut both = redis::pipe();
            both.cmd("ASKING").add_command(command.clone());
            both
        };
        match second(self.commands.send_all(&ask(call.known())).await?) {
            Err(error) if is_unknown_script(&error) => {
                second(self.commands.send_all(&ask(&call.unknown())).await?)
            }
            answer => answer,
        }
    }

    /// Runs a script and waits until its writes are as safe as was asked for.
    pub(crate) async fn run_durably(&self, call: &Call<'_>, asking: bool) -> RedisResult<Durable> {
        let wire = &self.durable
            [self.next_durable.fetch_add(1, Ordering::Relaxed) % self.durable.len().max(1)];
        let all = |command: &Cmd| {
            let mut all = redis::pipe();
            if asking {
                all.cmd("ASKING");
            }
            all.add_command(command.clone()).add_command(self.wait());
            all
        };
        let mut answers = wire.send_all(&all(call.known())).await?;
        let at = usize::from(asking);
        if answer_at(&answers, at).is_err_and(|error| is_unknown_script(&error)) {
            answers = wire.send_all(&all(&call.unknown())).await?;
        }
        let answer = answer_at(&answers, at)?;
        let reached = answer_at(&answers, at + 1).map(|reached| self.missing(&reached));
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

fn answer_at(answers: &[Value], at: usize) -> RedisResult<Value> {
    answers.get(at).cloned().ok_or_else(no_answer)?.extract_error()
}

fn second(answers: Vec<Value>) -> RedisResult<Value> {
    answer_at(&answers, 1)
}

fn no_answer() -> RedisError {
    (redis::ErrorKind::UnexpectedReturnType, "an answer is missing").into()
}

/// A connection whose server tells of changes to locks that were taken over it.
fn tracking(dial: Dial, rumours: Rumours, ended: Ended) -> Dialled {
    Box::pin(async move {
        let pushes: Pushes = Arc::new({
            let rumours = rumours.clone();
            move |push| match push.kind {
                PushKind::Invalidate => rumours.spread(&push.data),
                // What changes from now on is not heard of. Whoever looks then needs another connection.
                PushKind::Disconnection => {
                    ended.store(true, Ordering::Release);
                    rumours.spread_all();
                }
                _ => {}
            }
        });
        let mut connection = dial(pushes).await?;
        // Changes that come over this connection are our own. A server or a user that cannot do this tells of nothing, and losses are
        // noticed at the next renewal.
        let track = redis::cmd("CLIENT").arg("TRACKING").arg("ON").arg("NOLOOP").to_owned();
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
