//! What can only be seen from inside, on real servers.
#![cfg(target_os = "linux")]

use std::time::Duration;

use registry_core::{Attempt, Claim, Key, LockBackend};
use registry_testkit::clock::ClockShim;
use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};

use super::{MySqlBackend, MySqlConfig};

const HOUR: i64 = 3_600;

/// The start of the first piece.
const START: [u8; 32] = [0; 32];

async fn pass(backend: &MySqlBackend, key: &str) -> u64 {
    let claim = Claim::new(Key::new(key).unwrap(), Duration::from_secs(60));
    let Attempt::Granted(grant) = backend.try_acquire(&claim).await.unwrap() else {
        panic!("{key} is held")
    };
    backend.release(&claim).await.unwrap();
    grant.token.unwrap().get()
}

#[tokio::test]
async fn tokens_grow_over_purged_rows_even_if_the_clock_goes_back() {
    let clock = ClockShim::new().unwrap();
    let options = MariaDbOptions::new().without_fsync().clock(&clock);
    let server = MariaDbServer::start_with(options).await.unwrap();
    let config = MySqlConfig::from_url(&server.url()).unwrap();
    let backend =
        MySqlBackend::open(config.with_purge_after(Duration::from_secs(60))).await.unwrap();
    let held = Claim::new(Key::new("held").unwrap(), Duration::from_secs(86_400));
    assert!(matches!(backend.try_acquire(&held).await.unwrap(), Attempt::Granted(_)));
    let mut last = 0;
    for _ in 0..3 {
        let token = pass(&backend, "k").await;
        assert!(token > last, "{token} is not above {last}");
        last = token;
        pass(&backend, "other").await;
        assert_eq!(backend.purge_piece(START).await.unwrap(), 0, "they are not dead for long");
        clock.jump_wall(HOUR).unwrap();
        assert_eq!(backend.purge_piece(START).await.unwrap(), 2);
        assert_eq!(backend.list().await.unwrap().len(), 1, "the held one is left alone");
        clock.jump_wall(-3 * HOUR).unwrap();
    }
}
