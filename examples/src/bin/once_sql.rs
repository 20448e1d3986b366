//! A job whose work and record are committed in one transaction: each tick runs exactly once.

use lock_registry::LockRegistryExt as _;
use lock_registry::once::Outcome;
use lock_registry::sqlite::RunIn;
use sqlx::{Connection, Row, SqliteConnection};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("shop.db");
    let registry = lock_registry::connect(&format!("sqlite:{}", path.display())).await?;
    // The same file as the locks.
    let mut data = SqliteConnection::connect(&format!("sqlite:{}", path.display())).await?;
    sqlx::raw_sql("CREATE TABLE account (balance INTEGER); INSERT INTO account VALUES (100)")
        .execute(&mut data)
        .await?;

    for attempt in 1..=2 {
        // ANCHOR: run_in
        let mut tx = data.begin().await?;
        match registry.once("interest").tick(7).run_in(&mut tx).await? {
            Outcome::Ran(run) => {
                sqlx::query("UPDATE account SET balance = balance + balance / 10")
                    .execute(&mut *tx)
                    .await?;
                tx.commit().await?; // the work and the record, or neither
                run.unlock().await?;
            }
            _ => tx.rollback().await?, // done before, or another process runs it
        }
        // ANCHOR_END: run_in
        let row = sqlx::query("SELECT balance FROM account").fetch_one(&mut data).await?;
        println!("attempt {attempt}: {}", row.get::<i64, _>(0));
    }
    Ok(())
}
