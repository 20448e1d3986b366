//! Tests functions with `#[locked]` over the in-process store: keys, options, modes, losses and
//! re-entry. `lock-registry-macros` tests the messages for wrong uses.
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::borrow::Cow;
use std::error::Error;
use std::fmt::{Debug, Display};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lock_registry::modes::ClaimMode;
use lock_registry::{
    FencingToken, LockError, LockOptions, LockRegistry, LostReason, Owner, Registry, locked,
};
use tokio::sync::{Notify, oneshot};

/// A re-export of `lock-registry` under another name, for the option `crate`.
mod kit {
    pub(crate) use lock_registry as locks;
}

#[derive(Debug)]
enum PayError {
    Busy,
    Lost(LostReason),
    Other(LockError),
    Declined,
}

impl From<LockError> for PayError {
    fn from(error: LockError) -> Self {
        match error {
            LockError::WaitElapsed { .. } => Self::Busy,
            LockError::Lost { reason, .. } => Self::Lost(reason),
            other => Self::Other(other),
        }
    }
}

#[derive(Debug)]
struct Order {
    id: u64,
    customer: String,
}

impl Order {
    fn key(&self) -> String {
        format!("orders/{}", self.id)
    }
}

struct Shop<R> {
    locks: R,
    started: Notify,
    running: AtomicUsize,
    paid: Vec<u64>,
}

impl<R: LockRegistry> Shop<R> {
    fn new(locks: R) -> Self {
        Self { locks, started: Notify::new(), running: AtomicUsize::new(0), paid: Vec::new() }
    }

    /// `running` counts each body until it returns or is dropped. The body waits for `until`.
    #[locked(key = "orders/{id}", registry = self.locks, wait = "20s")]
    async fn hold(&self, id: u64, until: impl Future) -> Result<u64, PayError> {
        struct Running<'a>(&'a AtomicUsize);
        impl Drop for Running<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        let others = self.running.fetch_add(1, Ordering::SeqCst);
        let _running = Running(&self.running);
        assert_eq!(others, 0, "two bodies run at once");
        self.started.notify_one();
        until.await;
        Ok(id)
    }

    #[locked(key = "orders/{id}", registry = "self.locks", wait = "0s")]
    async fn try_once(&self, id: u64) -> Result<(), PayError> {
        Ok(())
    }

    /// Adds the order to `paid`. Returns `Declined` if `price` is 0.
    #[locked(key = order.key(), registry = &self.locks, token = token)]
    async fn pay(&mut self, order: Order, price: u32) -> Result<(&[u64], FencingToken), PayError> {
        if price == 0 {
            return Err(PayError::Declined);
        }
        let Order { id, customer } = order;
        drop(customer);
        self.paid.push(id);
        Ok((&self.paid, token))
    }
}

async fn assert_free(registry: &Registry, key: &str) {
    registry.idle().await;
    assert!(registry.obtain(key).try_lock().await.unwrap().is_some(), "{key} is still locked");
}

async fn shop() -> (Registry, Arc<Shop<Registry>>) {
    let registry = Registry::in_memory().unwrap();
    (registry.clone(), Arc::new(Shop::new(registry)))
}

#[tokio::test]
async fn calls_of_one_key_run_one_after_the_other() {
    let (registry, shop) = shop().await;
    let calls: Vec<_> = (0..4)
        .map(|_| {
            let shop = Arc::clone(&shop);
            tokio::spawn(async move { shop.hold(1, tokio::task::yield_now()).await })
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap(), 1);
    }
    assert_free(&registry, "orders/1").await;
}

