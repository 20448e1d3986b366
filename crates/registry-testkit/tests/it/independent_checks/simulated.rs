//! A lock, its clients and a fenced resource, simulated in steps with a virtual clock. The lock is
//! correct or has one chosen bug.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use registry_core::{ClaimMode, FencingToken};
use registry_testkit::history::{
    AcquireRecord, ConvertRecord, History, HoldRecord, Recorder, ReleaseRecord, WriteRecord,
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
    ReleaseByOtherClaim,
    /// A release of a lost lock reports success.
    ReleaseReportsSuccessAfterLoss,
    /// A guard counts its lease from the reply instead of from before the request.
    LeaseCountedFromReply,
    AcceptsEveryWrite,
    /// The resource does not verify the lock. This is valid fencing, but weaker than guarded
    /// writes.
    FencesByNewestWriteOnly,
    OutageReportedAsBusy,
    ReaderAlongsideWriter,
    TwoUpgradable,
    UpgradeAlongsideReaders,
    UpgradeKeepsToken,
    /// A permit is granted if its own units fit, whatever other permits have taken.
    UnitsNotSummed,
}

/// The store: the holders with the ends of their leases, and the tokens. Each acquisition has its
/// own claim number.
struct SimulatedStore {
    /// The claim, the end of its lease, and its mode.
    held: Vec<(u64, u64, ClaimMode)>,
    claims: u64,
    newest_token: u64,
    newest_write: u64,
}

enum SimulatedClient {
    Idle,
    Acquiring {
        acquire_record: AcquireRecord,
        mode: ClaimMode,
        called: u64,
        effect: Option<Effect>,
    },
    Holding(SimulatedHold),
    Writing {
        write_record: WriteRecord,
        accepted: Option<bool>,
        hold: SimulatedHold,
    },
    Converting {
        convert_record: ConvertRecord,
        hold: UnrecordedHold,
        effect: Option<Effect>,
    },
    Releasing {
        release_record: ReleaseRecord,
        claim: u64,
        freed: Option<bool>,
    },
}

struct SimulatedHold {
    record: HoldRecord,
    hold: UnrecordedHold,
}

/// A hold without its [`HoldRecord`], which a conversion consumes.
#[derive(Clone, Copy)]
struct UnrecordedHold {
    claim: u64,
    token: u64,
    until: u64,
    mode: ClaimMode,
}

/// What a request did in the store. The client has not received the response yet.
enum Effect {
    Granted { claim: u64, token: u64 },
    Busy,
}

struct SimulatedLock {
    rng: Rng,
    bug: Option<SimulatedBug>,
    /// The modes that clients request.
    modes: &'static [ClaimMode],
    lease: u64,
    now: Arc<AtomicU64>,
    recorder: Recorder,
    store: SimulatedStore,
}

/// Simulates several clients that use one exclusive lock, and returns the recorded history.
pub(crate) fn simulate(seed: Seed, bug: Option<SimulatedBug>) -> History {
    simulate_with(seed, bug, &[ClaimMode::Exclusive])
}

/// Simulates several clients that use one lock in all modes, and returns the recorded history.
pub(crate) fn simulate_modes(seed: Seed, bug: Option<SimulatedBug>) -> History {
    use ClaimMode::{Exclusive, Permits, Shared, Upgradable};
    let permits: &[ClaimMode] = &[
        Permits { take: 1, of: 3 },
        Permits { take: 2, of: 3 },
        Exclusive,
        Permits { take: 1, of: 3 },
    ];
    let has_permits = bug == Some(SimulatedBug::UnitsNotSummed) || seed.get().is_multiple_of(3);
    let modes = if has_permits { permits } else { &[Shared, Upgradable, Exclusive, Shared] };
    simulate_with(seed, bug, modes)
}

