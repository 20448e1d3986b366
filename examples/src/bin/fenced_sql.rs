//! Data in the same PostgreSQL database as its locks: `fenced_sql postgres://HOST/DATABASE`.
//!
//! A clerk reads an account under a lock, pauses for longer than the lease, and then writes a value
//! based on the old balance. The fence is part of the transaction that writes, so the late write
//! cannot be committed. The code for MariaDB and MySQL is the same.

use std::time::Duration;

use lock_registry::{
    LockGuard, LockOptions,
    postgres::{Fence, FenceError},
};
use sqlx::{Connection, PgConnection};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "postgres://127.0.0.1/shop".to_owned());
    // A fence needs the locks and the accounts in the same database.
    let locks = lock_registry::connect(&url).await?;
    let mut data = PgConnection::connect(&url).await?;
    sqlx::raw_sql(
        "CREATE TABLE account (id bigint, balance bigint); INSERT INTO account VALUES (42, 20)",
    )
    .execute(&mut data)
    .await?;

    // The clerk pauses for longer than the lease, and the lease is not renewed.
    let short_lease = LockOptions::new().lease(Duration::from_millis(300)).auto_renew(false);
    let slow = locks
        .obtain("account/42")
        .try_lock_with(short_lease)
        .await?
        .ok_or("account/42 is locked")?;
    let seen = balance(&mut data).await?;
    slow.lost().await;

    let guard = locks.obtain("account/42").lock().await?;
    let now = balance(&mut data).await?;
    println!("{}", pay(&guard, &mut data, now - 5).await?);
    guard.unlock().await?;

    // The first clerk resumes and writes a balance that would undo the payment.
    println!("late: {}", pay(&slow, &mut data, seen - 1).await?);
    println!("balance: {}", balance(&mut data).await?);
    _ = locks.close(Duration::from_secs(1)).await;
    Ok(())
}

// ANCHOR: pay
async fn pay(guard: &LockGuard, data: &mut PgConnection, balance: i64) -> Result<&'static str> {
    let mut tx = data.begin().await?;
    match guard.fence(&mut tx).await {
        Ok(()) => {}
        Err(FenceError::Lost { .. }) => {
            tx.rollback().await?;
            return Ok("stopped by the fence, nothing was written");
        }
        Err(error) => return Err(error.into()),
    }
    sqlx::query("UPDATE account SET balance = $1 WHERE id = 42")
        .bind(balance)
        .execute(&mut *tx)
        .await?;
    tx.commit().await?; // precedes the next grant of the lock, or fails
    Ok("paid")
}
// ANCHOR_END: pay

async fn balance(data: &mut PgConnection) -> Result<i64> {
    Ok(sqlx::query_scalar("SELECT balance FROM account WHERE id = 42").fetch_one(data).await?)
}
