//! Any text of 1 to [`Key::BYTES_MAX`] bytes is a key, unless the layout of the store rejects it.
//! Two keys are the same lock only if their bytes are equal.

use std::collections::HashSet;

use registry_core::{
    Claim, InvalidKey, Key, LockBackend, LockError, LockRegistryExt as _, Release, Renewal,
};
use tokio::time::Instant;

use crate::context::{
    TestContext, admin, assert_busy, assert_freed, assert_granted, is_free, key, release, renew_all,
};
use crate::faulty::Faults;

/// Keys with punctuation, control characters, white space or any script are different locks.
pub async fn keys_with_special_characters_are_different_locks(context: &TestContext) {
    assert_all_different(context, special_keys()).await;
}

/// Keys that differ only in case, white space, Unicode normalisation or similar letters are
/// different locks. Collations and file systems often treat such texts as equal.
pub async fn similar_keys_are_different_locks(context: &TestContext) {
    assert_all_different(context, similar_keys()).await;
}

/// The longest keys are different locks even if only their last characters differ, because the
/// store truncates no key.
pub async fn the_longest_keys_are_different_locks(context: &TestContext) {
    let stem = "x".repeat(Key::BYTES_MAX - 1);
    let wide = "🔒".repeat(Key::BYTES_MAX / 4 - 1);
    let mut keys: Vec<_> = ["a", "b", "A", "/", "\0", ""].map(|end| format!("{stem}{end}")).into();
    keys.extend(["🔒", "🔓", "aaaa", "aaab"].map(|end| format!("{wide}{end}")));
    assert_all_different(context, keys).await;
}

/// Keys that contain separators of store names, such as `/`, `:` or `%`, are different locks.
pub async fn keys_made_of_separators_are_different_locks(context: &TestContext) {
    let mut keys = Vec::new();
    for separator in ["/", ":", ".", "-", "_", "%", "\\", "\0", "{", "}", "*", "?"] {
        keys.extend([
            separator.to_owned(),
            separator.repeat(2),
            format!("a{separator}b"),
            format!("{separator}a"),
            format!("a{separator}"),
            format!("a{separator}{separator}b"),
        ]);
    }
    assert_all_different(context, keys).await;
}

/// 252 short keys are different locks, so a store's hashing or escaping causes no collision.
pub async fn many_short_keys_are_different_locks(context: &TestContext) {
    let parts = ["a", "A", "%", "2", "/", "é"];
    let mut keys = Vec::new();
    for one in parts {
        for two in parts {
            keys.push(format!("{one}{two}"));
            keys.extend(parts.map(|three| format!("{one}{two}{three}")));
        }
    }
    assert_all_different(context, keys).await;
}

/// Acquires all of `keys`, checks that each is busy, then releases each and checks that it is free.
async fn assert_all_different(context: &TestContext, keys: Vec<String>) {
    let client = context.client().await;
    let distinct: HashSet<_> = keys.iter().collect();
    assert_eq!(distinct.len(), keys.len(), "the clause names no key twice");
    let claims: Vec<_> = keys
        .iter()
        .map(|name| key(name))
        // A layout that cannot hold a key refuses it in `check_key`, before any request.
        .filter(|key| client.check_key(key).is_ok())
        .map(|key| Claim::new(key, context.long_lease()))
        .collect();
    assert!(!claims.is_empty(), "the layout accepts none of {keys:?}");
    let mut renewed_at = Instant::now();
    for (number, claim) in claims.iter().enumerate() {
        assert_granted(&*client, claim).await;
        renew_if_due(&*client, &claims[..=number], &mut renewed_at).await;
    }
    for claim in &claims {
        assert_busy(&*client, &Claim::new(claim.key().clone(), context.long_lease())).await;
        renew_if_due(&*client, &claims, &mut renewed_at).await;
    }
    for (number, claim) in claims.iter().enumerate() {
        renew_if_due(&*client, &claims[number..], &mut renewed_at).await;
        assert_freed(&*client, claim).await;
        assert!(is_free(&*client, claim.key()).await, "{:?} is not free", claim.key());
        assert_eq!(release(&*client, claim).await, Release::NotHeld);
    }
}

/// Renews `claims` once a quarter of their lease is over. The longest lease of a store may be
/// shorter than a clause takes on a loaded machine.
async fn renew_if_due(client: &dyn LockBackend, claims: &[Claim], renewed_at: &mut Instant) {
    if claims.first().is_none_or(|first| renewed_at.elapsed() < first.lease() / 4) {
        return;
    }
    *renewed_at = Instant::now();
    for renewal in renew_all(client, claims).await {
        assert!(matches!(renewal, Ok(Renewal::Renewed(_))), "{renewal:?}");
    }
}