#[tokio::test]
async fn a_call_of_another_key_does_not_wait() {
    let (_registry, shop) = shop().await;
    let (end, ended) = oneshot::channel::<()>();
    let held = tokio::spawn({
        let shop = Arc::clone(&shop);
        async move { shop.hold(1, ended).await }
    });
    shop.started.notified().await;
    shop.try_once(2).await.unwrap();
    end.send(()).unwrap();
    held.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_busy_lock_is_an_error_of_the_function() {
    let (registry, shop) = shop().await;
    let guard = registry.obtain("orders/1").lock().await.unwrap();
    assert!(matches!(shop.try_once(1).await, Err(PayError::Busy)));
    guard.unlock().await.unwrap();
    shop.try_once(1).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_call_waits_for_its_lock_as_long_as_stated() {
    let (registry, shop) = shop().await;
    let _guard = registry.obtain("orders/1").lock().await.unwrap();
    let start = tokio::time::Instant::now();
    assert!(matches!(shop.hold(1, async {}).await, Err(PayError::Busy)));
    let waited = start.elapsed();
    assert!((20..25).contains(&waited.as_secs()), "{waited:?}");
}

#[tokio::test]
async fn the_body_is_dropped_when_the_lock_is_lost() {
    let (registry, shop) = shop().await;
    let call = tokio::spawn({
        let shop = Arc::clone(&shop);
        async move { shop.hold(1, std::future::pending::<()>()).await }
    });
    shop.started.notified().await;
    _ = registry.close(Duration::ZERO).await;
    let error = call.await.unwrap().unwrap_err();
    assert!(matches!(error, PayError::Lost(LostReason::Closed)), "{error:?}");
    assert_eq!(shop.running.load(Ordering::SeqCst), 0);
    let error = shop.try_once(1).await.unwrap_err();
    assert!(matches!(error, PayError::Other(LockError::Closed)), "{error:?}");
}

static WAIT: std::sync::Mutex<Duration> = std::sync::Mutex::new(Duration::from_secs(20));

#[locked(key = "settings", registry = registry, wait = *WAIT.lock().unwrap())]
async fn with_a_wait_from_a_mutex(registry: &Registry) -> Result<(), LockError> {
    Ok(())
}

/// If the mutex guard existed during the wait, the future would not be `Send`.
#[tokio::test]
async fn a_mutex_in_an_option_is_not_locked_during_the_wait() {
    let registry = Registry::in_memory().unwrap();
    let guard = registry.obtain("settings").lock().await.unwrap();
    let call = tokio::spawn({
        let registry = registry.clone();
        async move { with_a_wait_from_a_mutex(&registry).await }
    });
    tokio::task::yield_now().await;
    assert!(WAIT.try_lock().is_ok());
    guard.unlock().await.unwrap();
    call.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_dropped_call_releases_its_lock() {
    let (registry, shop) = shop().await;
    tokio::select! {
        biased;
        _ = shop.hold(1, std::future::pending::<()>()) => unreachable!("the body never ends"),
        () = shop.started.notified() => {}
    }
    assert_eq!(shop.running.load(Ordering::SeqCst), 0);
    assert_free(&registry, "orders/1").await;
}

#[tokio::test]
async fn a_panic_in_the_body_releases_the_lock() {
    let (registry, shop) = shop().await;
    let call = tokio::spawn(async move { shop.hold(1, async { panic!("on purpose") }).await });
    assert!(call.await.unwrap_err().is_panic());
    assert_free(&registry, "orders/1").await;
}

#[tokio::test]
async fn a_method_may_return_early_move_its_arguments_and_borrow_itself() {
    let registry = Registry::in_memory().unwrap();
    let mut shop = Shop::new(Arc::new(registry.clone()) as Arc<dyn LockRegistry>);
    let order = |id| Order { id, customer: "me".to_owned() };
    assert!(matches!(shop.pay(order(1), 0).await, Err(PayError::Declined)));
    let (_, first) = shop.pay(order(7), 1).await.unwrap();
    let (paid, second) = shop.pay(order(7), 1).await.unwrap();
    assert_eq!(paid, [7, 7]);
    assert!(first < second, "{first:?} {second:?}");
    assert_free(&registry, "orders/7").await;
}

/// Asserts that `key` is locked when `call` has notified `reached`, and then drops the call.
async fn assert_locked_during(registry: &Registry, key: &str, call: impl Future, reached: &Notify) {
    tokio::select! {
        biased;
        _ = call => unreachable!("the body never ends"),
        () = reached.notified() => {
            let holders = registry.obtain(key).holders().await.unwrap();
            assert_eq!(holders.len(), 1, "{key} is not locked");
        }
    }
    registry.idle().await;
}

#[tokio::test]
async fn a_key_contains_arguments_their_fields_and_methods() {
    #[locked(
        key = "{{{tenant}}}/{order.id:04}/{order.customer.len()}/{names[1]}/{pair}/{r#type:?}",
        registry = locks,
    )]
    async fn work(
        locks: &dyn LockRegistry,
        tenant: &str,
        order: Order,
        names: [&'static str; 2],
        (pair, _): (u8, u8),
        r#type: Option<bool>,
        reached: &Notify,
    ) -> Result<(), LockError> {
        drop(order);
        reached.notify_one();
        std::future::pending().await
    }
    let (registry, reached) = (Registry::in_memory().unwrap(), Notify::new());
    let order = Order { id: 7, customer: "me".to_owned() };
    let call = work(&registry, "acme", order, ["a", "b"], (9, 0), None, &reached);
    assert_locked_during(&registry, "{acme}/0007/2/b/9/None", call, &reached).await;

    #[locked(key = name, registry = locks)]
    async fn named(
        locks: &Registry,
        name: Cow<'_, str>,
        reached: &Notify,
    ) -> Result<(), LockError> {
        drop(name);
        reached.notify_one();
        std::future::pending().await
    }
    let call = named(&registry, Cow::Borrowed("a {name}"), &reached);
    assert_locked_during(&registry, "a {name}", call, &reached).await;
}

#[tokio::test]
async fn a_key_contains_fields_of_the_receiver() {
    struct Tenant(&'static str, Registry);
    impl Tenant {
        #[locked(key = "{self.0}/{id}", registry = self.1)]
        async fn work(&self, id: u64, reached: &Notify) -> Result<(), LockError> {
            reached.notify_one();
            std::future::pending().await
        }
    }
    let (registry, reached) = (Registry::in_memory().unwrap(), Notify::new());
    let tenant = Tenant("acme", registry.clone());
    assert_locked_during(&registry, "acme/7", tenant.work(7, &reached), &reached).await;
}

#[tokio::test]
async fn the_attribute_accepts_fragments_of_other_macros() {
    macro_rules! locked_function {
        ($name:ident, $key:literal, $wait:expr, $id:ident: $type:ty) => {
            #[locked(key = $key, registry = locks, wait = $wait)]
            async fn $name(locks: &Registry, $id: $type) -> Result<$type, LockError> {
                Ok($id)
            }
        };
    }
    locked_function!(ship, "orders/{id}", "0s", id: u64);
    let registry = Registry::in_memory().unwrap();
    let guard = registry.obtain("orders/7").lock().await.unwrap();
    assert!(matches!(ship(&registry, 7).await, Err(LockError::WaitElapsed { .. })));
    guard.unlock().await.unwrap();
    assert_eq!(ship(&registry, 7).await.unwrap(), 7);
}

#[tokio::test]
async fn an_empty_key_is_refused_when_the_function_is_called() {
    #[locked(key = name, registry = locks)]
    async fn named(locks: &Registry, name: &str) -> Result<(), LockError> {
        unreachable!("the key is invalid")
    }
    let registry = Registry::in_memory().unwrap();
    assert!(matches!(named(&registry, "").await, Err(LockError::InvalidKey(_))));
}

#[tokio::test]
async fn readers_run_at_once_and_permits_are_counted() {
    #[locked(key = "book", registry = locks, mode = "shared", wait = "0s", crate = "kit::locks")]
    async fn read(locks: &Registry) -> Result<(), LockError> {
        Ok(())
    }
    #[locked(key = "book", registry = locks, mode = "upgradable", wait = Duration::ZERO)]
    async fn review(locks: &Registry) -> Result<(), LockError> {
        Ok(())
    }
    #[locked(key = "book", registry = locks, mode = "exclusive", wait = "0s")]
    async fn write(locks: &Registry) -> Result<(), LockError> {
        Ok(())
    }
    #[locked(
        key = "pool",
        registry = locks,
        mode = ClaimMode::Permits { take: 1, of: units },
        wait = "0s",
    )]
    async fn permit(locks: &Registry, units: u32) -> Result<(), LockError> {
        Ok(())
    }
    let registry = Registry::in_memory().unwrap();
    let reader = registry.obtain("book").read().await.unwrap();
    read(&registry).await.unwrap();
    review(&registry).await.unwrap();
    assert!(matches!(write(&registry).await, Err(LockError::WaitElapsed { .. })));
    reader.unlock().await.unwrap();

    let mode = ClaimMode::Permits { take: 2, of: 3 };
    let two = registry.obtain("pool").acquire(mode, LockOptions::new()).await.unwrap();
    permit(&registry, 3).await.unwrap();
    assert!(matches!(permit(&registry, 4).await, Err(LockError::UnitsMismatch { .. })));
    two.unlock().await.unwrap();
}

#[tokio::test]
async fn the_options_of_the_lock_are_those_of_the_attribute() {
    #[locked(
        key = "job",
        registry = locks,
        options = *options,
        lease = "90s",
        max_hold = "2m",
        min_hold = Duration::from_millis(1),
        wait = "1s",
    )]
    async fn job(
        locks: &Registry,
        options: Box<LockOptions>,
        reached: &Notify,
    ) -> Result<(), LockError> {
        reached.notify_one();
        std::future::pending().await
    }
    let (registry, reached) = (Registry::in_memory().unwrap(), Notify::new());
    let options = Box::new(LockOptions::new().label("nightly").wait(Duration::from_secs(5)));
    tokio::select! {
        biased;
        _ = job(&registry, options, &reached) => unreachable!("the body never ends"),
        () = reached.notified() => {
            let holders = registry.obtain("job").holders().await.unwrap();
            assert_eq!(holders[0].label.as_deref(), Some("nightly"));
            assert!(holders[0].lease_left.unwrap() > Duration::from_secs(80), "{holders:?}");
        }
    }
}

