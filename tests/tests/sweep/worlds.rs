//! The stores of the cancellation sweep, the faults in front of them, and the checks after a future
//! was dropped. The dropped operations are the scenes in `sweep.rs`.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use registry_conformance::sweep::{Swept, sweep};
use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{
    FencingToken, LockBackend, LockError, LockGuard, LockRegistry, MemoryBackend, Registry,
};
use registry_jdbc::{SqliteBackend, SqliteConfig};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::fair::FairBackend;
use crate::faults::{LATE, chance, delays, lasting_losses, passing_losses};
use crate::wire::Wire;

/// The one key that all callers compete for.
pub(crate) const KEY: &str = "orders/42";

/// No future takes this many polls.
const POLLS_MAX: usize = 1_000;

/// The time until a waiter notices that a lease has expired.
const NOTICE: Duration = Duration::from_millis(10);

/// A store, and the faults between it and the registry whose futures are dropped.
pub(crate) struct World {
    name: String,
    store: Store,
    trouble: Option<Trouble>,
    free: Free,
    /// The maximum delay of a request that still reaches the store.
    late: Duration,
    lease: Duration,
    handoff: u32,
    /// Added to every limit where time is real and the machine may be busy.
    slack: Duration,
}

/// The faults of our requests, from the first poll of the future on.
#[derive(Clone)]
enum Trouble {
    Faults(Faults),
    /// The first acquire fails at once and reaches the store after this time.
    LateAcquire(Duration),
    /// Requests and replies take this time, whether or not their caller still waits.
    Distance(Duration),
}

/// How soon the key is free after the last caller that competed for it is gone.
#[derive(Clone, Copy)]
enum Free {
    /// Within a second: no reply is lost.
    Promptly,
    /// As soon as the engine has verified the outcome: the store recovers, but the engine must ask
    /// again.
    Soon,
    /// At the end of the lease at the latest: the store does not recover.
    WithLease,
}

enum Store {
    Memory(MemoryBackend),
    Fair(FairBackend),
    Sqlite(PathBuf),
}

/// One run in a world: the registry whose future is dropped, and the registry of another process.
pub(crate) struct Stage {
    pub(crate) ours: Registry,
    pub(crate) theirs: Registry,
    link: Option<Link>,
}

/// The fault layer between our registry and the store.
enum Link {
    Faulty(Arc<FaultyBackend>),
    Wire(Arc<Wire>),
}

/// The operation that is swept, and the other activity around it.
pub(crate) struct Scene {
    /// The future that is dropped. Its guards are dropped after it.
    pub(crate) swept: Pin<Box<dyn Future<Output = Vec<LockGuard>>>>,
    /// Other callers in the same registry or elsewhere. They must all complete.
    pub(crate) others: JoinSet<()>,
    /// Guards that must still hold after the drop. They are dropped afterwards.
    pub(crate) kept: Vec<Arc<LockGuard>>,
    /// Whether the swept operation closes our registry.
    pub(crate) closes: bool,
}

impl Scene {
    pub(crate) fn of(swept: impl Future<Output = Vec<LockGuard>> + 'static) -> Self {
        Self { swept: Box::pin(swept), others: JoinSet::new(), kept: Vec::new(), closes: false }
    }

    pub(crate) fn beside(mut self, other: impl Future<Output = ()> + Send + 'static) -> Self {
        self.others.spawn(other);
        self
    }
}

impl World {
    fn new(name: impl Into<String>, store: Store) -> Self {
        Self {
            name: name.into(),
            store,
            trouble: None,
            free: Free::Promptly,
            late: Duration::ZERO,
            lease: Duration::from_secs(30),
            handoff: 32,
            slack: Duration::ZERO,
        }
    }

    fn faulty(self, faults: Faults) -> Self {
        Self { trouble: Some(Trouble::Faults(faults)), ..self }
    }

    fn free(self, free: Free) -> Self {
        Self { free, ..self }
    }

    fn late(self, late: Duration) -> Self {
        Self { late, ..self }
    }

    /// How long a key stays locked after its holder has died.
    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    async fn stage(&self) -> Stage {
        let store = self.backend().await;
        let link = match &self.trouble {
            None => None,
            Some(Trouble::Faults(_)) => {
                let faulty = FaultyBackend::new(Arc::clone(&store), Faults::none());
                Some(Link::Faulty(Arc::new(faulty)))
            }
            Some(Trouble::LateAcquire(_) | Trouble::Distance(_)) => {
                Some(Link::Wire(Arc::new(Wire::to(Arc::clone(&store)))))
            }
        };
        let backend: Arc<dyn LockBackend> = match &link {
            None => store,
            Some(Link::Faulty(faulty)) => Arc::clone(faulty) as _,
            Some(Link::Wire(wire)) => Arc::clone(wire) as _,
        };
        let open = |backend| {
            Registry::builder(backend).lease(self.lease).handoff(self.handoff).build().unwrap()
        };
        Stage { ours: open(backend), theirs: open(self.backend().await), link }
    }

