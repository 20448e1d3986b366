//! The minimum that locks between processes need in PostgreSQL: one expiring row per lock, and a
//! notification to waiters. An acquisition and a release take one round trip each. There is no
//! token and no label.

use std::time::Duration;

use futures_util::FutureExt as _;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgListener};
use sqlx::{ConnectOptions as _, Row as _};

const ACQUIRE: &str = "\
    INSERT INTO bare AS b (key, owner, until) \
    VALUES ($1, $2, (date_part('epoch', clock_timestamp()) * 1000000)::bigint + 30000000) \
    ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, until = excluded.until \
    WHERE b.owner IS NULL OR b.until <= (date_part('epoch', clock_timestamp()) * 1000000)::bigint \
    RETURNING 1";

const RELEASE: &str = "\
    UPDATE bare SET owner = NULL WHERE key = $1 AND owner = $2 \
    RETURNING pg_notify('bare', '') IS NULL, set_config('synchronous_commit', 'off', true)";

/// The interval at which a waiter polls, because notifications may be lost.
const POLL: Duration = Duration::from_millis(100);

/// One lock of one process.
pub struct PostgresReference {
    key: String,
    owner: i32,
    statements: PgConnection,
    messages: PgListener,
}

impl PostgresReference {
    pub async fn connect(url: &str, key: &str) -> Self {
        let options: PgConnectOptions = url.parse().unwrap();
        let statements = options.connect().await.unwrap();
        let mut messages = PgListener::connect(url).await.unwrap();
        messages.listen("bare").await.unwrap();
        let owner = i32::try_from(std::process::id()).unwrap();
        Self { key: key.to_owned(), owner, statements, messages }
    }

    pub async fn lock(&mut self) {
        loop {
            // Notifications from before this attempt say nothing about its result.
            while self.messages.recv().now_or_never().is_some() {}
            let acquire = sqlx::query(ACQUIRE).bind(&self.key).bind(self.owner);
            if acquire.fetch_optional(&mut self.statements).await.unwrap().is_some() {
                return;
            }
            _ = tokio::time::timeout(POLL, self.messages.recv()).await;
        }
    }

    pub async fn unlock(&mut self) {
        let release = sqlx::query(RELEASE).bind(&self.key).bind(self.owner);
        let freed = release.fetch_all(&mut self.statements).await.unwrap();
        assert_eq!(freed.len(), 1);
        let _: Option<bool> = freed[0].get(0);
    }
}