trait Accounts {
    /// Books an amount.
    fn book(
        &self,
        account: &str,
        amount: i64,
    ) -> impl Future<Output = Result<i64, LockError>> + Send;
}

struct Ledger(Arc<dyn LockRegistry>);

impl Ledger {
    #[locked(key = "ledgers", registry = self.0)]
    async fn settle(self: Arc<Self>) -> Result<usize, LockError> {
        Ok(Arc::strong_count(&self))
    }
}

impl Accounts for Ledger {
    #[locked(key = "accounts/{account}", registry = self.0)]
    async fn book(&self, account: &str, amount: i64) -> Result<i64, LockError> {
        tokio::task::yield_now().await;
        Ok(amount)
    }
}

#[tokio::test]
async fn methods_of_traits_and_generic_functions_may_be_locked() {
    #[locked(key = "generic/{key}", registry = registry)]
    async fn generic<'a, R, K, T, const N: usize>(
        registry: &'a R,
        key: K,
        mut values: [T; N],
        replacement: &'a T,
    ) -> Result<[T; N], Box<dyn Error + Send + Sync>>
    where
        R: LockRegistry + ?Sized,
        K: Display + Debug,
        T: Clone + Send + Sync,
    {
        if let Some(last) = values.last_mut() {
            *last = replacement.clone();
        }
        // Converts an error of another type, as in a function without the attribute.
        let _: u32 = "7".parse()?;
        Ok(values)
    }
    #[locked(key = "opaque", registry = locks)]
    async fn opaque(locks: Registry) -> Result<impl Display + Send, LockError> {
        Ok("hidden")
    }
    #[locked(key = "coerced", registry = locks)]
    async fn coerced(locks: &Registry, fail: bool) -> Result<Box<dyn Display + Send>, LockError> {
        if fail {
            Err(LockError::Closed)?;
        }
        Ok(Box::new(7))
    }
    type Outcome = Result<u8, LockError>;
    #[locked(key = "alias", registry = locks)]
    async fn alias(locks: &Registry) -> Outcome {
        Ok(1)
    }
    let registry = Registry::in_memory().unwrap();
    let dynamic: Arc<dyn LockRegistry> = Arc::new(registry.clone());
    assert_eq!(generic(&*dynamic, 'k', [1, 2], &3).await.unwrap(), [1, 3]);
    assert_eq!(opaque(registry.clone()).await.unwrap().to_string(), "hidden");
    assert_eq!(coerced(&registry, false).await.unwrap().to_string(), "7");
    assert!(matches!(coerced(&registry, true).await, Err(LockError::Closed)));
    assert_eq!(alias(&registry).await.unwrap(), 1);
    let ledger = Arc::new(Ledger(dynamic));
    let booked = tokio::spawn(async move { ledger.book("a", 5).await });
    assert_eq!(booked.await.unwrap().unwrap(), 5);
}