/// `inspect` and `list` return each key byte for byte as it was given.
pub async fn keys_are_returned_unchanged(context: &TestContext) {
    let client = context.client().await;
    let mut names = special_keys();
    names.extend(similar_keys());
    let claims: Vec<_> = names
        .iter()
        .map(|name| key(name))
        .filter(|key| client.check_key(key).is_ok())
        .map(|key| Claim::new(key, context.long_lease()))
        .collect();
    for claim in &claims {
        assert_granted(&*client, claim).await;
        let holders = admin(&*client).inspect(claim.key()).await.expect("inspect answers");
        assert_eq!(holders.first().map(|holder| &holder.key), Some(claim.key()));
    }
    let listed: HashSet<Key> = admin(&*client)
        .list()
        .await
        .expect("list answers")
        .into_iter()
        .map(|holder| holder.key)
        .collect();
    let requested: HashSet<Key> = claims.iter().map(|claim| claim.key().clone()).collect();
    assert_eq!(listed, requested);
    for claim in &claims {
        assert_freed(&*client, claim).await;
    }
}

/// Keys with punctuation, control characters, white space or any script can be locked and unlocked
/// through a registry. The lock and its guard return the key as it was given.
pub async fn keys_with_special_characters_can_be_locked_and_unlocked(context: &TestContext) {
    let client = context.client().await;
    let registry = context.registry().await;
    for name in special_keys() {
        if client.check_key(&key(&name)).is_err() {
            continue;
        }
        let lock = registry.obtain(&name);
        assert_eq!(lock.key(), name);
        let guard = lock.try_lock().await.expect("the store answers").expect("the lock is free");
        assert_eq!(guard.key(), name);
        assert!(lock.try_lock().await.expect("busy is no error").is_none());
        guard.unlock().await.expect("a held lock is unlocked");
    }
}

/// The empty key returns `LockError::InvalidKey` from each call that locks or inspects, before any
/// request to the store.
pub async fn an_empty_key_is_refused_before_any_request(context: &TestContext) {
    assert_refused_everywhere(context, "", |why| matches!(why, InvalidKey::Empty)).await;
}

/// A key with more than `Key::BYTES_MAX` bytes returns `LockError::InvalidKey` from each call that
/// locks or inspects, before any request to the store.
pub async fn a_key_that_is_too_long_is_refused_before_any_request(context: &TestContext) {
    let long = "x".repeat(Key::BYTES_MAX + 1);
    assert_refused_everywhere(context, &long, |why| {
        matches!(why, InvalidKey::TooLong { bytes: 4_097, .. })
    })
    .await;
    // The limit counts bytes, not characters.
    let wide = "é".repeat(Key::BYTES_MAX / 2 + 1);
    assert_refused_everywhere(context, &wide, |why| {
        matches!(why, InvalidKey::TooLong { bytes: 4_098, .. })
    })
    .await;
}

async fn assert_refused_everywhere(
    context: &TestContext,
    name: &str,
    expected: impl Fn(&InvalidKey) -> bool,
) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let lock = registry.obtain(name);
    let refusals = [
        lock.lock().await.map(drop),
        lock.try_lock().await.map(drop),
        lock.try_lock_for(context.short_lease()).await.map(drop),
        lock.holders().await.map(drop),
        registry.execute_locked(name, async |_| ()).await.map(drop),
    ];
    for refusal in refusals {
        match refusal {
            Err(LockError::InvalidKey(why)) => assert!(expected(&why), "{why:?}"),
            other => panic!("an invalid key returned {other:?}"),
        }
    }
    assert_eq!(faulty.requests(), 0, "a request with an invalid key reached the store");
}

fn special_keys() -> Vec<String> {
    [
        "/",
        "//",
        ".",
        "..",
        "../../etc/passwd",
        "a/../b",
        "\0",
        "a\0b",
        "a\0",
        "'",
        "\"",
        "`",
        "\\",
        "'); DROP TABLE locks; --",
        "%",
        "_",
        "*",
        "?",
        "[a-z]",
        "%00",
        "%2F",
        "{",
        "}",
        "{}",
        "{a}b",
        "a{b}c",
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        "a\nb",
        "🔒",
        "👩‍👩‍👧",
        "\u{202e}abc",
        "\u{feff}",
        "\u{200b}",
        "ключ",
        "鍵",
        "مفتاح",
        "null",
        "NULL",
        "0",
        "-1",
        "641",
        "true",
        "$1",
        "${HOME}",
        "#",
        ";",
        ":",
        "a:b",
        "@",
        "~",
        "CON",
        "-",
        "--",
        "orders:42?x=1&y=2",
        "\u{7f}",
        "\u{1b}[31m",
        "\u{fffd}",
        "\u{10ffff}",
    ]
    .map(str::to_owned)
    .into()
}

fn similar_keys() -> Vec<String> {
    [
        "key",
        "Key",
        "KEY",
        "kEY",
        " key",
        "key ",
        "key  ",
        "\tkey",
        "key\n",
        "key\0",
        "kéy",
        "ke\u{301}y",
        "k\u{e9}y",
        "ｋｅｙ",
        "кey",
        "keү",
        "ß",
        "ss",
        "SS",
        "ı",
        "i",
        "I",
        "İ",
        "ﬁ",
        "fi",
        "Å",
        "\u{212b}",
        "1",
        "01",
        "1.0",
        "１",
    ]
    .map(str::to_owned)
    .into_iter()
    // Removes a text that is listed above in two spellings of the same bytes.
    .collect::<HashSet<_>>()
    .into_iter()
    .collect()
}
