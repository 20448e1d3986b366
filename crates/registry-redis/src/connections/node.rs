//! One server that holds locks: its command connections and its subscriber connection.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::{Cmd, PushInfo, PushKind, RedisResult, ServerErrorKind, Value};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::command_connection::{
    ClosedFlag, CommandConnection, ConnectFuture, is_connection_error, is_noscript_error, timed_out,
};
use crate::config::{Durability, Fsync, RedisConfig};
use crate::error::to_backend_error;
use crate::invalidations::InvalidationForwarder;
use crate::listener::{ChannelScheme, ReleaseListener};
use crate::script::ScriptCall;

/// Opens a connection to the server. The [`PushHandler`] receives the server's push messages.
pub(crate) type Connector = Arc<dyn Fn(PushHandler) -> ConnectFuture + Send + Sync>;

/// Receives push messages.
pub(crate) type PushHandler = Arc<dyn Fn(PushInfo) + Send + Sync>;

pub(crate) struct RedisNode {
    name: String,
    commands: Arc<CommandConnection>,
    reconnect_task: JoinHandle<()>,
    last_reset_at: Mutex<Option<Instant>>,
    /// Connections for scripts that wait for replicas or disks. `WAIT` blocks all later commands on
    /// its connection.
    durability_connections: Vec<CommandConnection>,
    next_durability_connection: AtomicUsize,
    durability: Durability,
    pub(crate) listener: ReleaseListener,
    invalidations: InvalidationForwarder,
}

impl RedisNode {
    /// Creates the node of the server to which `connector` connects. See [`name`](Self::name) for
    /// the `name`.
    pub(crate) fn new(
        name: String,
        connector: Connector,
        config: &RedisConfig,
        channel_scheme: ChannelScheme,
        invalidations: &InvalidationForwarder,
    ) -> Self {
        let connection_lost = Arc::new(Notify::new());
        let connect_timeout = config.connect_timeout;
        let probe_after = PROBE_AFTER.min(config.response_timeout);
        let connection = |probe_after| {
            let (connector, invalidations, invalidations_on_replace) =
                (Arc::clone(&connector), invalidations.clone(), invalidations.clone());
            let (connection_lost, connection_lost_on_replace) =
                (Arc::clone(&connection_lost), Arc::clone(&connection_lost));
            CommandConnection::new(
                move |closed| {
                    connect_with_tracking(
                        Arc::clone(&connector),
                        connect_timeout,
                        invalidations.clone(),
                        closed,
                        Arc::clone(&connection_lost),
                    )
                },
                // The client may have missed invalidations, so holders must verify their claims.
                move || {
                    invalidations_on_replace.subscribers().notify_all();
                    connection_lost_on_replace.notify_one();
                },
                probe_after,
            )
        };
        let commands = Arc::new(connection(probe_after));
        let reconnect_task = tokio::spawn(reconnect_after_loss(
            Arc::clone(&commands),
            invalidations.clone(),
            Arc::clone(&connection_lost),
        ));
        let durable_count = if config.durability.is_required() { DURABLE_CONNECTIONS } else { 0 };
        Self {
            name,
            commands,
            reconnect_task,
            last_reset_at: Mutex::default(),
            // The server may wait for replicas and disks for up to `limit` before it responds.
            durability_connections: (0..durable_count)
                .map(|_| connection(probe_after + config.durability.limit))
                .collect(),
            next_durability_connection: AtomicUsize::new(0),
            durability: config.durability,
            listener: ReleaseListener::new(Arc::clone(&connector), channel_scheme),
            invalidations: invalidations.clone(),
        }
    }

    /// Returns the server's address, or `master of SERVICE` with sentinels. Messages contain this
    /// name. In a cluster, it also completes addresses without a host and determines the shard.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Connects, unless the node is connected.
    pub(crate) async fn connect(&self) -> RedisResult<()> {
        self.commands.connect().await
    }