#[tokio::test]
async fn a_method_may_consume_an_arc_of_itself() {
    let ledger = Arc::new(Ledger(Arc::new(Registry::in_memory().unwrap())));
    let second_reference = Arc::clone(&ledger);
    assert_eq!(tokio::spawn(ledger.settle()).await.unwrap().unwrap(), 2);
    drop(second_reference);
}

#[tokio::test]
async fn the_body_does_not_see_names_of_the_expansion() {
    const LOCK: &str = "lock of the caller";
    #[locked(key = "names/{guard}", registry = lock)]
    async fn names(lock: &Registry, guard: u8, fail: u8, error: u8) -> Result<u8, LockError> {
        _ = (lock, LOCK);
        Ok(guard + fail + error)
    }
    let registry = Registry::in_memory().unwrap();
    assert_eq!(names(&registry, 1, 2, 3).await.unwrap(), 6);
}

#[tokio::test]
async fn a_call_inside_of_another_reenters_the_lock_of_their_owner() {
    #[locked(key = "a", registry = locks, token = outer)]
    async fn outside(locks: &Registry) -> Result<bool, LockError> {
        Ok(inside(locks).await? == outer)
    }
    #[locked(key = "a", registry = locks, wait = "0s", token = inner)]
    async fn inside(locks: &Registry) -> Result<FencingToken, LockError> {
        Ok(inner)
    }
    let registry = Registry::in_memory().unwrap();
    assert!(matches!(outside(&registry).await, Err(LockError::WaitElapsed { .. })));
    assert!(Owner::scope(outside(&registry)).await.unwrap());
    assert_free(&registry, "a").await;
}

#[tokio::test]
async fn other_attributes_and_lints_stay_in_effect() {
    #[tracing::instrument(skip_all, fields(id))]
    #[locked(key = "orders/{id}", registry = locks)]
    #[must_use]
    async fn inside(locks: &Registry, id: u64) -> Result<u64, LockError> {
        Ok(id)
    }
    #[expect(unused_variables, reason = "this lint must see the body")]
    #[locked(key = "orders/{id}", registry = locks, wait = "0s")]
    #[tracing::instrument(skip(locks))]
    async fn outside(locks: &Registry, id: u64) -> Result<u64, LockError> {
        let unused = 1;
        Ok(id)
    }
    let registry = Registry::in_memory().unwrap();
    assert_eq!(inside(&registry, 1).await.unwrap(), 1);
    let guard = registry.obtain("orders/1").lock().await.unwrap();
    assert!(matches!(outside(&registry, 1).await, Err(LockError::WaitElapsed { .. })));
    guard.unlock().await.unwrap();
    assert_eq!(outside(&registry, 1).await.unwrap(), 1);
}
