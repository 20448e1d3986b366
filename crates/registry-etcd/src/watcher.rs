//! Watches keys for deletion or changes over one stream. Wakes waiters, and requests the
//! verification of held locks from the registries.

use std::collections::HashMap;
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use futures_util::stream::poll_fn;
use registry_core::{InvalidationSet, Key};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use crate::client::{EtcdClient, Reconnect};
use crate::keep_alive::PAUSE_MIN;
use crate::names::prefix_end;
use crate::proto::{
    NO_PUTS, WATCH, WatchCancelRequest, WatchCreateRequest, WatchEvent, WatchProgressRequest,
    WatchRequest, WatchResponse, WatchUnion,
};

/// The handle of the task that owns the stream. Dropping the handle ends the task.
pub(crate) struct Watcher {
    commands: CommandSender,
    next_id: AtomicI64,
    subscribers: Arc<InvalidationSet>,
    task: JoinHandle<()>,
}

// The channel is unbounded, because each waiter and each holder has at most one watch.
type CommandSender = mpsc::UnboundedSender<WatchCommand>;

enum WatchCommand {
    Create {
        id: i64,
        key: Vec<u8>,
        scope: WatchScope,
        start_revision: i64,
        recipient: WatchRecipient,
        state: Arc<WatchState>,
    },
    Cancel(i64),
}

/// The recipient of a watch's result.
enum WatchRecipient {
    /// A waiter, which reads the result from its [`KeyWatch`].
    Waiter,
    /// The holder of this key. Every subscribed registry verifies its claim on the key.
    Holder(Key),
}

/// The events that end a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WatchScope {
    /// The deletion of the key.
    Deletion,
    /// The deletion of the key, or a new value.
    Change,
    /// The deletion of any key with this prefix.
    DeletionInQueue,
}

/// The result of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WatchOutcome {
    /// The key was deleted.
    Deleted,
    /// The key has a new value, or a key with the watched prefix was deleted.
    Changed,
    /// The watch ended without an event of its scope.
    Ended,
}

/// The handle of a watch. Dropping the handle cancels the watch.
#[derive(Debug)]
pub(crate) struct KeyWatch {
    id: i64,
    state: Arc<WatchState>,
    commands: CommandSender,
}

/// The state of a watch.
#[derive(Debug, Default)]
struct WatchState {
    /// The member has created the watch.
    is_established: AtomicBool,
    has_ended: AtomicBool,
    is_deleted: AtomicBool,
    is_changed: AtomicBool,
    /// Notified when the watch ends.
    end_notify: Notify,
}

impl KeyWatch {
    /// Returns whether the watch has not ended.
    pub(crate) fn is_active(&self) -> bool {
        !self.state.has_ended.load(Ordering::Acquire)
    }

    /// Returns whether the watch would report a deletion: the member has created the watch, and the
    /// watch has not ended.
    pub(crate) fn is_established(&self) -> bool {
        self.state.is_established.load(Ordering::Acquire) && self.is_active()
    }

    /// Waits until the watch ends, and returns its result.
    pub(crate) fn wait_for_outcome(&self) -> impl Future<Output = WatchOutcome> + Send + use<> {
        let state = Arc::clone(&self.state);
        async move {
            loop {
                let mut notified = pin!(state.end_notify.notified());
                notified.as_mut().enable();
                if state.has_ended.load(Ordering::Acquire) {
                    return if state.is_deleted.load(Ordering::Acquire) {
                        WatchOutcome::Deleted
                    } else if state.is_changed.load(Ordering::Acquire) {
                        WatchOutcome::Changed
                    } else {
                        WatchOutcome::Ended
                    };
                }
                notified.await;
            }
        }
    }

    /// Returns whether the deletion of the key was reported.
    pub(crate) fn is_deleted(&self) -> bool {
        self.state.is_deleted.load(Ordering::Acquire)
    }
}

impl Drop for KeyWatch {
    fn drop(&mut self) {
        if self.is_active() {
            _ = self.commands.send(WatchCommand::Cancel(self.id));
            self.state.has_ended.store(true, Ordering::Release);
            self.state.end_notify.notify_waiters();
        }
    }
}

impl Watcher {
    pub(crate) fn new(client: EtcdClient) -> Self {
        let (commands, receiver) = mpsc::unbounded_channel();
        let subscribers = Arc::<InvalidationSet>::default();
        let task = tokio::spawn(run_watcher(client, receiver, Arc::clone(&subscribers)));
        Self { commands, next_id: 1.into(), subscribers, task }
    }

