//! Watches keys for deletion, over one stream for all of them. Wakes waiters and sends loss
//! notifications to the registries. The engine decides what follows.

use std::collections::HashMap;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::stream::poll_fn;
use registry_core::{Invalidations, Key};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::link::Link;
use crate::wire::{
    NO_PUTS, WATCH, WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest,
    WatchResponse, WatchUnion,
};

/// The handle of the task that owns the stream. Dropping it ends the task.
pub(crate) struct Ears {
    orders: Orders,
    next_id: AtomicI64,
    listeners: Arc<Listeners>,
    task: JoinHandle<()>,
}

// Unbounded: each waiter and each holder has at most one watch.
type Orders = mpsc::UnboundedSender<Order>;

enum Order {
    Begin { id: i64, key: Vec<u8>, from: i64, who: Who, told: Arc<Told> },
    End(i64),
}

/// The recipient of a watch's result.
enum Who {
    /// A waiter, which reads the result from its [`Watch`].
    Waiter,
    Holder(Key),
}

/// The result of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// The key was deleted.
    Deleted,
    /// The watch ended without a deletion.
    Nothing,
}

/// The registries that receive loss notifications.
#[derive(Default)]
struct Listeners(Mutex<Vec<Invalidations>>);

/// The handle of a watch. Dropping it cancels the watch.
#[derive(Debug)]
pub(crate) struct Watch {
    id: i64,
    told: Arc<Told>,
    orders: Orders,
}

/// The state of a watch.
#[derive(Debug, Default)]
struct Told {
    /// The member has confirmed the watch.
    confirmed: AtomicBool,
    over: AtomicBool,
    deleted: AtomicBool,
    /// Notified when the watch ends.
    ended: Notify,
}

impl Watch {
    /// Returns whether the watch has not ended.
    pub(crate) fn lives(&self) -> bool {
        !self.told.over.load(Ordering::Acquire)
    }

    /// Returns whether a deletion would be reported: the member has confirmed the watch, and its
    /// stream is not known to have ended.
    pub(crate) fn is_confirmed(&self) -> bool {
        self.told.confirmed.load(Ordering::Acquire) && self.lives()
    }

    /// Waits until the watch ends, and returns its result.
    pub(crate) fn heard(&self) -> impl Future<Output = Heard> + Send + use<> {
        let told = Arc::clone(&self.told);
        async move {
            loop {
                let mut ended = pin!(told.ended.notified());
                ended.as_mut().enable();
                if told.over.load(Ordering::Acquire) {
                    let deleted = told.deleted.load(Ordering::Acquire);
                    return if deleted { Heard::Deleted } else { Heard::Nothing };
                }
                ended.await;
            }
        }
    }

    /// Returns whether the deletion of the key was reported.
    pub(crate) fn heard_of_end(&self) -> bool {
        self.told.deleted.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.lives() {
            _ = self.orders.send(Order::End(self.id));
            self.told.over.store(true, Ordering::Release);
            self.told.ended.notify_waiters();
        }
    }
}

impl Ears {
    pub(crate) fn new(link: Link) -> Self {
        let (orders, received) = mpsc::unbounded_channel();
        let listeners = Arc::<Listeners>::default();
        let task = tokio::spawn(listen(link, received, Arc::clone(&listeners)));
        Self { orders, next_id: 1.into(), listeners, task }
    }

    /// Watches `name` for deletion, from the revision `from` on.
    pub(crate) fn wait(&self, name: Vec<u8>, from: i64) -> Watch {
        self.begin(name, from, Who::Waiter)
    }

    /// Watches `name`, by which this process holds `key`, from the revision `from` on. Sends a loss
    /// notification if the watch ends.
    pub(crate) fn watch_over(&self, key: &Key, name: Vec<u8>, from: i64) -> Watch {
        self.begin(name, from, Who::Holder(key.clone()))
    }

    fn begin(&self, key: Vec<u8>, from: i64, who: Who) -> Watch {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let told = Arc::<Told>::default();
        _ = self.orders.send(Order::Begin { id, key, from, who, told: Arc::clone(&told) });
        Watch { id, told, orders: self.orders.clone() }
    }

    /// Subscribes a registry to loss notifications.
    pub(crate) fn tell(&self, hints: Invalidations) {
        self.listeners.with(|all| all.push(hints));
    }

    /// Returns whether any open registry is subscribed to loss notifications.
    pub(crate) fn are_wanted(&self) -> bool {
        self.listeners.with(|all| !all.is_empty())
    }
}

impl Drop for Ears {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Ears {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ears").finish_non_exhaustive()
    }
}

impl Listeners {
    fn with<T>(&self, work: impl FnOnce(&mut Vec<Invalidations>) -> T) -> T {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(Invalidations::is_live);
        work(&mut all)
    }