    /// Replaces all connections, because another server may have replaced the current server.
    pub(crate) fn reset_connections(&self) {
        self.commands.reset();
        for connection in &self.durability_connections {
            connection.reset();
        }
        self.listener.reset();
        // The new server may have lost some locks. It sends no invalidations for the remaining
        // locks until their next renewal enables tracking.
        self.invalidations.subscribers().notify_all();
    }

    /// Calls [`reset_connections`](Self::reset_connections), but at most once per
    /// [`RESET_INTERVAL_MIN`]. After a shorter interval, new connections usually reach the same
    /// replica again.
    pub(crate) fn reset_connections_throttled(&self) {
        let now = Instant::now();
        {
            let mut last_reset_at =
                self.last_reset_at.lock().unwrap_or_else(PoisonError::into_inner);
            if last_reset_at.is_some_and(|at| now.duration_since(at) < RESET_INTERVAL_MIN) {
                return;
            }
            *last_reset_at = Some(now);
        }
        self.reset_connections();
    }

    /// Sends a command and returns its response.
    pub(crate) async fn send_command(&self, command: &Cmd) -> RedisResult<Value> {
        self.commands.send(command).await
    }

    /// Runs a script. `is_asking`: the slot of its keys is migrating to this server.
    pub(crate) async fn run(&self, call: &ScriptCall<'_>, is_asking: bool) -> RedisResult<Value> {
        let prefix = self.prepare_prefix(call, is_asking);
        if prefix.is_none() {
            return self.commands.run(call).await;
        }
        // The box makes the futures of acquisitions and releases smaller, because these scripts
        // rarely have a prefix.
        let responses = Box::pin(self.run_pipelined(&self.commands, call, prefix, None));
        let mut responses = responses.await?;
        responses.swap_remove(1).extract_error()
    }

    /// Returns the command that must precede a script, if any. `ASKING` and `CLIENT CACHING` both
    /// apply only to the next command, so a script has at most one prefix. The server therefore
    /// does not track the locks of a migrating slot. This function schedules a verification of
    /// these locks instead.
    fn prepare_prefix(&self, call: &ScriptCall<'_>, is_asking: bool) -> Option<Prefix> {
        if is_asking {
            if call.is_tracked() {
                self.invalidations.notify_after_delay(call.keys());
            }
            return Some(Prefix::Asking);
        }
        (call.is_tracked() && self.invalidations.is_tracking()).then_some(Prefix::Caching)
    }

    /// Runs a script after `prefix` and before `suffix`. If the server has not cached the script,
    /// repeats all commands with the script's source. Returns the responses of all commands in
    /// order.
    async fn run_pipelined(
        &self,
        connection: &CommandConnection,
        call: &ScriptCall<'_>,
        prefix: Option<Prefix>,
        suffix: Option<Cmd>,
    ) -> RedisResult<Vec<Value>> {
        let pipeline = |command: &Cmd| {
            let mut pipeline = redis::pipe();
            match prefix {
                Some(Prefix::Asking) => drop(pipeline.cmd("ASKING")),
                Some(Prefix::Caching) => drop(pipeline.cmd("CLIENT").arg("CACHING").arg("YES")),
                None => {}
            }
            pipeline.add_command(command.clone());
            if let Some(suffix) = &suffix {
                pipeline.add_command(suffix.clone());
            }
            pipeline
        };
        let script_index = usize::from(prefix.is_some());
        let count = script_index + 1 + usize::from(suffix.is_some());
        let mut responses = connection.send_all(&pipeline(call.evalsha())).await?;
        if responses.get(script_index).is_some_and(is_noscript_response) {
            responses = connection.send_all(&pipeline(&call.eval())).await?;
        }
        if responses.len() != count {
            return Err((redis::ErrorKind::UnexpectedReturnType, "a response is missing").into());
        }
        match (prefix, &responses[..]) {
            // The user may not run `CLIENT CACHING`, or this connection has no client tracking.
            // Holders detect losses at their next renewal.
            (Some(Prefix::Caching), [Value::ServerError(_), ..]) => {
                self.invalidations.set_tracking(false);
            }
            // The two servers of the slot would redirect the script to each other without end. If
            // the migration has ended meanwhile, the server has executed the script, and the
            // script's response counts.
            (Some(Prefix::Asking), [Value::ServerError(error), script, ..])
                if is_redirection_response(script) =>
            {
                return Err(error.clone().into());
            }
            _ => {}
        }
        Ok(responses)
    }