    /// Watches the key `name`, or with [`WatchScope::DeletionInQueue`] all keys with this prefix,
    /// from the revision `start_revision` on. Notifies only the caller.
    pub(crate) fn watch_for_waiter(
        &self,
        name: Vec<u8>,
        scope: WatchScope,
        start_revision: i64,
    ) -> KeyWatch {
        self.create_watch(name, scope, start_revision, WatchRecipient::Waiter)
    }

    /// Watches the entry `name`, by which this process holds `key`, for deletion from the revision
    /// `start_revision` on. Requests a verification of the lock when the watch ends, but not when
    /// the returned handle is dropped.
    pub(crate) fn watch_held_key(&self, key: &Key, name: Vec<u8>, start_revision: i64) -> KeyWatch {
        let recipient = WatchRecipient::Holder(key.clone());
        self.create_watch(name, WatchScope::Deletion, start_revision, recipient)
    }

    fn create_watch(
        &self,
        key: Vec<u8>,
        scope: WatchScope,
        start_revision: i64,
        recipient: WatchRecipient,
    ) -> KeyWatch {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let state = Arc::<WatchState>::default();
        _ = self.commands.send(WatchCommand::Create {
            id,
            key,
            scope,
            start_revision,
            recipient,
            state: Arc::clone(&state),
        });
        KeyWatch { id, state, commands: self.commands.clone() }
    }

    /// Returns the registries that verify their locks on request.
    pub(crate) fn subscribers(&self) -> &InvalidationSet {
        &self.subscribers
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watcher").finish_non_exhaustive()
    }
}

/// All watches of the stream.
#[derive(Default)]
struct Watches(HashMap<i64, (WatchRecipient, WatchScope, Arc<WatchState>)>);

impl Watches {
    /// Ends a watch and reports its result. Returns false if the watch has ended already.
    fn end(&mut self, id: i64, outcome: WatchOutcome, subscribers: &InvalidationSet) -> bool {
        let Some((recipient, _, state)) = self.0.remove(&id) else { return false };
        state.is_deleted.store(outcome == WatchOutcome::Deleted, Ordering::Release);
        state.is_changed.store(outcome == WatchOutcome::Changed, Ordering::Release);
        state.has_ended.store(true, Ordering::Release);
        state.end_notify.notify_waiters();
        match recipient {
            WatchRecipient::Waiter => {}
            // Requests a verification even without a deletion event. The key may be deleted after
            // the end of the watch.
            WatchRecipient::Holder(key) => subscribers.notify(&key),
        }
        true
    }

    /// Inserts the watch of a command that no stream has served.
    fn insert_unserved(&mut self, command: WatchCommand) {
        if let WatchCommand::Create { id, scope, recipient, state, .. } = command {
            self.0.insert(id, (recipient, scope, state));
        }
    }

    fn mark_established(&self, id: i64) {
        if let Some((.., state)) = self.0.get(&id) {
            state.is_established.store(true, Ordering::Release);
        }
    }

    /// Returns the outcome that these events have for a watch, if any.
    fn outcome_of(&self, id: i64, events: &[WatchEvent]) -> Option<WatchOutcome> {
        let (_, scope, _) = self.0.get(&id)?;
        let is_deletion = events.iter().any(|event| event.kind == DELETED);
        match scope {
            WatchScope::Deletion | WatchScope::Change if is_deletion => Some(WatchOutcome::Deleted),
            WatchScope::DeletionInQueue if is_deletion => Some(WatchOutcome::Changed),
            WatchScope::Change if !events.is_empty() => Some(WatchOutcome::Changed),
            _ => None,
        }
    }

    fn end_all(&mut self, subscribers: &InvalidationSet) {
        for id in self.0.keys().copied().collect::<Vec<_>>() {
            self.end(id, WatchOutcome::Ended, subscribers);
        }
    }
}

async fn run_watcher(
    client: EtcdClient,
    mut commands: mpsc::UnboundedReceiver<WatchCommand>,
    subscribers: Arc<InvalidationSet>,
) {
    let mut watches = Watches::default();
    let mut pause = PAUSE_MIN;
    while let Some(command) = commands.recv().await {
        if matches!(command, WatchCommand::Cancel(_)) {
            // Without a stream, no watch exists.
            continue;
        }
        // All watches end with their stream, because the stream can no longer report deletions.
        let was_served =
            serve_stream(&client, &mut commands, command, &mut watches, &subscribers).await;
        watches.end_all(&subscribers);
        if was_served {
            pause = PAUSE_MIN;
        } else {
            // A member or a proxy may end each stream immediately. The pause limits the rate of new
            // connections and logins.
            sleep(pause).await;
            // The watches of all queued commands end, so that their callers do not rely on them.
            while let Ok(command) = commands.try_recv() {
                watches.insert_unserved(command);
            }
            watches.end_all(&subscribers);
            pause = (pause * 2).min(STREAM_PAUSE_MAX);
        }
    }
}

