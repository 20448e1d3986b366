//! A lock, its clients and a fenced resource, simulated in steps with a virtual clock. The lock is
//! correct or has one chosen bug.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use registry_core::FencingToken;
use registry_testkit::history::{
    AcquireRecord, History, HoldRecord, Recorder, ReleaseRecord, WriteRecord,
};
use registry_testkit::seed::Seed;

const KEY: &str = "simulated";
const CLIENTS: usize = 6;
const STEPS: usize = 400;
const LEASE: u64 = 150;

/// A bug of the lock or of the resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SimulatedBug {
    /// A grant removes the lock from its current holder.
    GrantWhileHeld,
    /// Two clients may hold the lock, and neither they nor the store detect it: a split brain.
    TwoHolders,
    DuplicateToken,
    DecreasingTokens,
    /// A release frees the lock of any holder and reports success.
    ReleaseWithoutOwner,
    /// A release of a lost lock reports success.
    ReleaseReportsSuccessAfterLoss,
    /// A guard counts its lease from the reply instead of from before the request.
    LeaseCountedFromReply,
    AcceptsEveryWrite,
    /// The resource does not verify the lock. This is valid fencing, but weaker than guarded
    /// writes.
    FencesByNewestWriteOnly,
    OutageReportedAsBusy,
}

/// The store: the holders with the ends of their leases, and the tokens. Each acquisition has its
/// own claim number.
struct SimulatedStore {
    /// At most one holder, unless the bug is a split brain.
    held: Vec<(u64, u64)>,
    claims: u64,
    newest_token: u64,
    newest_write: u64,
}

enum SimulatedClient {
    Idle,
    Acquiring { acquire_record: AcquireRecord, called: u64, effect: Option<Effect> },
    Holding { hold_record: HoldRecord, claim: u64, token: u64, until: u64 },
    Writing { write_record: WriteRecord, accepted: Option<bool>, hold: (HoldRecord, u64, u64, u64) },
    Releasing { release_record: ReleaseRecord, claim: u64, freed: Option<bool> },
}

enum Effect {
    Granted { claim: u64, token: u64 },
    Busy,
}

struct SimulatedLock {
    rng: Rng,
    bug: Option<SimulatedBug>,
    lease: u64,
    now: Arc<AtomicU64>,
    recorder: Recorder,
    store: SimulatedStore,
}

/// Simulates several clients that use one lock, and returns the recorded history.
pub(crate) fn simulate(seed: Seed, bug: Option<SimulatedBug>) -> History {
    let now = Arc::new(AtomicU64::new(0));
    let clock = Arc::clone(&now);
    let mut lock = SimulatedLock {
        rng: seed.rng(),
        bug,
        lease: LEASE,
        now,
        recorder: Recorder::new(move || clock.load(Ordering::Relaxed)),
        store: SimulatedStore { held: Vec::new(), claims: 0, newest_token: 0, newest_write: 0 },
    };
    if lock.is_quiet() {
        lock.lease *= 1_000;
    }
    let mut clients: Vec<SimulatedClient> = (0..CLIENTS).map(|_| SimulatedClient::Idle).collect();
    for _ in 0..STEPS {
        lock.now.fetch_add(lock.rng.u64(1..12), Ordering::Relaxed);
        let now = lock.now();
        lock.store.held.retain(|(_, until)| now < *until);
        let number = lock.rng.usize(..CLIENTS);
        let client = std::mem::replace(&mut clients[number], SimulatedClient::Idle);
        clients[number] = lock.step(number as u32, client);
    }
    lock.recorder.history()
}

impl SimulatedLock {
    fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    /// Returns whether the simulated lock has this bug and shows it in this step.
    fn has_bug_now(&mut self, bug: SimulatedBug) -> bool {
        self.bug == Some(bug) && self.rng.u8(..3) == 0
    }

    fn one_in(&mut self, n: u8) -> bool {
        self.rng.u8(..n) == 0
    }

    /// A false "busy" answer is detectable only if no outcome is unknown, so this bug disables all
    /// losses.
    fn is_quiet(&self) -> bool {
        self.bug == Some(SimulatedBug::OutageReportedAsBusy)
    }

    /// Returns whether a reply or a client is lost in this step.
    fn is_lost(&mut self) -> bool {
        !self.is_quiet() && self.one_in(10)
    }

