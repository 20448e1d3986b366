//! Two servers, one coupon, and a pause that is longer than the lease.
//!
//! Server A acquires the coupon's lock and reads that the coupon is unused. Then A is paused: by a
//! garbage collection, a closed laptop, or the migration of a virtual machine. Nothing in A runs,
//! so nothing in A can notice that its lease expires. Server B is granted the lock, as it should
//! be, and redeems the coupon. Then A resumes exactly where it was, and redeems it again.
//!
//! The lock works as specified: a lease cannot stop a program that does not run. Only the resource
//! can reject the second write. The program runs three times: without a fence, with the fence of
//! the database, and with a resource that compares tokens.
//!
//! Each server is a thread with its own runtime. The pause blocks that thread, and with it the
//! lease renewer of A.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use lock_registry::{
    FencingToken, Registry, RegistryConfig,
    sqlite::{Fence, FenceError},
};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{Connection, Row};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Result<()> {
    // A fence needs the locks and the coupons in the same database.
    let shop = std::env::args().nth(1).map_or_else(|| PathBuf::from("shop.db"), PathBuf::from);
    block_on(create_coupon_table(&shop))?;

    let redeemed = two_servers(&shop, Coupon { id: 1, fenced: false })?;
    println!("without fence: redeemed {redeemed} times");

    let redeemed = two_servers(&shop, Coupon { id: 2, fenced: true })?;
    println!("with guard.fence(&mut tx): redeemed {redeemed} times");

    let accepted = two_servers_and_a_printer(&shop)?;
    println!("with a resource that checks tokens: {accepted} of 2 labels printed");
    Ok(())
}

#[derive(Clone, Copy)]
struct Coupon {
    id: i64,
    fenced: bool,
}

/// Runs both servers once and returns how often the coupon was redeemed.
fn two_servers(shop: &Path, coupon: Coupon) -> Result<i64> {
    let (a_paused, b_starts) = channel();
    let (b_done, a_resumes) = channel();
    let server = |pause: ServerPause| {
        let shop = shop.to_owned();
        thread::spawn(move || block_on(redeem(&shop, coupon, pause)))
    };
    let a = server(ServerPause::UntilResumed { paused: a_paused, resume: a_resumes });
    b_starts.recv()?;
    let b = server(ServerPause::None);
    let b = b.join().map_err(|_| "server B panicked")??;
    b_done.send(())?;
    let a = a.join().map_err(|_| "server A panicked")??;
    println!("  server B: {b}; server A, after its pause: {a}");
    block_on(times_redeemed(shop, coupon.id))
}

/// Runs one server, which reads and writes while it holds the lock.
// ANCHOR: redeem
async fn redeem(shop: &Path, coupon: Coupon, pause: ServerPause) -> Result<&'static str> {
    let registry = open_locks(shop).await?;
    let mut database = open_shop(shop).await?;

    let guard = registry.obtain(&format!("coupon/{}", coupon.id)).lock().await?;
    let used = is_used(&mut database, coupon.id).await?;
    if used {
        return Ok("refused, it was used before");
    }

    pause.block(); // longer than the lease

    let mut tx = database.begin().await?;
    if coupon.fenced {
        // The database itself verifies the lock in the transaction of the write. No other client is
        // granted the lock before the transaction has ended.
        match guard.fence(&mut tx).await {
            Ok(()) => {}
            Err(FenceError::Lost { .. }) => return Ok("stopped by the fence, nothing was written"),
            Err(error) => return Err(error.into()),
        }
    }
    sqlx::query("INSERT INTO redemption (coupon) VALUES (?)")
        .bind(coupon.id)
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;

    // Without a fence, `unlock` is the first call of server A that returns the loss: too late.
    match guard.unlock().await {
        Ok(()) => Ok("redeemed"),
        Err(_) => Ok("redeemed, but `unlock` returned the loss"),
    }
}
// ANCHOR_END: redeem

// ANCHOR: resource
/// The resource has seen a newer token.
#[derive(Debug)]
struct StaleToken;

