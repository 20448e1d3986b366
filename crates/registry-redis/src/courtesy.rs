//! Lets other processes go first. All who wait for a lock are told of a release at the same time, so those who are nearest to the server would
//! take it again and again, and nearest of all is whoever releases it and asks for it again. So a process that has had its
//! turn, while others waited, holds back until each of them may have had one too.
//!
//! Nothing depends on it: who holds back too long or not at all only takes the lock later or sooner.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Several times what it takes to hear of a release and to ask.
const AFTER_RELEASE: Duration = Duration::from_millis(2);
/// The same for those who have to hear of the release themselves.
const AFTER_MESSAGE: Duration = Duration::from_millis(1);

/// In a larger crowd everybody holds back nearly all the time anyway.
const TURNS_MAX: u32 = 16;

/// Debts are forgotten, for this may be a channel that nobody waits at any more.
const MEMORY: Duration = Duration::from_secs(1);
const DEBTS_MAX: usize = 4_096;

#[derive(Default)]
pub(crate) struct Courtesy(Mutex<HashMap<String, Debt>>);

/// What this process owes to the others that want a lock.
struct Debt {
    turns: u32,
    released_at: Instant,
    /// It has not asked since.
    is_fresh: bool,
}

impl Courtesy {
    /// Notes that this process has released `lock` while so many others waited.
    pub(crate) fn owe(&self, lock: &str, others: u32) {
        let now = Instant::now();
        let mut debts = self.debts();
        if debts.len() >= DEBTS_MAX {
            debts.retain(|_, debt| now.duration_since(debt.released_at) < MEMORY);
        }
        if debts.len() < DEBTS_MAX {
            let turns = others.min(TURNS_MAX);
            debts.insert(lock.to_owned(), Debt { turns, released_at: now, is_fresh: true });
        }
    }

    /// Waits as long as others may go first.
    pub(crate) async fn pay(&self, lock: &str) {
        if let Some(until) = self.due(lock) {
            tokio::time::sleep_until(until).await;
        }
    }

    fn due(&self, lock: &str) -> Option<Instant> {
        let mut debts = self.debts();
        let debt = debts.get_mut(lock)?;
        let now = Instant::now();
        let until = if std::mem::take(&mut debt.is_fresh) {
            debt.released_at + AFTER_RELEASE
        } else {
            now + AFTER_MESSAGE
        };
        debt.turns -= 1;
        let is_over = now.duration_since(debt.released_at) >= MEMORY;
        if debt.turns == 0 || is_over {
            debts.remove(lock);
        }
        (!is_over).then_some(until)
    }

    fn debts(&self) -> MutexGuard<'_, HashMap<String, Debt>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Courtesy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Courtesy").field("debts", &self.debts().len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_who_waited_may_go_first_once() {
        let courtesy = Courtesy::default();
        let began = Instant::now();
        courtesy.owe("k", 3);
        courtesy.pay("another").await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        courtesy.pay("k").await;
        assert_eq!(began.elapsed(), AFTER_RELEASE);
        courtesy.pay("k").await;
        courtesy.pay("k").await;
        let paid = began.elapsed();
        assert_eq!(paid, AFTER_RELEASE + 2 * AFTER_MESSAGE);
        courtesy.pay("k").await;
        assert_eq!(began.elapsed(), paid);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_holds_back_for_long() {
        let courtesy = Courtesy::default();
        courtesy.owe("k", u32::MAX);
        let began = Instant::now();
        for _ in 0..100 {
            courtesy.pay("k").await;
        }
        assert!(began.elapsed() < Duration::from_millis(20));
        courtesy.owe("k", 1);
        tokio::time::advance(MEMORY).await;
        let began = Instant::now();
        courtesy.pay("k").await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        for n in 0..2 * DEBTS_MAX {
            courtesy.owe(&n.to_string(), 1);
        }
        assert!(courtesy.debts().len() <= DEBTS_MAX);
    }
}