    fn step(&mut self, number: u32, client: SimulatedClient) -> SimulatedClient {
        match client {
            SimulatedClient::Idle => SimulatedClient::Acquiring {
                called: self.now(),
                acquire_record: self.recorder.acquire(number, KEY),
                effect: None,
            },
            SimulatedClient::Acquiring { acquire_record, called, effect: None } => {
                let effect = self.acquire();
                if effect.is_none() && self.is_lost() {
                    // The client gave up, and its request never arrived.
                    return SimulatedClient::Idle;
                }
                SimulatedClient::Acquiring { acquire_record, called, effect }
            }
            SimulatedClient::Acquiring { acquire_record, called, effect: Some(effect) } => {
                self.answer(acquire_record, called, effect)
            }
            SimulatedClient::Holding { hold_record, claim, token, until } => {
                self.hold(number, hold_record, claim, token, until)
            }
            SimulatedClient::Writing { write_record, accepted: None, hold } => {
                let accepted = Some(self.write(hold.1, hold.2));
                SimulatedClient::Writing { write_record, accepted, hold }
            }
            SimulatedClient::Writing { write_record, accepted: Some(accepted), hold } => {
                match accepted {
                    _ if self.is_lost() => write_record.failed(),
                    true => write_record.accepted(),
                    false => write_record.rejected(),
                }
                let (hold_record, claim, token, until) = hold;
                SimulatedClient::Holding { hold_record, claim, token, until }
            }
            SimulatedClient::Releasing { release_record, claim, freed: None } => {
                let freed = Some(self.release(claim));
                SimulatedClient::Releasing { release_record, claim, freed }
            }
            SimulatedClient::Releasing { release_record, freed: Some(freed), .. } => {
                match freed {
                    _ if self.is_lost() => release_record.failed(),
                    _ if self.is_lost() => drop(release_record),
                    true => release_record.freed(),
                    false if self.has_bug_now(SimulatedBug::ReleaseReportsSuccessAfterLoss) => {
                        release_record.freed()
                    }
                    false => release_record.not_held(),
                }
                SimulatedClient::Idle
            }
        }
    }

    /// Applies an acquisition to the store. Returns `None` if it continues to wait.
    fn acquire(&mut self) -> Option<Effect> {
        let free = self.store.held.is_empty();
        if free && self.has_bug_now(SimulatedBug::OutageReportedAsBusy) {
            return Some(Effect::Busy);
        }
        if !free && !self.has_bug_now(SimulatedBug::TwoHolders) {
            if !self.has_bug_now(SimulatedBug::GrantWhileHeld) {
                return self.one_in(4).then_some(Effect::Busy);
            }
            self.store.held.clear();
        }
        let newest = self.store.newest_token;
        let token = if newest > 0 && self.has_bug_now(SimulatedBug::DuplicateToken) {
            newest
        } else if newest > 3 && self.has_bug_now(SimulatedBug::DecreasingTokens) {
            self.rng.u64(1..newest)
        } else {
            newest + self.rng.u64(1..4)
        };
        self.store.newest_token = newest.max(token);
        self.store.claims += 1;
        let claim = self.store.claims;
        self.store.held.push((claim, self.now() + self.lease));
        Some(Effect::Granted { claim, token })
    }

    /// Delivers the answer of an acquisition to its client.
    fn answer(
        &mut self,
        acquire_record: AcquireRecord,
        called: u64,
        effect: Effect,
    ) -> SimulatedClient {
        let Effect::Granted { claim, token } = effect else {
            acquire_record.busy();
            return SimulatedClient::Idle;
        };
        if self.is_lost() {
            // The reply is lost. The store keeps the grant until its lease ends.
            acquire_record.failed();
            return SimulatedClient::Idle;
        }
        let start = match self.bug {
            Some(SimulatedBug::LeaseCountedFromReply) => self.now(),
            _ => called,
        };
        let until = start + self.lease;
        let valid_for = Duration::from_nanos(until.saturating_sub(self.now()));
        let hold_record = acquire_record.granted(FencingToken::new(token), || valid_for);
        SimulatedClient::Holding { hold_record, claim, token, until }
    }

    fn hold(
        &mut self,
        number: u32,
        hold_record: HoldRecord,
        claim: u64,
        token: u64,
        until: u64,
    ) -> SimulatedClient {
        match self.rng.u8(..10) {
            // The process was killed. Its hold remains in the store only.
            0 if self.is_lost() => SimulatedClient::Idle,
            0..=2 => {
                if self.now() >= until {
                    hold_record.lost();
                }
                SimulatedClient::Holding { hold_record, claim, token, until }
            }
            3..=5 => {
                let fencing_token = FencingToken::new(token).unwrap();
                let write_record = self.recorder.write(number, KEY, fencing_token);
                let hold = (hold_record, claim, token, until);
                SimulatedClient::Writing { write_record, accepted: None, hold }
            }
            _ => SimulatedClient::Releasing {
                release_record: hold_record.release(),
                claim,
                freed: None,
            },
        }
    }

    fn write(&mut self, claim: u64, token: u64) -> bool {
        let newer = token >= self.store.newest_write;
        let holds = self.holds(claim);
        let accepted = match self.bug {
            Some(SimulatedBug::AcceptsEveryWrite) => true,
            Some(SimulatedBug::FencesByNewestWriteOnly) => newer,
            _ => newer && holds,
        };
        if accepted {
            self.store.newest_write = token;
        }
        accepted
    }

    fn release(&mut self, claim: u64) -> bool {
        if self.bug == Some(SimulatedBug::ReleaseWithoutOwner) {
            return self.store.held.pop().is_some();
        }
        let own = self.holds(claim);
        self.store.held.retain(|(holder, _)| *holder != claim);
        own
    }

    fn holds(&self, claim: u64) -> bool {
        self.store.held.iter().any(|(holder, _)| *holder == claim)
    }
}
