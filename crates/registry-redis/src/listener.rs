//! Receives release messages. Each server has one subscriber connection and one task; each awaited
//! lock has one subscription. This module handles channels and does not interpret locks. A
//! `RedisNode` owns one [`ReleaseListener`].
//!
//! A broken connection may lose messages, so each new subscription wakes the waiters of its
//! channel. The engine also polls, so no waiter depends on messages alone. Lock commands never use
//! this connection, because the client library can mistake a push message for the response to a
//! command.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, PushInfo, PushKind, ServerErrorKind, Value};
use registry_core::Waiters;
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

use crate::connections::{Connector, PushHandler};
use crate::names::RedisKeyNames;

/// The interval between two removals of channels without waiters. Callers often wait again soon, so
/// such a channel stays subscribed for up to two intervals.
const UNUSED_CHANNEL_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The limits of the pause between connection attempts.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(2);

/// The channels on which releases are published.
#[derive(Debug, Clone)]
pub(crate) struct ChannelScheme {
    pub(crate) names: RedisKeyNames,
    /// Sharded Pub/Sub: each channel belongs to a hash slot.
    pub(crate) is_sharded: bool,
}

/// All subscribed channels of one server.
pub(crate) struct ReleaseListener {
    table: Arc<ChannelTable>,
    subscribe_requests: mpsc::UnboundedSender<Arc<str>>,
}

struct ChannelTable {
    scheme: ChannelScheme,
    channels: Mutex<HashMap<Arc<str>, ReleaseChannel>>,
    waiters: Waiters<Arc<str>>,
    /// Notified when another server may have replaced the current server.
    reset_requested: Notify,
}

/// One channel.
#[derive(Default)]
struct ReleaseChannel {
    /// The sequence number of the last event on this channel. Zero before the first event.
    last_event: u64,
    /// The server has confirmed the subscription on the current connection.
    is_subscribed: bool,
    /// A wait has begun since the last call of `remove_idle`. A caller between two attempts will
    /// wait again soon, so the channel stays subscribed.
    was_awaited: bool,
}

/// The process-wide sequence number of the last event on any channel. It keeps growing when a
/// channel is resubscribed or moves.
static LAST_EVENT_SEQ: AtomicU64 = AtomicU64::new(1);

/// Returns the sequence number of the last event on any channel. Callers read it before a request,
/// so that [`ReleaseListener::wait`] reports each release after that request.
pub(crate) fn last_event_seq() -> u64 {
    LAST_EVENT_SEQ.load(Ordering::Acquire)
}

impl ReleaseListener {
    /// Starts the task that opens connections with `connector`. The first waiter triggers the first
    /// connection.
    pub(crate) fn new(connector: Connector, scheme: ChannelScheme) -> Self {
        let table = Arc::new(ChannelTable {
            scheme,
            channels: Mutex::default(),
            waiters: Waiters::default(),
            reset_requested: Notify::new(),
        });
        let (subscribe_requests, requests) = mpsc::unbounded_channel();
        table.waiters.ensure_task(|| tokio::spawn(run(Arc::clone(&table), connector, requests)));
        Self { table, subscribe_requests }
    }

    /// Waits for an event on the channel `name` after the event with the number `event_seq`. The
    /// confirmation of a subscription is such an event. Also returns when the listener closes, or
    /// when the channel has moved to another server.
    pub(crate) async fn wait(&self, name: &str, event_seq: u64) {
        let name: Arc<str> = name.into();
        let waiter = self.table.waiters.register(Arc::clone(&name), ());
        if self.ensure_subscribed(name) <= event_seq {
            waiter.woken().await;
        }
    }

    /// Requests a subscription to the channel `name`, unless the table contains the channel or the
    /// task has ended. Returns the sequence number of the channel's last event.
    fn ensure_subscribed(&self, name: Arc<str>) -> u64 {
        // Without the task, no message arrives and nothing removes a channel. The engine polls.
        let has_task = self.table.waiters.has_task();
        let mut channels = self.table.channels();
        if !has_task {
            return channels.get(&name).map_or(0, |channel| channel.last_event);
        }
        let channel = channels.entry(Arc::clone(&name)).or_insert_with(|| {
            // The send fails if the task ends meanwhile.
            let _ = self.subscribe_requests.send(name);
            ReleaseChannel::default()
        });
        channel.was_awaited = true;
        channel.last_event
    }