    async fn backend(&self) -> Arc<dyn LockBackend> {
        match &self.store {
            Store::Memory(store) => Arc::new(store.clone()),
            Store::Fair(store) => Arc::new(store.clone()),
            Store::Sqlite(path) => {
                Arc::new(SqliteBackend::open(SqliteConfig::new(path)).await.unwrap())
            }
        }
    }

    /// How long the key may stay locked after the last caller that competed for it is gone.
    fn free_within(&self) -> Duration {
        let promised = match self.free {
            Free::Promptly => Duration::from_secs(1),
            Free::Soon => Duration::from_secs(4),
            Free::WithLease => self.lease,
        };
        promised + self.late + NOTICE + self.slack
    }

    /// Sweeps what `scene` creates, with and without another caller that waits for the lock in our
    /// registry.
    #[expect(clippy::async_yields_async, reason = "the future is the product: the sweep drives it")]
    pub(crate) async fn sweep(&self, mut scene: impl AsyncFnMut(&Self, &Stage) -> Scene) {
        for bystander in [false, true] {
            let running = RefCell::new(None);
            let last_token = Cell::new(None);
            sweep(
                async || {
                    let stage = self.stage().await;
                    let Scene { swept, mut others, kept, closes } = scene(self, &stage).await;
                    if bystander {
                        let lock = stage.ours.obtain(KEY);
                        others.spawn(async move {
                            match lock.lock().await {
                                Ok(guard) => drop(guard),
                                Err(LockError::Closed) if closes => {}
                                Err(error) => panic!("a bystander suffers: {error:?}"),
                            }
                        });
                    }
                    match (&stage.link, &self.trouble) {
                        (Some(Link::Faulty(faulty)), Some(Trouble::Faults(faults))) => {
                            faulty.apply(faults.clone());
                        }
                        (Some(Link::Wire(wire)), Some(Trouble::LateAcquire(after))) => {
                            wire.breaks_once(*after);
                        }
                        (Some(Link::Wire(wire)), Some(Trouble::Distance(latency))) => {
                            wire.takes(*latency);
                        }
                        _ => {}
                    }
                    running.replace(Some((stage, others, kept, closes)));
                    swept
                },
                POLLS_MAX,
                async |end| {
                    let (stage, others, kept, closes) = running.take().unwrap();
                    let run = format!("{self}, bystander: {bystander}, {}", shown(&end));
                    let aftermath = Aftermath { world: self, stage, closes, run };
                    last_token.set(aftermath.check(end, others, kept, last_token.get()).await);
                },
            )
            .await;
        }
    }
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with handoff {}", self.name, self.handoff)
    }
}

fn shown(end: &Swept<Vec<LockGuard>>) -> String {
    match end {
        Swept::Dropped { polls } => format!("dropped after {polls} polls"),
        Swept::DroppedWoken { polls } => format!("dropped after {polls} polls and a wake-up"),
        _ => "completed".to_owned(),
    }
}

struct Aftermath<'a> {
    world: &'a World,
    stage: Stage,
    closes: bool,
    run: String,
}

impl Aftermath<'_> {
    /// Fails unless the state is as if the dropped future had never existed. Returns the newest
    /// token.
    async fn check(
        self,
        end: Swept<Vec<LockGuard>>,
        mut others: JoinSet<()>,
        kept: Vec<Arc<LockGuard>>,
        last_token: Option<FencingToken>,
    ) -> Option<FencingToken> {
        let Self { world, stage, closes, run } = self;
        let free_within = world.free_within();
        drop(end);
        for guard in &kept {
            assert!(guard.is_held(), "{run}: a guard suffers");
        }
        drop(kept);

        // Other callers of the registry complete. Each may start with the key as the previous one
        // left it.
        let rounds = u32::try_from(others.len()).unwrap() + 1;
        let all_done = async {
            while let Some(other) = others.join_next().await {
                other.unwrap();
            }
        };
        timeout(free_within * rounds, all_done)
            .await
            .unwrap_or_else(|_| panic!("{run}: somebody else waits for ever"));

        // Another client acquires the key, with a newer token.
        let gone_at = Instant::now();
        let guard = timeout(free_within, stage.theirs.obtain(KEY).lock())
            .await
            .unwrap_or_else(|_| panic!("{run}: the key is not free after {free_within:?}"))
            .unwrap();
        let token = guard.fencing_token();
        assert!(token > last_token, "{run}: token {token:?} after {last_token:?}");
        guard.unlock().await.unwrap();

        // A late request does not lock the key again for longer than allowed.
        if !world.late.is_zero() {
            tokio::time::sleep(world.late).await;
            timeout(free_within, stage.theirs.obtain(KEY).lock())
                .await
                .unwrap_or_else(|_| panic!("{run}: the key is taken again"))
                .unwrap()
                .unlock()
                .await
                .unwrap();
        }

        // No state remains in the registry or in the store.
        let left = free_within.saturating_sub(gone_at.elapsed()) + world.lease + world.late;
        timeout(left, stage.ours.idle())
            .await
            .unwrap_or_else(|_| panic!("{run}: the janitor is not done after {left:?}"));
        assert_eq!(stage.ours.slots(), 0, "{run}: slots");
        assert_eq!(stage.ours.held(), 0, "{run}: held");
        if let Some(Link::Faulty(faulty)) = &stage.link {
            faulty.heal();
            faulty.settled().await;
        }
        if !closes {
            let guard = stage.ours.obtain(KEY).lock().await.unwrap();
            guard.unlock().await.unwrap();
        }
        let report = stage.ours.close(free_within).await;
        // A dropped `close` may already have taken the lock away from a guard. Where releases do
        // not arrive, it may also have abandoned the claim to its lease.
        let may_be_left = closes && matches!(world.free, Free::WithLease);
        let clean =
            if closes { report.abandoned <= usize::from(may_be_left) } else { report.is_clean() };
        assert!(clean, "{run}: {report:?}");
        let records = match &world.store {
            Store::Memory(store) => store.records(),
            Store::Fair(store) => store.records(),
            Store::Sqlite(_) => 0,
        };
        assert!(records == 0 || !world.late.is_zero(), "{run}: {records} records in the store");
        stage.theirs.close(free_within).await;
        token
    }
}

