//! A lock, its clients and a fenced resource, simulated in steps with a virtual clock. The lock is
//! correct or has one chosen bug.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use registry_core::FencingToken;
use registry_testkit::history::{Acquiring, History, Holding, Recorder, Releasing, Writing};
use registry_testkit::seed::Seed;

const KEY: &str = "simulated";
const CLIENTS: usize = 6;
const STEPS: usize = 400;
const LEASE: u64 = 150;

/// A bug of the lock or of the resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bug {
    /// A grant removes the lock from its current holder.
    GrantsWhileHeld,
    /// Two clients may hold the lock, and neither they nor the store detect it: a split brain.
    LetsTwoHold,
    GivesTokenTwice,
    TokensGoBack,
    /// A release frees the lock of any holder and reports success.
    ReleasesForOthers,
    /// A release of a lost lock reports success.
    SwallowsLoss,
    /// A guard counts its lease from the reply instead of from before the request.
    CountsFromReply,
    TakesEveryWrite,
    /// The resource does not verify the lock. This is valid fencing, but weaker than guarded
    /// writes.
    FencesByNewestWrite,
    SaysBusyForTrouble,
}

/// The store: the holders with the ends of their leases, and the tokens. Each acquisition has its
/// own claim number.
struct Store {
    /// At most one holder, unless the bug is a split brain.
    held: Vec<(u64, u64)>,
    claims: u64,
    newest_token: u64,
    newest_write: u64,
}

enum Client {
    Idle,
    Asking { asking: Acquiring, called: u64, effect: Option<Effect> },
    Holding { holding: Holding, claim: u64, token: u64, until: u64 },
    Writing { writing: Writing, accepted: Option<bool>, hold: (Holding, u64, u64, u64) },
    Releasing { releasing: Releasing, claim: u64, freed: Option<bool> },
}

enum Effect {
    Granted { claim: u64, token: u64 },
    Busy,
}

struct World {
    rng: Rng,
    bug: Option<Bug>,
    lease: u64,
    now: Arc<AtomicU64>,
    recorder: Recorder,
    store: Store,
}

/// Simulates several clients that use one lock, and returns the recorded history.
pub(crate) fn simulate(seed: Seed, bug: Option<Bug>) -> History {
    let now = Arc::new(AtomicU64::new(0));
    let clock = Arc::clone(&now);
    let mut world = World {
        rng: seed.rng(),
        bug,
        lease: LEASE,
        now,
        recorder: Recorder::new(move || clock.load(Ordering::Relaxed)),
        store: Store { held: Vec::new(), claims: 0, newest_token: 0, newest_write: 0 },
    };
    if world.is_quiet() {
        world.lease *= 1_000;
    }
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| Client::Idle).collect();
    for _ in 0..STEPS {
        world.now.fetch_add(world.rng.u64(1..12), Ordering::Relaxed);
        let now = world.now();
        world.store.held.retain(|(_, until)| now < *until);
        let number = world.rng.usize(..CLIENTS);
        let client = std::mem::replace(&mut clients[number], Client::Idle);
        clients[number] = world.step(number as u32, client);
    }
    world.recorder.history()
}

impl World {
    fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    /// Returns whether the simulated lock has this bug and shows it in this step.
    fn shows(&mut self, bug: Bug) -> bool {
        self.bug == Some(bug) && self.rng.u8(..3) == 0
    }

    fn one_in(&mut self, many: u8) -> bool {
        self.rng.u8(..many) == 0
    }

    /// A false "busy" answer is detectable only if no outcome is unknown, so this bug disables all
    /// losses.
    fn is_quiet(&self) -> bool {
        self.bug == Some(Bug::SaysBusyForTrouble)
    }

    /// Returns whether a reply or a client is lost in this step.
    fn loses(&mut self) -> bool {
        !self.is_quiet() && self.one_in(10)
    }