    /// Returns whether the server has confirmed the channel's subscription on the current
    /// connection, and the task that receives its messages runs.
    pub(crate) fn is_subscribed(&self, name: &str) -> bool {
        // The task may have ended with its runtime, without marking the channels as unsubscribed.
        if !self.table.waiters.has_task() {
            return false;
        }
        let channels = self.table.channels();
        channels.get(name).is_some_and(|channel| channel.is_subscribed)
    }

    /// Replaces the connection, because another server may have replaced the current server.
    pub(crate) fn reset(&self) {
        self.table.reset_requested.notify_one();
    }

    /// Closes the connection and wakes all waiters. Later waits receive no messages.
    pub(crate) fn close(&self) {
        self.table.waiters.close();
    }
}

/// The drop wakes the waiters, so that they retry, possibly at another server.
impl Drop for ReleaseListener {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for ReleaseListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReleaseListener")
            .field("channels", &self.table.channels().len())
            .finish_non_exhaustive()
    }
}

impl ChannelTable {
    fn channel_names(&self) -> Vec<Arc<str>> {
        self.channels().keys().cloned().collect()
    }

    /// Records a possible release on the channel `name` and wakes its waiters.
    fn record_event(&self, name: &str) {
        self.update_channel(name, |_| {});
    }

    /// Records that the server has confirmed the subscription of `name`, and wakes the channel's
    /// waiters.
    fn mark_subscribed(&self, name: &str) {
        self.update_channel(name, |channel| channel.is_subscribed = true);
    }

    fn update_channel(&self, name: &str, update: impl FnOnce(&mut ReleaseChannel)) {
        {
            let mut channels = self.channels();
            let Some(channel) = channels.get_mut(name) else { return };
            update(channel);
            channel.last_event = LAST_EVENT_SEQ.fetch_add(1, Ordering::AcqRel) + 1;
        }
        self.waiters.wake(&name.into());
    }

    /// Removes a channel that has moved to another server and wakes its waiters.
    fn remove_moved(&self, name: &Arc<str>) {
        self.channels().remove(name);
        self.waiters.wake(name);
    }

    fn contains(&self, name: &str) -> bool {
        self.channels().contains_key(name)
    }

    /// Marks all channels as unsubscribed, because the connection is closed.
    fn mark_all_unsubscribed(&self) {
        self.channels().values_mut().for_each(|channel| channel.is_subscribed = false);
    }

    /// Removes and returns the channels that have no waiter and on which no wait has begun since
    /// the last call.
    fn remove_idle(&self) -> Vec<Arc<str>> {
        let mut channels = self.channels();
        let idle = channels.extract_if(|name, channel| {
            let was_awaited = std::mem::take(&mut channel.was_awaited);
            !was_awaited && !self.waiters.contains(name)
        });
        idle.map(|(name, _)| name).collect()
    }

    fn channels(&self) -> MutexGuard<'_, HashMap<Arc<str>, ReleaseChannel>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn run(
    table: Arc<ChannelTable>,
    connector: Connector,
    mut subscribe_requests: mpsc::UnboundedReceiver<Arc<str>>,
) {
    let mut pause = RETRY_PAUSE_MIN;
    loop {
        // Without an awaited channel, no connection is needed.
        if table.channel_names().is_empty() && subscribe_requests.recv().await.is_none() {
            return;
        }
        let (push_sender, pushes) = mpsc::unbounded_channel();
        let on_push: PushHandler = Arc::new(move |push| _ = push_sender.send(push));
        if let Ok(connection) = connector(on_push).await {
            let reason = serve(&table, connection, pushes, &mut subscribe_requests).await;
            table.mark_all_unsubscribed();
            match reason {
                // The pause keeps growing, because some servers accept the connection and respond
                // to no subscription.
                DisconnectReason::NotSubscribed => {}
                // The connection was usable until now, so the pause restarts at its minimum.
                DisconnectReason::ConnectionEnded => pause = RETRY_PAUSE_MIN,
                DisconnectReason::ListenerDropped => return,
            }
        }
        table.remove_idle();
        // The next connection subscribes to all channels of the table. Without this, the queue
        // would grow during an outage.
        while subscribe_requests.try_recv().is_ok() {}
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_PAUSE_MAX);
    }
}

/// Why a connection ended.
enum DisconnectReason {
    /// The server has not responded to the first subscriptions.
    NotSubscribed,
    ConnectionEnded,
    ListenerDropped,
}