/// In-process stores, without faults and behind all kinds of faults. For paused time.
pub(crate) fn paused() -> Vec<World> {
    let mut worlds = Vec::new();
    for handoff in [32, 0] {
        let mut add = |world: World| worlds.push(World { handoff, ..world });
        let memory = |name: &str| World::new(name, Store::Memory(MemoryBackend::new()));
        add(memory("memory"));
        for (name, faults) in delays() {
            add(memory(name).faulty(faults));
        }
        for (name, faults) in passing_losses() {
            add(memory(name).faulty(faults).free(Free::Soon));
        }
        let trouble = Some(Trouble::Distance(Duration::from_millis(10)));
        add(World { trouble, ..memory("far away") });
        let after = Duration::from_millis(500);
        let trouble = Some(Trouble::LateAcquire(after));
        let world = memory("acquire fails and arrives later").free(Free::Soon).late(after);
        add(World { trouble, ..world });
        for (name, faults, late) in lasting_losses() {
            add(memory(name).faulty(faults).free(Free::WithLease).late(late));
        }
        for seed in 0..12 {
            let world = memory(&format!("chance {seed}")).faulty(chance(seed));
            add(world.free(Free::WithLease).late(LATE));
        }
    }
    let fair = |name: &str| World::new(name, Store::Fair(FairBackend::default()));
    worlds.push(fair("fair"));
    for (name, faults) in delays() {
        worlds.push(fair(&format!("fair, {name}")).faulty(faults));
    }
    for (name, faults) in passing_losses() {
        worlds.push(fair(&format!("fair, {name}")).faulty(faults).free(Free::Soon));
    }
    for (name, faults, late) in lasting_losses() {
        let world = fair(&format!("fair, {name}")).faulty(faults);
        worlds.push(world.free(Free::WithLease).late(late));
    }
    worlds
}

/// SQLite, without faults and behind some faults. For real time.
pub(crate) fn sqlite(folder: &tempfile::TempDir) -> Vec<World> {
    let file = |name: &str| {
        let path = folder.path().join(format!("{}.db", name.replace(' ', "-")));
        // 30 s is far more than any step takes here, and less than the lease.
        World {
            slack: Duration::from_secs(30),
            lease: Duration::from_secs(120),
            ..World::new(format!("sqlite, {name}"), Store::Sqlite(path))
        }
    };
    // A world in which a lease must expire has a short one.
    let lossy = |name: &str, faults| {
        let world = file(name).faulty(faults).free(Free::WithLease);
        World { lease: Duration::from_secs(1), ..world }
    };
    let ms = Duration::from_millis;
    vec![
        file("no faults"),
        World { handoff: 0, ..file("no hand-over") },
        file("slow").faulty(
            Faults::none()
                .always(Operation::Acquire, Fault::DelayReply(ms(3)))
                .always(Operation::Renew, Fault::DelayReply(ms(3)))
                .always(Operation::Release, Fault::DelayRequest(ms(3))),
        ),
        lossy("acquire unheard", Faults::none().at(Operation::Acquire, 1, Fault::LoseReply)),
        lossy("release unheard", Faults::none().at(Operation::Release, 1, Fault::LoseReply)),
        lossy("release lost", Faults::none().at(Operation::Release, 1, Fault::LoseRequest)),
    ]
}