/// Serves one stream until it ends. Returns true if the stream received a response, or if another
/// caller dropped the connection after the stream was opened.
async fn serve_stream(
    client: &EtcdClient,
    commands: &mut mpsc::UnboundedReceiver<WatchCommand>,
    first_command: WatchCommand,
    watches: &mut Watches,
    subscribers: &InvalidationSet,
) -> bool {
    let (requests, mut outgoing) = mpsc::unbounded_channel();
    // Returns false if the stream no longer accepts requests.
    let apply_command = |command: WatchCommand, watches: &mut Watches| match command {
        WatchCommand::Create { id, key, scope, start_revision, recipient, state } => {
            watches.0.insert(id, (recipient, scope, state));
            let (range_end, filters) = match scope {
                WatchScope::Deletion => (Vec::new(), vec![NO_PUTS]),
                WatchScope::Change => (Vec::new(), Vec::new()),
                WatchScope::DeletionInQueue => (prefix_end(&key), vec![NO_PUTS]),
            };
            let watch_id = id;
            let create = WatchCreateRequest { key, range_end, start_revision, filters, watch_id };
            requests.send(WatchRequest { request: Some(WatchUnion::Create(create)) }).is_ok()
        }
        WatchCommand::Cancel(id) => {
            // A watch that has ended needs no cancel request.
            watches.0.remove(&id).is_none() || requests.send(cancel_request(id)).is_ok()
        }
    };
    if !apply_command(first_command, watches) {
        return false;
    }
    let Ok(connection) = client.get_or_connect().await else { return false };
    let mut disconnects = client.disconnects();
    let outgoing = poll_fn(move |cx| outgoing.poll_recv(cx));
    let Ok(mut responses) = client.open_stream(&connection, WATCH, outgoing).await else {
        client.disconnect(connection.id, Reconnect::NextMember);
        return false;
    };
    connection.record_receive();
    let mut has_response = false;
    // The time of the last progress request. `None` if data has arrived since.
    let mut progress_requested_at: Option<Instant> = None;
    loop {
        let has_watches = !watches.0.is_empty();
        let liveness_check_at = progress_requested_at.unwrap_or_else(|| connection.last_received())
            + client.response_timeout();
        tokio::select! {
            command = commands.recv() => {
                if !command.is_some_and(|command| apply_command(command, watches)) {
                    return has_response;
                }
            }
            response = responses.message() => {
                let Ok(Some(response)) = response else {
                    client.disconnect(connection.id, Reconnect::NextMember);
                    return has_response;
                };
                has_response = true;
                connection.record_receive();
                progress_requested_at = None;
                let WatchResponse { watch_id, created, canceled, events } = response;
                if canceled && watch_id < 0 {
                    // The member could not create a watch. Its response contains no id, so the
                    // affected caller is unknown. All watches therefore end with the stream.
                    return has_response;
                }
                if created && !canceled {
                    watches.mark_established(watch_id);
                }
                if canceled {
                    watches.end(watch_id, WatchOutcome::Ended, subscribers);
                } else if let Some(outcome) = watches.outcome_of(watch_id, &events)
                    && watches.end(watch_id, outcome, subscribers)
                {
                    _ = requests.send(cancel_request(watch_id));
                }
            }
            disconnected = disconnects.wait_for(|&last| last >= connection.id) => {
                drop(disconnected);
                return true;
            }
            () = sleep_until(liveness_check_at), if has_watches => {
                if connection.has_received_within(client.response_timeout()) {
                    progress_requested_at = None;
                } else if progress_requested_at.is_some() {
                    client.disconnect(connection.id, Reconnect::NextMember);
                    return has_response;
                } else {
                    // Without events, a live stream also receives nothing. The member answers a
                    // progress request only over a live stream.
                    progress_requested_at = Some(Instant::now());
                    let progress = WatchUnion::Progress(WatchProgressRequest {});
                    _ = requests.send(WatchRequest { request: Some(progress) });
                }
            }
        }
    }
}

fn cancel_request(watch_id: i64) -> WatchRequest {
    WatchRequest { request: Some(WatchUnion::Cancel(WatchCancelRequest { watch_id })) }
}

/// The maximum pause after a stream that received nothing. A new holder's watch must be established
/// within [`GRANT_DELAY`](crate::queue::GRANT_DELAY).
const STREAM_PAUSE_MAX: Duration = Duration::from_millis(200);
const DELETED: i32 = 1;