fn simulate_with(seed: Seed, bug: Option<SimulatedBug>, modes: &'static [ClaimMode]) -> History {
    let now = Arc::new(AtomicU64::new(0));
    let clock = Arc::clone(&now);
    let mut lock = SimulatedLock {
        rng: seed.rng(),
        bug,
        modes,
        lease: LEASE,
        now,
        recorder: Recorder::new(move || clock.load(Ordering::Relaxed)),
        store: SimulatedStore { held: Vec::new(), claims: 0, newest_token: 0, newest_write: 0 },
    };
    if lock.is_lossless() {
        lock.lease *= 1_000;
    }
    let mut clients: Vec<SimulatedClient> = (0..CLIENTS).map(|_| SimulatedClient::Idle).collect();
    for _ in 0..STEPS {
        lock.now.fetch_add(lock.rng.u64(1..12), Ordering::Relaxed);
        let now = lock.now();
        lock.store.held.retain(|(_, until, _)| now < *until);
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

    /// Returns whether no reply, client or lease is lost. A false "busy" answer is detectable only
    /// if no outcome is unknown.
    fn is_lossless(&self) -> bool {
        self.bug == Some(SimulatedBug::OutageReportedAsBusy)
    }

    /// Returns whether a reply or a client is lost in this step.
    fn is_lost(&mut self) -> bool {
        !self.is_lossless() && self.one_in(10)
    }

    fn step(&mut self, number: u32, client: SimulatedClient) -> SimulatedClient {
        match client {
            SimulatedClient::Idle => {
                let mode = match self.modes {
                    [mode] => *mode,
                    modes => modes[self.rng.usize(..modes.len())],
                };
                SimulatedClient::Acquiring {
                    called: self.now(),
                    acquire_record: self.recorder.acquire_as(number, KEY, mode),
                    mode,
                    effect: None,
                }
            }
            SimulatedClient::Acquiring { acquire_record, mode, called, effect: None } => {
                let effect = self.acquire(mode);
                if effect.is_none() && self.is_lost() {
                    // The client gave up, and its request never arrived.
                    return SimulatedClient::Idle;
                }
                SimulatedClient::Acquiring { acquire_record, mode, called, effect }
            }
            SimulatedClient::Acquiring { acquire_record, mode, called, effect: Some(effect) } => {
                self.answer(acquire_record, mode, called, effect)
            }
            SimulatedClient::Holding(hold) => self.hold(number, hold),
            SimulatedClient::Converting { convert_record, hold, effect: None } => {
                let effect = self.convert(hold);
                SimulatedClient::Converting { convert_record, hold, effect }
            }
            SimulatedClient::Converting { convert_record, hold, effect: Some(effect) } => {
                self.answer_conversion(convert_record, hold, effect)
            }
            SimulatedClient::Writing { write_record, accepted: None, hold } => {
                let accepted = Some(self.write(hold.hold));
                SimulatedClient::Writing { write_record, accepted, hold }
            }
            SimulatedClient::Writing { write_record, accepted: Some(accepted), hold } => {
                match accepted {
                    _ if self.is_lost() => write_record.failed(),
                    true => write_record.accepted(),
                    false => write_record.rejected(),
                }
                SimulatedClient::Holding(hold)
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
    fn acquire(&mut self, mode: ClaimMode) -> Option<Effect> {
        let free = self.fits(mode, None);
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
        self.store.held.push((claim, self.now() + self.lease, mode));
        Some(Effect::Granted { claim, token })
    }

    /// Returns whether a claim of `mode` is compatible with all held claims except `own`.
    fn fits(&self, mode: ClaimMode, own: Option<u64>) -> bool {
        let others = || self.store.held.iter().filter(|(claim, ..)| Some(*claim) != own);
        let taken: u32 = others().map(|(.., held)| held.units()).sum();
        if let ClaimMode::Permits { take, of } = mode {
            let sum =
                if self.bug == Some(SimulatedBug::UnitsNotSummed) { take } else { take + taken };
            return others().all(|(.., held)| held.units() > 0) && sum <= of;
        }
        let is_ignored = |held: ClaimMode| match self.bug {
            Some(SimulatedBug::ReaderAlongsideWriter) => mode == ClaimMode::Shared,
            Some(SimulatedBug::TwoUpgradable) => held == mode && mode == ClaimMode::Upgradable,
            Some(SimulatedBug::UpgradeAlongsideReaders) => own.is_some(),
            _ => false,
        };
        others().all(|(.., held)| held.is_compatible(mode) || is_ignored(*held))
    }

    /// Applies a conversion to the store. Returns `None` if it continues to wait.
    fn convert(&mut self, hold: UnrecordedHold) -> Option<Effect> {
        let UnrecordedHold { claim, token, mode, .. } = hold;
        let to = converted(mode);
        if !self.holds(claim) || !self.fits(to, Some(claim)) {
            return (!self.holds(claim) || self.one_in(3)).then_some(Effect::Busy);
        }
        let keeps_token =
            to != ClaimMode::Exclusive || self.bug == Some(SimulatedBug::UpgradeKeepsToken);
        let token = if keeps_token { token } else { self.store.newest_token + 1 };
        self.store.newest_token = self.store.newest_token.max(token);
        let until = self.now() + self.lease;
        for held in self.store.held.iter_mut().filter(|(held, ..)| *held == claim) {
            *held = (claim, until, to);
        }
        Some(Effect::Granted { claim, token })
    }

    /// Delivers the answer of a conversion to its client.
    fn answer_conversion(
        &mut self,
        convert_record: ConvertRecord,
        hold: UnrecordedHold,
        effect: Effect,
    ) -> SimulatedClient {
        if self.is_lost() {
            convert_record.failed();
            return SimulatedClient::Idle;
        }
        let Effect::Granted { claim, token } = effect else {
            return SimulatedClient::Holding(SimulatedHold {
                record: convert_record.refused(),
                hold,
            });
        };
        // A conversion never shortens a lease, so the previous end is a safe limit.
        let valid_for = Duration::from_nanos(hold.until.saturating_sub(self.now()));
        let record = convert_record.granted(FencingToken::new(token), || valid_for);
        let hold = UnrecordedHold { claim, token, mode: converted(hold.mode), ..hold };
        SimulatedClient::Holding(SimulatedHold { record, hold })
    }

    /// Delivers the answer of an acquisition to its client.
    fn answer(
        &mut self,
        acquire_record: AcquireRecord,
        mode: ClaimMode,
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
        let record = acquire_record.granted(FencingToken::new(token), || valid_for);
        let hold = UnrecordedHold { claim, token, until, mode };
        SimulatedClient::Holding(SimulatedHold { record, hold })
    }

    fn hold(&mut self, number: u32, held: SimulatedHold) -> SimulatedClient {
        let SimulatedHold { record, hold } = held;
        let is_exclusive = hold.mode == ClaimMode::Exclusive;
        let may_convert = self.modes.contains(&ClaimMode::Upgradable)
            && (is_exclusive || hold.mode == ClaimMode::Upgradable);
        match self.rng.u8(..10) {
            // The process was killed. Its hold remains in the store only.
            0 if self.is_lost() => SimulatedClient::Idle,
            0..=2 => {
                if self.now() >= hold.until {
                    record.lost();
                }
                SimulatedClient::Holding(SimulatedHold { record, hold })
            }
            3 | 4 if may_convert => SimulatedClient::Converting {
                convert_record: record.convert(converted(hold.mode)),
                hold,
                effect: None,
            },
            3..=5 if is_exclusive => {
                let fencing_token = FencingToken::new(hold.token).unwrap();
                let write_record = self.recorder.write(number, KEY, fencing_token);
                let hold = SimulatedHold { record, hold };
                SimulatedClient::Writing { write_record, accepted: None, hold }
            }
            _ => SimulatedClient::Releasing {
                release_record: record.release(),
                claim: hold.claim,
                freed: None,
            },
        }
    }

    fn write(&mut self, hold: UnrecordedHold) -> bool {
        let UnrecordedHold { claim, token, .. } = hold;
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
        if self.bug == Some(SimulatedBug::ReleaseByOtherClaim) {
            return self.store.held.pop().is_some();
        }
        let own = self.holds(claim);
        self.store.held.retain(|(holder, ..)| *holder != claim);
        own
    }

    fn holds(&self, claim: u64) -> bool {
        self.store.held.iter().any(|(holder, ..)| *holder == claim)
    }
}

/// Returns the mode to which a client converts a lock of `mode`.
fn converted(mode: ClaimMode) -> ClaimMode {
    match mode {
        ClaimMode::Exclusive => ClaimMode::Shared,
        _ => ClaimMode::Exclusive,
    }
}