/// A resource other than a database: it stores the newest token that it has seen.
#[derive(Default)]
struct LabelPrinter {
    newest: Mutex<Option<FencingToken>>,
}

impl LabelPrinter {
    /// Prints, unless a newer holder of the same lock has already printed.
    fn print(&self, token: FencingToken, label: &str) -> std::result::Result<(), StaleToken> {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.is_some_and(|newest| token < newest) {
            return Err(StaleToken);
        }
        *newest = Some(token);
        println!("  printed: {label}");
        Ok(())
    }
}
// ANCHOR_END: resource

/// Runs both servers with the printer. Returns the number of labels printed.
fn two_servers_and_a_printer(shop: &Path) -> Result<usize> {
    let printer = Arc::new(LabelPrinter::default());
    let (a_paused, b_starts) = channel();
    let (b_done, a_resumes) = channel();
    let server = |label: &'static str, pause: ServerPause| {
        let (shop, printer) = (shop.to_owned(), Arc::clone(&printer));
        thread::spawn(move || block_on(print_label(&shop, &printer, label, pause)))
    };
    let a = server("label of A", ServerPause::UntilResumed { paused: a_paused, resume: a_resumes });
    b_starts.recv()?;
    let b = server("label of B", ServerPause::None).join().map_err(|_| "server B panicked")??;
    b_done.send(())?;
    let a = a.join().map_err(|_| "server A panicked")??;
    println!("  server B: {b:?}; server A, after its pause: {a:?}");
    Ok([a, b].iter().filter(|printed| printed.is_ok()).count())
}

// ANCHOR: give_token
async fn print_label(
    shop: &Path,
    printer: &LabelPrinter,
    label: &str,
    pause: ServerPause,
) -> Result<std::result::Result<(), StaleToken>> {
    let registry = open_locks(shop).await?;
    let guard = registry.obtain("printer").lock().await?;
    pause.block(); // longer than the lease
    Ok(printer.print(guard.fencing_token(), label))
}
// ANCHOR_END: give_token

/// Blocks the whole server, including its lease renewer, until the other server is done.
enum ServerPause {
    None,
    UntilResumed { paused: Sender<()>, resume: Receiver<()> },
}

impl ServerPause {
    fn block(self) {
        if let Self::UntilResumed { paused, resume } = self {
            // Both calls fail if the other server has ended. The pause is then over.
            let _ = paused.send(());
            let _ = resume.recv();
        }
    }
}

async fn open_locks(shop: &Path) -> Result<Registry> {
    // A short lease keeps the program fast.
    let config = RegistryConfig::new()
        .url(format!("sqlite:{}", shop.display()))
        .lease(Duration::from_millis(500));
    Ok(config.connect().await?)
}

async fn open_shop(shop: &Path) -> Result<SqliteConnection> {
    let options = SqliteConnectOptions::new()
        .filename(shop)
        .create_if_missing(true)
        .busy_timeout(Duration::from_secs(30));
    Ok(SqliteConnection::connect_with(&options).await?)
}

async fn create_coupon_table(shop: &Path) -> Result<()> {
    let mut database = open_shop(shop).await?;
    sqlx::query("CREATE TABLE IF NOT EXISTS redemption (coupon INTEGER NOT NULL)")
        .execute(&mut database)
        .await?;
    sqlx::query("DELETE FROM redemption").execute(&mut database).await?;
    Ok(())
}

async fn is_used(database: &mut SqliteConnection, coupon: i64) -> Result<bool> {
    let row = sqlx::query("SELECT count(*) FROM redemption WHERE coupon = ?")
        .bind(coupon)
        .fetch_one(database)
        .await?;
    Ok(row.try_get::<i64, _>(0)? > 0)
}

async fn times_redeemed(shop: &Path, coupon: i64) -> Result<i64> {
    let mut database = open_shop(shop).await?;
    let row = sqlx::query("SELECT count(*) FROM redemption WHERE coupon = ?")
        .bind(coupon)
        .fetch_one(&mut database)
        .await?;
    Ok(row.try_get(0)?)
}

fn block_on<F: Future>(work: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime can be built");
    runtime.block_on(work)
}
