//! Optimistic locking: `versions postgres://HOST/DATABASE`. The program uses no lock. Each write
//! states the version that was read.
//!
//! This suits rows with few concurrent writers: no caller waits, and no lock can be lost. With many
//! writers, most writes fail and are repeated. A lock around the update prevents that, and the
//! version then serves as the fence.

use sqlx::{Connection, PgConnection};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "postgres://127.0.0.1/shop".to_owned());
    let mut data = PgConnection::connect(&url).await?;
    let create_table = "CREATE TABLE account (id bigint PRIMARY KEY, balance bigint NOT NULL, version bigint NOT NULL);
                INSERT INTO account VALUES (42, 20, 1)";
    sqlx::raw_sql(create_table).execute(&mut data).await?;

    // Two clerks have read the same version, and both write.
    let (first_read, second_read) = (read(&mut data, 42).await?, read(&mut data, 42).await?);
    println!(
        "first write succeeded: {}",
        write(&mut data, &second_read, second_read.balance - 5).await?
    );
    println!(
        "second write succeeded: {}",
        write(&mut data, &first_read, first_read.balance - 1).await?
    );

    // Many concurrent clerks: a clerk whose version is outdated reads again and retries.
    let mut clerks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let url = url.clone();
        clerks.spawn(async move {
            let mut data = PgConnection::connect(&url).await.map_err(|error| error.to_string())?;
            for _ in 0..5 {
                let paid = update(&mut data, 42, |balance| balance + 1).await;
                paid.map_err(|error| error.to_string())?;
            }
            Ok::<(), String>(())
        });
    }
    while let Some(clerk) = clerks.join_next().await {
        clerk??;
    }
    println!("15 + 20 = {}", read(&mut data, 42).await?.balance);
    Ok(())
}

// ANCHOR: versions
struct AccountRow {
    id: i64,
    balance: i64,
    version: i64,
}

async fn read(data: &mut PgConnection, id: i64) -> Result<AccountRow> {
    let row = sqlx::query_as("SELECT balance, version FROM account WHERE id = $1").bind(id);
    let (balance, version) = row.fetch_one(data).await?;
    Ok(AccountRow { id, balance, version })
}

/// Writes unless another client has written since `read`. Returns whether it wrote.
async fn write(data: &mut PgConnection, read: &AccountRow, balance: i64) -> Result<bool> {
    let update =
        "UPDATE account SET balance = $3, version = version + 1 WHERE id = $1 AND version = $2";
    let update = sqlx::query(update).bind(read.id).bind(read.version).bind(balance);
    Ok(update.execute(data).await?.rows_affected() == 1)
}

/// Reads, changes and writes, and retries if another client wrote first.
async fn update(data: &mut PgConnection, id: i64, change: impl Fn(i64) -> i64) -> Result<()> {
    const TRIES_MAX: u32 = 100;
    for _ in 0..TRIES_MAX {
        let account = read(data, id).await?;
        if write(data, &account, change(account.balance)).await? {
            return Ok(());
        }
    }
    Err("100 attempts failed because of concurrent writes; use a lock for this row".into())
}
// ANCHOR_END: versions