    /// Runs a script. Waits until its writes have the configured durability, or the time limit for
    /// it is over.
    pub(crate) async fn run_durably(
        &self,
        call: &ScriptCall<'_>,
        is_asking: bool,
    ) -> RedisResult<DurableResponse> {
        // All scripts with tracking use the first connection. The server treats a renewal on
        // another connection as a change by another client, and sends an invalidation.
        let untracked_count = self.durability_connections.len().saturating_sub(1).max(1);
        let connection = if call.is_tracked() {
            &self.durability_connections[0]
        } else {
            &self.durability_connections[1 + self
                .next_durability_connection
                .fetch_add(1, Ordering::Relaxed)
                % untracked_count]
        };
        let prefix = self.prepare_prefix(call, is_asking);
        let responses =
            self.run_pipelined(connection, call, prefix, Some(self.wait_command())).await?;
        let mut responses = responses.into_iter().skip(usize::from(prefix.is_some()));
        let mut next = || responses.next().unwrap_or(Value::Nil).extract_error();
        let response = next()?;
        let shortfall = next().map(|reached| self.shortfall(&reached));
        Ok(DurableResponse {
            response,
            shortfall: shortfall.unwrap_or_else(|error| Some(error.to_string())),
        })
    }

    /// Checks whether the server supports the required durability, if any, by one `WAIT` or
    /// `WAITAOF`. No write is pending, and the time limit is 1 ms.
    pub(crate) async fn check_durability(&self) -> RedisResult<()> {
        if !self.durability.is_required() {
            return Ok(());
        }
        let command = match self.durability.fsync {
            Fsync::Required => redis::cmd("WAITAOF").arg(1).arg(0).arg(1).to_owned(),
            Fsync::NotRequired => redis::cmd("WAIT").arg(0).arg(1).to_owned(),
        };
        self.commands.send(&command).await.map(drop)
    }

    fn wait_command(&self) -> Cmd {
        let limit = u64::try_from(self.durability.limit.as_millis()).unwrap_or(u64::MAX);
        let mut command = match self.durability.fsync {
            Fsync::Required => redis::cmd("WAITAOF").arg(1).to_owned(),
            Fsync::NotRequired => redis::cmd("WAIT"),
        };
        command.arg(self.durability.replicas).arg(limit);
        command
    }

    /// Returns the missing part of the configured durability, or `None` if the write has that
    /// durability.
    fn shortfall(&self, reached: &Value) -> Option<String> {
        let wanted = i64::from(self.durability.replicas);
        let (disk, replicas) = match reached {
            Value::Int(replicas) => (true, *replicas),
            Value::Array(counts) => match counts[..] {
                [Value::Int(disk), Value::Int(replicas)] => (disk > 0, replicas),
                _ => (false, 0),
            },
            _ => (false, 0),
        };
        if replicas < wanted {
            return Some(format!(
                "only {replicas} of {wanted} required replicas (`replicas`) have confirmed the write"
            ));
        }
        (!disk).then(|| "the server has not written the data to disk (`fsync`) in time".to_owned())
    }
}

/// The response of a script, and the missing part of the configured durability.
pub(crate) struct DurableResponse {
    pub(crate) response: Value,
    pub(crate) shortfall: Option<String>,
}

/// The command that precedes a script.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Prefix {
    /// `ASKING`: the server accepts the next command for a slot that is migrating to it.
    Asking,
    /// `CLIENT CACHING YES`: the server tracks the keys that the script reads.
    Caching,
}