/// Subscribes to the channels and handles messages, until the connection breaks, a reset is
/// requested, or the listener is dropped.
async fn serve(
    table: &ChannelTable,
    mut connection: MultiplexedConnection,
    mut pushes: mpsc::UnboundedReceiver<PushInfo>,
    subscribe_requests: &mut mpsc::UnboundedReceiver<Arc<str>>,
) -> DisconnectReason {
    // `subscribe` below covers the channels of earlier requests, because the table contains them.
    while subscribe_requests.try_recv().is_ok() {}
    if let Some(common) = table.scheme.names.common_channel()
        && !send_for_all(&mut connection, "SUBSCRIBE", &[common.into()]).await
    {
        return DisconnectReason::NotSubscribed;
    }
    if !subscribe(table, &mut connection, &table.channel_names()).await {
        return DisconnectReason::NotSubscribed;
    }
    let mut cleanup = tokio::time::interval(UNUSED_CHANNEL_CHECK_INTERVAL);
    cleanup.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut ticks = 0_u32;
    let mut unsubscribed = HashSet::new();
    loop {
        let is_usable = tokio::select! {
            biased;
            push = pushes.recv() => {
                push.is_some_and(|push| handle_push(table, push, &mut unsubscribed))
            }
            request = subscribe_requests.recv() => {
                let Some(name) = request else { return DisconnectReason::ListenerDropped };
                let mut names = vec![name];
                while names.len() < CHANNELS_PER_PIPELINE && let Ok(name) = subscribe_requests.try_recv() {
                    names.push(name);
                }
                // `remove_idle` may have removed the channel since the request. A subscription
                // without an entry would never end.
                names.retain(|name| table.contains(name));
                subscribe(table, &mut connection, &names).await
            }
            () = table.reset_requested.notified() => false,
            _ = cleanup.tick() => {
                ticks = ticks.wrapping_add(1);
                let idle = table.remove_idle();
                let is_sent = unsubscribe(table, &mut connection, &idle, &mut unsubscribed).await;
                // PING detects a connection that died without a TCP reset.
                is_sent && (!ticks.is_multiple_of(PING_TICKS) || ping_succeeds(&mut connection).await)
            }
        };
        if !is_usable {
            // Messages are lost until the next connection. Its first subscriptions wake all
            // waiters.
            return DisconnectReason::ConnectionEnded;
        }
    }
}

/// Handles a push message. `unsubscribed` contains the channels for which a reply to an own
/// `SUNSUBSCRIBE` is due. Returns false if the connection is no longer usable.
fn handle_push(table: &ChannelTable, push: PushInfo, unsubscribed: &mut HashSet<Arc<str>>) -> bool {
    let text = |value: Option<&Value>| match value {
        Some(Value::BulkString(text)) => String::from_utf8(text.clone()).ok(),
        _ => None,
    };
    match push.kind {
        PushKind::Message | PushKind::SMessage => {
            let channel = text(push.data.first());
            let names = &table.scheme.names;
            let released_channel = match (channel.as_deref(), push.data.get(1)) {
                (Some(channel), Some(Value::BulkString(message)))
                    if Some(channel) == names.common_channel() =>
                {
                    names.channel_of_message(message)
                }
                _ => channel,
            };
            if let Some(channel) = released_channel {
                table.record_event(&channel);
            }
            true
        }
        // A channel that is still in the table was unsubscribed by the server, because its slot has
        // moved. The client library may have mistaken this message for the response to a command,
        // so the connection is unusable.
        PushKind::SUnsubscribe => text(push.data.first())
            .is_none_or(|name| unsubscribed.remove(name.as_str()) || !table.contains(&name)),
        PushKind::Disconnection => false,
        _ => true,
    }
}

/// Subscribes to channels and wakes their waiters. Returns false if the connection is no longer
/// usable.
async fn subscribe(
    table: &ChannelTable,
    connection: &mut MultiplexedConnection,
    names: &[Arc<str>],
) -> bool {
    let command = if table.scheme.is_sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" };
    for names in names.chunks(CHANNELS_PER_PIPELINE) {
        let Some(responses) = send_pipeline(connection, command, names).await else { return false };
        for (name, response) in names.iter().zip(responses) {
            match response.extract_error() {
                Ok(_) => table.mark_subscribed(name),
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::Moved) => {
                    table.remove_moved(name);
                }
                // The channel stays unsubscribed and its waiters poll. The next connection retries
                // the subscription, as does a new wait after `remove_idle`.
                Err(_) => {}
            }
        }
    }
    true
}