    fn hear_of(&self, key: &Key) {
        let all = self.with(|all| all.clone());
        all.iter().for_each(|hints| hints.notify(key));
    }
}

/// All watches of the stream.
#[derive(Default)]
struct Watches(HashMap<i64, (Who, Arc<Told>)>);

impl Watches {
    /// Ends a watch and reports its result. Returns false if it has ended already.
    fn tell(&mut self, id: i64, heard: Heard, listeners: &Listeners) -> bool {
        let Some((who, told)) = self.0.remove(&id) else { return false };
        told.deleted.store(heard == Heard::Deleted, Ordering::Release);
        told.over.store(true, Ordering::Release);
        told.ended.notify_waiters();
        match who {
            Who::Waiter => {}
            // Also without a deletion event: the key may have been deleted after the watch ended.
            Who::Holder(key) => listeners.hear_of(&key),
        }
        true
    }

    fn confirm(&self, id: i64) {
        if let Some((_, told)) = self.0.get(&id) {
            told.confirmed.store(true, Ordering::Release);
        }
    }

    fn tell_all(&mut self, listeners: &Listeners) {
        for id in self.0.keys().copied().collect::<Vec<_>>() {
            self.tell(id, Heard::Nothing, listeners);
        }
    }
}

async fn listen(link: Link, mut orders: mpsc::UnboundedReceiver<Order>, listeners: Arc<Listeners>) {
    let mut watches = Watches::default();
    while let Some(order) = orders.recv().await {
        // Watches end with their stream, because later deletions would not be reported.
        hear(&link, &mut orders, order, &mut watches, &listeners).await;
        watches.tell_all(&listeners);
    }
}

/// Serves one stream until it ends.
async fn hear(
    link: &Link,
    orders: &mut mpsc::UnboundedReceiver<Order>,
    first: Order,
    watches: &mut Watches,
    listeners: &Listeners,
) {
    let (requests, mut outgoing) = mpsc::unbounded_channel();
    let obey = |order: Order, watches: &mut Watches| match order {
        Order::Begin { id, key, from, who, told } => {
            watches.0.insert(id, (who, told));
            let filters = vec![NO_PUTS];
            let create = WatchCreateRequest { key, start_revision: from, filters, watch_id: id };
            requests.send(WatchRequest { request: Some(WatchUnion::Create(create)) }).is_ok()
        }
        Order::End(id) => {
            // A watch that has ended is cancelled already.
            watches.0.remove(&id).is_none() || requests.send(cancel(id)).is_ok()
        }
    };
    if !obey(first, watches) || watches.0.is_empty() {
        return;
    }
    let Ok(wire) = link.wire().await else { return };
    let mut departures = link.departures();
    let outgoing = poll_fn(move |cx| outgoing.poll_recv(cx));
    let Ok(mut news) = link.stream(&wire, WATCH, outgoing).await else {
        link.leave(wire.number, true);
        return;
    };
    wire.heard();
    // When a progress request was sent that the member has not answered.
    let mut asked: Option<Instant> = None;
    loop {
        let has_watches = !watches.0.is_empty();
        let check_at = asked.unwrap_or_else(|| wire.last_heard()) + link.patience();
        tokio::select! {
            order = orders.recv() => {
                if !order.is_some_and(|order| obey(order, watches)) {
                    return;
                }
            }
            answer = news.message() => {
                let Ok(Some(answer)) = answer else {
                    link.leave(wire.number, true);
                    return;
                };
                wire.heard();
                asked = None;
                let WatchResponse { watch_id, created, canceled, events } = answer;
                if canceled && watch_id < 0 {
                    // A watch that the member could not create has no id. The stream ends, because
                    // the affected caller is unknown.
                    return;
                }
                if created && !canceled {
                    watches.confirm(watch_id);
                }
                if canceled {
                    watches.tell(watch_id, Heard::Nothing, listeners);
                } else if events.iter().any(|event| event.kind == DELETED)
                    && watches.tell(watch_id, Heard::Deleted, listeners)
                {
                    _ = requests.send(cancel(watch_id));
                }
            }
            left = departures.wait_for(|&left| left >= wire.number) => {
                drop(left);
                return;
            }
            () = sleep_until(check_at), if has_watches => {
                if wire.was_heard_within(link.patience()) {
                    asked = None;
                } else if asked.is_some() {
                    link.leave(wire.number, true);
                    return;
                } else {
                    // Waiters rely on a silent stream, so a dead stream must be detected.
                    asked = Some(Instant::now());
                    let progress = WatchUnion::Progress(WatchProgressRequest {});
                    _ = requests.send(WatchRequest { request: Some(progress) });
                }
            }
        }
    }
}

fn cancel(watch_id: i64) -> WatchRequest {
    WatchRequest { request: Some(WatchUnion::Cancel(WatchCancelRequest { watch_id })) }
}

const DELETED: i32 = 1;