    fn step(&mut self, number: u32, client: Client) -> Client {
        match client {
            Client::Idle => Client::Asking {
                called: self.now(),
                asking: self.recorder.acquire(number, KEY),
                effect: None,
            },
            Client::Asking { asking, called, effect: None } => {
                let effect = self.acquire();
                if effect.is_none() && self.loses() {
                    // The client gave up, and its request never arrived.
                    return Client::Idle;
                }
                Client::Asking { asking, called, effect }
            }
            Client::Asking { asking, called, effect: Some(effect) } => {
                self.answer(asking, called, effect)
            }
            Client::Holding { holding, claim, token, until } => {
                self.hold(number, holding, claim, token, until)
            }
            Client::Writing { writing, accepted: None, hold } => {
                let accepted = Some(self.write(hold.1, hold.2));
                Client::Writing { writing, accepted, hold }
            }
            Client::Writing { writing, accepted: Some(accepted), hold } => {
                match accepted {
                    _ if self.loses() => writing.failed(),
                    true => writing.accepted(),
                    false => writing.rejected(),
                }
                let (holding, claim, token, until) = hold;
                Client::Holding { holding, claim, token, until }
            }
            Client::Releasing { releasing, claim, freed: None } => {
                let freed = Some(self.release(claim));
                Client::Releasing { releasing, claim, freed }
            }
            Client::Releasing { releasing, freed: Some(freed), .. } => {
                match freed {
                    _ if self.loses() => releasing.failed(),
                    _ if self.loses() => drop(releasing),
                    true => releasing.freed(),
                    false if self.shows(Bug::SwallowsLoss) => releasing.freed(),
                    false => releasing.not_held(),
                }
                Client::Idle
            }
        }
    }

    /// Applies an acquisition to the store. Returns `None` if it continues to wait.
    fn acquire(&mut self) -> Option<Effect> {
        let free = self.store.held.is_empty();
        if free && self.shows(Bug::SaysBusyForTrouble) {
            return Some(Effect::Busy);
        }
        if !free && !self.shows(Bug::LetsTwoHold) {
            if !self.shows(Bug::GrantsWhileHeld) {
                return self.one_in(4).then_some(Effect::Busy);
            }
            self.store.held.clear();
        }
        let newest = self.store.newest_token;
        let token = if newest > 0 && self.shows(Bug::GivesTokenTwice) {
            newest
        } else if newest > 3 && self.shows(Bug::TokensGoBack) {
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
    fn answer(&mut self, asking: Acquiring, called: u64, effect: Effect) -> Client {
        let Effect::Granted { claim, token } = effect else {
            asking.busy();
            return Client::Idle;
        };
        if self.loses() {
            // The reply is lost. The store keeps the grant until its lease ends.
            asking.failed();
            return Client::Idle;
        }
        let counted_from = match self.bug {
            Some(Bug::CountsFromReply) => self.now(),
            _ => called,
        };
        let until = counted_from + self.lease;
        let valid_for = Duration::from_nanos(until.saturating_sub(self.now()));
        let holding = asking.granted(FencingToken::new(token), || valid_for);
        Client::Holding { holding, claim, token, until }
    }

    fn hold(
        &mut self,
        number: u32,
        holding: Holding,
        claim: u64,
        token: u64,
        until: u64,
    ) -> Client {
        match self.rng.u8(..10) {
            // The process was killed. Its hold remains in the store only.
            0 if self.loses() => Client::Idle,
            0..=2 => {
                if self.now() >= until {
                    holding.lost();
                }
                Client::Holding { holding, claim, token, until }
            }
            3..=5 => {
                let carried = FencingToken::new(token).unwrap();
                let writing = self.recorder.write(number, KEY, carried);
                let hold = (holding, claim, token, until);
                Client::Writing { writing, accepted: None, hold }
            }
            _ => Client::Releasing { releasing: holding.release(), claim, freed: None },
        }
    }

    fn write(&mut self, claim: u64, token: u64) -> bool {
        let newer = token >= self.store.newest_write;
        let holds = self.holds(claim);
        let accepted = match self.bug {
            Some(Bug::TakesEveryWrite) => true,
            Some(Bug::FencesByNewestWrite) => newer,
            _ => newer && holds,
        };
        if accepted {
            self.store.newest_write = token;
        }
        accepted
    }

    fn release(&mut self, claim: u64) -> bool {
        if self.bug == Some(Bug::ReleasesForOthers) {
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