/// Unsubscribes from channels. Adds the channels to `unsubscribed` for which the server sends an
/// `SUNSUBSCRIBE` message. Returns false if the connection is no longer usable.
async fn unsubscribe(
    table: &ChannelTable,
    connection: &mut MultiplexedConnection,
    names: &[Arc<str>],
    unsubscribed: &mut HashSet<Arc<str>>,
) -> bool {
    if !table.scheme.is_sharded {
        return send_for_all(connection, "UNSUBSCRIBE", names).await;
    }
    for names in names.chunks(CHANNELS_PER_PIPELINE) {
        let Some(responses) = send_pipeline(connection, "SUNSUBSCRIBE", names).await else {
            return false;
        };
        let confirmed = names.iter().zip(&responses);
        let confirmed =
            confirmed.filter(|(_, response)| !matches!(response, Value::ServerError(_)));
        unsubscribed.extend(confirmed.map(|(name, _)| Arc::clone(name)));
    }
    true
}

/// Sends `command` once for each name. Returns false if the connection is no longer usable.
async fn send_for_all(
    connection: &mut MultiplexedConnection,
    command: &str,
    names: &[Arc<str>],
) -> bool {
    for names in names.chunks(CHANNELS_PER_PIPELINE) {
        if send_pipeline(connection, command, names).await.is_none() {
            return false;
        }
    }
    true
}

/// Sends `command` once for each name, because one command must not contain channels of different
/// slots. Returns the responses, or `None` if the connection is no longer usable.
async fn send_pipeline(
    connection: &mut MultiplexedConnection,
    command: &str,
    names: &[Arc<str>],
) -> Option<Vec<Value>> {
    if names.is_empty() {
        return Some(Vec::new());
    }
    let mut commands = redis::pipe();
    for name in names {
        commands.cmd(command).arg(&**name);
    }
    let sent = connection.send_packed_commands(&commands, 0, names.len());
    timeout(RESPONSE_TIMEOUT, sent).await.ok()?.ok()
}

async fn ping_succeeds(connection: &mut MultiplexedConnection) -> bool {
    let ping = redis::cmd("PING");
    matches!(timeout(RESPONSE_TIMEOUT, connection.send_packed_command(&ping)).await, Ok(Ok(_)))
}

/// The number of intervals of [`UNUSED_CHANNEL_CHECK_INTERVAL`] between two PINGs.
const PING_TICKS: u32 = 5;

/// The time limit for a response of the server.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of channels per pipeline.
const CHANNELS_PER_PIPELINE: usize = 500;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Layout;

    fn table() -> ChannelTable {
        let names = RedisKeyNames::new(Layout::Native, "n", true);
        ChannelTable {
            scheme: ChannelScheme { names, is_sharded: true },
            channels: Mutex::default(),
            waiters: Waiters::default(),
            reset_requested: Notify::new(),
        }
    }

    fn unsubscription(name: &str) -> PushInfo {
        let data = vec![Value::BulkString(name.as_bytes().to_vec()), Value::Int(0)];
        PushInfo { kind: PushKind::SUnsubscribe, data }
    }

    #[test]
    fn a_reply_to_an_own_unsubscription_does_not_end_the_connection() {
        let table = table();
        // A waiter has requested the channel again.
        table.channels().insert("k".into(), ReleaseChannel::default());
        let mut unsubscribed = HashSet::from(["k".into()]);
        assert!(handle_push(&table, unsubscription("k"), &mut unsubscribed));
        let is_usable = handle_push(&table, unsubscription("k"), &mut unsubscribed);
        assert!(!is_usable, "the slot of the channel has moved");
    }

    #[tokio::test]
    async fn a_closed_listener_collects_no_channels() {
        let connecting = std::future::pending::<redis::RedisResult<MultiplexedConnection>>;
        let connector: Connector = Arc::new(move |_| Box::pin(connecting()));
        let listener = ReleaseListener::new(connector, table().scheme);
        listener.ensure_subscribed("before".into());
        listener.close();
        assert_eq!(listener.ensure_subscribed("after".into()), 0, "a wait goes on");
        assert!(listener.table.contains("before") && !listener.table.contains("after"));
    }
}
