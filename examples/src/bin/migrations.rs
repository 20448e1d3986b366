//! Ten processes start at once, and one of them migrates the database:
//! `migrations postgres://HOST/DATABASE`.

use std::error::Error;

use lock_registry::{LockRegistryExt as _, Registry};
use sqlx::migrate::{Migration, MigrationType::Simple, Migrator};
use sqlx::{Connection as _, PgConnection, SqlSafeStr as _};
use tokio::process::Command;

// ANCHOR: migrate
/// Runs the missing migrations, in one process at a time. The lock is a lease, so a process that
/// waits for it has no snapshot. `CREATE INDEX CONCURRENTLY` waits for all older snapshots.
async fn migrate(
    registry: &Registry,
    migrator: &Migrator,
    database: &mut PgConnection,
) -> Result<(), Box<dyn Error>> {
    let migrated =
        registry.execute_locked("migrations", async |_guard| migrator.run(database).await);
    migrated.await?.output?;
    Ok(())
}
// ANCHOR_END: migrate

/// Usually `sqlx::migrate!()`, with the line `-- no-transaction` in the second file.
fn migrator() -> Migrator {
    let table = "CREATE TABLE orders (id BIGINT PRIMARY KEY, customer BIGINT)";
    let index = "CREATE INDEX CONCURRENTLY orders_by_customer ON orders (customer)";
    let mut migrator = Migrator::with_migrations(vec![
        Migration::new(1, "orders".into(), Simple, table.into_sql_str(), false),
        Migration::new(2, "customers".into(), Simple, index.into_sql_str(), true),
    ]);
    // sqlx's own lock is a statement. While it waits, its snapshot blocks the creation of the
    // index.
    migrator.set_locking(false);
    migrator
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("usage: migrations postgres://HOST/DATABASE")?;
    if std::env::args().nth(2).is_none() {
        let start = || Command::new(std::env::current_exe()?).args([&url, "one"]).spawn();
        let mut ended_well = 0;
        for mut process in (0..10).map(|_| start()).collect::<Result<Vec<_>, _>>()? {
            ended_well += usize::from(process.wait().await?.success());
        }
        println!("ended well: {ended_well}");
        return Ok(());
    }
    let registry = lock_registry::connect(&url).await?;
    let mut database = PgConnection::connect(&url).await?;
    migrate(&registry, &migrator(), &mut database).await
}