fn is_noscript_response(response: &Value) -> bool {
    matches!(response, Value::ServerError(error) if is_noscript_error(&error.clone().into()))
}

fn is_redirection_response(response: &Value) -> bool {
    let Value::ServerError(error) = response else { return false };
    matches!(error.kind(), Some(ServerErrorKind::Moved | ServerErrorKind::Ask))
}

impl Drop for RedisNode {
    fn drop(&mut self) {
        self.reconnect_task.abort();
    }
}

/// Reconnects `commands` after each connection loss, so that holders can verify their claims as
/// soon as the server is available. Stops after [`RECONNECT_LIMIT`] until the next loss.
async fn reconnect_after_loss(
    commands: Arc<CommandConnection>,
    invalidations: InvalidationForwarder,
    connection_lost: Arc<Notify>,
) {
    loop {
        connection_lost.notified().await;
        let started_at = Instant::now();
        let mut was_down = false;
        // Without a registry there is no holder. After `RECONNECT_LIMIT`, most leases have ended.
        while !invalidations.subscribers().is_empty() && started_at.elapsed() < RECONNECT_LIMIT {
            if commands.connect().await.is_ok() {
                break;
            }
            was_down = true;
            sleep((started_at.elapsed() / 10).clamp(RECONNECT_PAUSE_MIN, RECONNECT_PAUSE_MAX))
                .await;
        }
        if was_down {
            // Verifications during the outage have failed. Without this notification, holders would
            // repeat them only after a pause.
            invalidations.subscribers().notify_all();
        }
    }
}

/// Opens a connection with client tracking in the `OPTIN` mode. The server then tracks only the
/// keys of scripts after [`Prefix::Caching`].
fn connect_with_tracking(
    connector: Connector,
    connect_timeout: Duration,
    invalidations: InvalidationForwarder,
    closed: ClosedFlag,
    connection_lost: Arc<Notify>,
) -> ConnectFuture {
    Box::pin(async move {
        let on_push: PushHandler = Arc::new({
            let invalidations = invalidations.clone();
            move |push| match push.kind {
                PushKind::Invalidate => invalidations.forward(&push.data),
                // The server sends no further invalidations, so holders must verify their claims on
                // a new connection.
                PushKind::Disconnection => {
                    closed.store(true, Ordering::Release);
                    invalidations.subscribers().notify_all();
                    connection_lost.notify_one();
                }
                _ => {}
            }
        });
        let mut connection = connector(on_push).await?;
        // With NOLOOP, the server does not report changes by this connection. If the server or the
        // user does not support tracking, holders detect losses at their next renewal.
        let track =
            redis::cmd("CLIENT").arg("TRACKING").arg("ON").arg("OPTIN").arg("NOLOOP").to_owned();
        let tracked = timeout(connect_timeout, connection.send_packed_command(&track)).await;
        let tracked = tracked.unwrap_or_else(|_| Err(timed_out())).and_then(Value::extract_error);
        match tracked {
            // A server that is busy or loads its data does not refuse tracking for good. Without
            // this error, the connection would stay without tracking.
            Err(error)
                if is_connection_error(&error) || to_backend_error(&error).is_retryable() =>
            {
                return Err(error);
            }
            tracked => invalidations.set_tracking(tracked.is_ok()),
        }
        Ok(connection)
    })
}

impl fmt::Debug for RedisNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Node").field(&self.name).finish()
    }
}

const DURABLE_CONNECTIONS: usize = 4;
/// The time without any response after which a waiting command opens a second connection. The time
/// is short enough for leases of 5 s or more.
const PROBE_AFTER: Duration = Duration::from_secs(1);
/// The minimum time between two replacements of all connections to a server that reports itself as
/// a replica.
const RESET_INTERVAL_MIN: Duration = Duration::from_secs(1);
/// The limits of the pause between connection attempts. The pause is a tenth of the outage so far.
const RECONNECT_PAUSE_MIN: Duration = Duration::from_millis(20);
const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(1);
const RECONNECT_LIMIT: Duration = Duration::from_secs(300);
