//! A local permit for a lock that a backend acquires without the engine, such as a lock in the
//! caller's own transaction.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::clock::{Moment, sleep};
use crate::key::Key;
use crate::lease::LeaseTerms;
use crate::options::Terms;
use crate::registry::Registry;
use crate::slot::{Entry, NoEntry, Slot, Turn};
use crate::watch::{Parked, Suspended, Suspension};

impl Registry {
    /// Waits up to `wait` for the caller's turn in the local queue of `key`, then runs `attempts`
    /// and returns its output.
    ///
    /// A backend uses this for a lock that it acquires without the engine. Without a turn, such an
    /// acquisition would compete with local callers that hand the claim over without a request to
    /// the store.
    ///
    /// If the turn has not come after one second, `attempts` also runs while the caller waits for
    /// it: the caller in front may wait for something that this caller has locked already, which
    /// only the store can detect.
    ///
    /// The turn ends when `attempts` is ready, or after the registry's lease. In the latter case
    /// `attempts` continues while the caller waits for its next turn. `attempts` also runs if the
    /// turn does not come in time or the registry is closing.
    ///
    /// # Cancel safety
    /// Dropping the future releases the turn and drops `attempts`.
    pub async fn in_local_turn<T>(
        &self,
        key: &Key,
        wait: Duration,
        attempts: impl Future<Output = T>,
    ) -> T {
        let deadline = Moment::now().after(wait);
        let slot = self.slot(key.clone());
        let engine = slot.engine();
        let patience = engine.defaults.lease;
        let mut attempts = pin!(attempts);
        let mut turn = {
            let mut waiting = pin!(local_turn(&slot, deadline));
            tokio::select! {
                biased;
                turn = &mut waiting => turn,
                () = sleep(ALONE) => tokio::select! {
                    biased;
                    output = &mut attempts => return output,
                    turn = waiting => turn,
                },
            }
        };
        while let Some(held) = turn {
            let mut suspension = Suspension::new(engine.janitor.watch(), patience);
            let mut limit = pin!(sleep(patience));
            let run = suspension.run(held, |_, cx| match attempts.as_mut().poll(cx) {
                Poll::Ready(output) => Poll::Ready(Some(output)),
                Poll::Pending => limit.as_mut().poll(cx).map(|()| None),
            });
            if let Ok((_, Some(output))) = run.await {
                return output;
            }
            // Polled while waiting: a request of `attempts` may be in progress, and may be granted
            // at any time.
            turn = tokio::select! {
                biased;
                output = &mut attempts => return output,
                turn = local_turn(&slot, deadline) => turn,
            };
        }
        attempts.await
    }
}

/// How long a caller waits for its turn without an attempt.
const ALONE: Duration = Duration::from_secs(1);

/// Waits for a turn. Returns `None` if it did not come in time, or the registry is closing.
async fn local_turn(slot: &Arc<Slot>, deadline: Moment) -> Option<Turn> {
    let own = &slot.engine().default_terms;
    // A waiter with a `max_hold` gets no hand-over, so the caller in front of it releases its claim
    // in the store.
    let lease = LeaseTerms { max_hold: Some(Duration::ZERO), ..own.lease };
    let terms = Arc::new(Terms { lease, ..Terms::clone(own) });
    loop {
        match slot.enter(None, &terms, Some(deadline)).await {
            Ok(Entry::Turn(turn)) => return Some(turn),
            Err(NoEntry::PassedOn) => {}
            Ok(Entry::Again(_) | Entry::HandedOver(_))
            | Err(NoEntry::TimedOut(_) | NoEntry::Closed) => return None,
        }
    }
}

/// A caller whose future is not polled loses its turn. Its attempts continue when it is polled
/// again.
impl Parked for Turn {
    type Left = ();

    fn abandon(self, cell: &Arc<Suspended<Self>>) {
        drop(self);
        cell.leave(());
    }
}
