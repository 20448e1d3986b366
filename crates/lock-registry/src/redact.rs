//! Redacts store URLs for all messages, logs and `Debug` output.

use percent_encoding::percent_decode_str;
use registry_core::config::{UrlParts, is_host, is_well_encoded};

use crate::options::{REDACTED, is_known, is_safe_to_show};
use crate::{scheme, store_url};

/// Returns a store URL without its secrets, for logs and messages.
///
/// The result contains only parts without secrets: a known scheme, hosts and ports, a path, and
/// known options with valid values. `***` replaces the login, the value of every other known
/// option, and every unknown option with its name.
///
/// If the address may contain a misplaced secret, the result contains at most the scheme. For
/// example, the rest of a password after an unescaped `/`, `?` or `#` is outside the login.
///
/// # Examples
/// ```
/// # use lock_registry::config::redact_url;
/// assert_eq!(
///     redact_url("redis://app:hunter2@db:6379/0?lease=30s"),
///     "redis://***@db:6379/0?lease=30s"
/// );
/// assert_eq!(redact_url("redis://app:hun/ter2@db"), "redis://***");
/// assert_eq!(redact_url("sqlite:locks.db"), "sqlite:locks.db");
/// ```
#[must_use]
pub fn redact_url(url: &str) -> String {
    let Some(parts) = store_url::split(url).filter(|parts| scheme::is_known(&parts.scheme)) else {
        return REDACTED.to_owned();
    };
    let scheme = &parts.scheme;
    let Some(address) = redact_address(&parts) else {
        let slashes = if parts.authority.is_some() { "//" } else { "" };
        return format!("{scheme}:{slashes}{REDACTED}");
    };
    let Some(query) = parts.query else {
        return format!("{scheme}:{address}");
    };
    // An empty element sets no option.
    let options = query.split('&').filter(|option| !option.is_empty());
    let options: Vec<String> = options.map(redact_option).collect();
    format!("{scheme}:{address}?{}", options.join("&"))
}

/// Returns the part between the scheme and the options, with `***` instead of the login. Returns
/// `None` if a secret may be anywhere in this part.
fn redact_address(parts: &UrlParts<'_>) -> Option<String> {
    if parts.fragment.is_some() {
        return None;
    }
    let path = parts.path;
    match (parts.scheme.as_str(), parts.authority) {
        ("memory", None) | ("sqlite", None) => is_plain_path(path).then(|| path.to_owned()),
        ("sqlite", Some("")) => is_plain_path(path).then(|| format!("//{path}")),
        ("pass-through", None) => path.is_empty().then(String::new),
        // These stores have no hosts, so the authority may be a misplaced secret.
        ("memory" | "sqlite" | "pass-through", Some(_)) => None,
        // All other stores need an authority, so the URL is incomplete.
        (_, None) => path.is_empty().then(String::new),
        (_, Some(authority)) => {
            let (login, hosts) = match authority.rsplit_once('@') {
                Some((_, hosts)) => ("***@", hosts),
                None => ("", authority),
            };
            let has_at_sign =
                path.contains('@') || parts.query.is_some_and(|query| query.contains('@'));
            let is_plain = !has_at_sign && hosts.split(',').all(is_host) && is_plain_path(path);
            is_plain.then(|| format!("//{login}{hosts}{path}"))
        }
    }
}

/// Returns one `name=value` of a query, redacted if necessary.
fn redact_option(option: &str) -> String {
    let Some((name, value)) = option.split_once('=') else { return REDACTED.to_owned() };
    if !is_known(name) {
        return REDACTED.to_owned();
    }
    // Invalid percent-encoding leaves a `%` in the text, and `is_safe_to_show` refuses this `%`.
    let decoded = percent_decode_str(value).decode_utf8();
    if decoded.is_ok_and(|value| is_safe_to_show(name, &value)) {
        option.to_owned()
    } else {
        format!("{name}={REDACTED}")
    }
}

/// Returns whether `path` contains no character of a misplaced login or option.
fn is_plain_path(path: &str) -> bool {
    let is_plain = |c: char| c.is_alphanumeric() || "-._~/+, ()%".contains(c);
    path.chars().all(is_plain) && is_well_encoded(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RegistryConfig;

    #[test]
    fn a_malformed_url_is_refused_and_its_password_is_redacted() {
        for url in INVALID_URLS {
            assert!(RegistryConfig::from_url(url).is_err(), "{url} was accepted");
            assert_redacted(url);
        }
    }

    #[cfg(feature = "redis")]
    #[test]
    fn the_password_of_a_valid_url_is_redacted() {
        for url in [
            "redis://user:canary@host:6379/0",
            "redis://:canary@host?lease=30s",
            "redis+sentinel://user:canary@a,b/main?sentinel_user=canary&sentinel_password=canary",
            "redis+cluster://user:canary@a,b",
            "redis+quorum://user:canary@a,b,c/1",
            "redis+unix://user:canary@/run/redis.sock?db=1",
        ] {
            let config = RegistryConfig::from_url(url).unwrap();
            let url = store_url::StoreUrl::parse(url).unwrap();
            let output = format!("{config:?} {:?} {url:?} {url:#?}", config.settings().unwrap());
            assert!(!output.contains("canary"), "{output}");
        }
    }

    #[cfg(feature = "redis")]
    #[test]
    fn parts_without_secrets_are_shown() {
        for (url, output) in [
            (
                "redis+sentinel://u:p@a:1,b:2/main?poll=1s&password=x",
                "redis+sentinel://***@a:1,b:2/main?poll=1s&***",
            ),
            ("redis+unix://u:p@/run/redis.sock?db=1", "redis+unix://***@/run/redis.sock?db=1"),
            (
                "redis+sentinel://a/main?sentinel_user=u&sentinel_password=p&layout=redisson",
                "redis+sentinel://a/main?sentinel_user=***&sentinel_password=***&layout=redisson",
            ),
            (
                "rediss+cluster://a,b?ca=/etc/ca.pem&cert=c.pem&key=k.pem",
                "rediss+cluster://a,b?ca=/etc/ca.pem&cert=c.pem&key=***",
            ),
            ("postgres://db.example:5432/locks", "postgres://db.example:5432/locks"),
            ("etcd://[::1]:2379", "etcd://[::1]:2379"),
            ("memory:shared?url=redis:x", "memory:shared?url=***"),
            ("pass-through:?lease=1s", "pass-through:?lease=1s"),
            (
                "SQLITE:///srv/a%20b/ü.db?lease=1m%2030s&renew=false",
                "sqlite:///srv/a%20b/ü.db?lease=1m%2030s&renew=false",
            ),
            ("memory:?label=worker%207&namespace=shop", "memory:?label=worker%207&namespace=shop"),
        ] {
            assert_eq!(redact_url(url), output);
        }
    }

    #[cfg(feature = "redis")]
    #[test]
    fn a_pem_path_that_may_be_a_secret_is_redacted() {
        let url = "rediss://h?ca=-----p&key=";
        assert_eq!(redact_url(url), "rediss://h?ca=***&key=***");
    }

    #[test]
    fn an_empty_query_element_is_not_shown_as_a_redacted_option() {
        assert_eq!(redact_url("memory:?lease=5s&"), "memory:?lease=5s");
        assert_eq!(redact_url("memory:?&&lease=5s"), "memory:?lease=5s");
    }

    #[test]
    fn parts_that_may_contain_secrets_are_redacted() {
        for (url, output) in [
            ("memory:?lease=soon&renew=%zz&handoff=1e3", "memory:?lease=***&renew=***&handoff=***"),
            ("memory:?label=redis://u:p@h&%6cease=1s&lease", "memory:?label=***&***&***"),
            ("memory:?label=%ff&label=", "memory:?label=***&label="),
            ("sqlite:a;password=x", "sqlite:***"),
            ("sqlite:user:secret", "sqlite:***"),
            ("sqlite://host/db", "sqlite://***"),
            ("pass-through:x", "pass-through:***"),
            ("redis://u:p@%2Frun%2Fredis.sock/0", "redis://***"),
            ("redis://u:p@/run/redis.sock", "redis://***@/run/redis.sock"),
            (
                "redis+unix://u:p@h/run/redis.sock?renew=p",
                "redis+unix://***@h/run/redis.sock?renew=***",
            ),
            ("redis+unix://u:p/run/redis.sock", "redis+unix://***"),
            ("redis+quorum://u:p@a,b:p,c", "redis+quorum://***"),
            ("redis:///u:p", "redis://***"),
            ("redis://u:1?label=s3cret&x@h", "redis://***"),
            ("redis://h/0;password=x", "redis://***"),
            ("redis://[facade]", "redis://***"),
            ("redis://h:+1", "redis://***"),
            ("s3cret:6379", "***"),
            ("s3cret://h", "***"),
            ("", "***"),
        ] {
            assert_eq!(redact_url(url), output, "{url}");
        }
    }

    /// Returns all output for `url`: its redacted form, and the error if it is invalid.
    fn visible_output(url: &str) -> String {
        let config = RegistryConfig::new().url(url);
        let mut output = redact_url(url);
        if let Err(error) = config.check() {
            output = format!("{output} {error} {error:?}");
        }
        output
    }

    #[track_caller]
    fn assert_redacted(url: &str) {
        let output = visible_output(url);
        assert!(!output.to_lowercase().contains("canary"), "{url:?}: {output}");
    }

    #[test]
    fn no_combination_of_parts_shows_a_secret() {
        // The schemes that `redact_address` distinguishes, more kinds of Redis, a misspelt scheme,
        // and an unknown one.
        let schemes = [
            "memory",
            "SQLite",
            "pass-through",
            "redis+sentinel",
            "redis+quorum",
            "redis+unix",
            "postgress",
            "bogus",
        ];
        let separators = ["://", ":///", ":/", ":", "//", ""];
        let logins = [
            "",
            "user:canary@",
            ":canary@",
            "user:canary@canary@",
            "user:canary/canary@",
            "user:canary?canary@",
            "user:canary#canary@",
            "user:canary&lease=canary@",
            "user:?lease=canary@",
            "user:%zzcanary@",
            "user:canary%4@",
            "user:canary%40",
            "user:1/canary@",
            "[canary]@",
            "user:\u{e9}canary\t@",
        ];
        let hosts = ["host:6379", "a:1,[::1]", "/run/a.sock", "%2Frun%2Fa.sock", ""];
        let suffixes = [
            "",
            "/0",
            "/0?lease=30s",
            "?password=canary",
            "/0?lease=30s&password=canary&poll=1s",
            "?canary",
            "?lease=canary",
            "?lease=%zzcanary",
            "?renew=canary&handoff=canary&layout=canary",
            "?sentinel_user=canary&sentinel_password=canary&key=canary",
            "?publish=canary&replicas=canary&fsync=canary&db=canary",
            "?ca=-----canary&cert=%0acanary",
            "?label=me@canary",
            "?%6cease=canary",
            "?url=redis://user:canary@host",
            "#canary",
            "/0;password=canary",
        ];
        let logins_and_hosts = logins.iter().flat_map(|l| hosts.map(|host| (l, host)));
        // One thread for each scheme, because the combinations take seconds.
        std::thread::scope(|scope| {
            for scheme in schemes {
                let logins_and_hosts = logins_and_hosts.clone();
                scope.spawn(move || {
                    for (login, host) in logins_and_hosts {
                        for separator in separators {
                            for suffix in suffixes {
                                assert_redacted(&format!(
                                    "{scheme}{separator}{login}{host}{suffix}"
                                ));
                            }
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn no_typo_or_truncation_shows_a_secret() {
        // Each password contains `canary` twice, so that a leaked password with one damaged
        // character is still found. Swapped neighbours and cut-off ends are tested too.
        for url in [
            "redis://user:canarycanary@host:6379/0?lease=30s",
            "rediss://:canarycanary@host",
            "redis+sentinel://user:canarycanary@a:1,b:2/main?poll=1s",
            "redis+sentinel://a,b/main?sentinel_user=canarycanary&sentinel_password=canarycanary",
            "redis+cluster://:canarycanary@a,b?replicas=1",
            "rediss+quorum://user:canarycanary@a,b,c/1?key=canarycanary&cert=a.pem",
            "postgres://user:canarycanary@[::1]:5432/locks",
            "postgres://user:canarycanary@%2Frun%2Fpostgresql/locks",
            "mysql://host/locks?lease=30s&password=canarycanary",
            "mysql://host/locks?password=canarycanary&lease=30s",
            "redis://user:canarycanary@/run/redis.sock",
            "redis+unix://user:canarycanary@/run/redis.sock?db=0",
            "sqlite:///var/lib/locks.db?password=canarycanary",
            "memory:shared?url=redis://user:canarycanary@host",
        ] {
            assert_redacted(url);
            let letters: Vec<char> = url.chars().collect();
            for at in 0..=letters.len() {
                let (before, after) = letters.split_at(at);
                let assert_edit_redacted = |before: &[char], inserted: &[char], after: &[char]| {
                    assert_redacted(&[before, inserted, after].concat().iter().collect::<String>());
                };
                assert_edit_redacted(before, &[], &[]);
                assert_edit_redacted(&[], &[], after);
                assert_edit_redacted(before, &[], after.get(1..).unwrap_or_default());
                if let [first, second, rest @ ..] = after {
                    assert_edit_redacted(before, &[*second, *first], rest);
                }
                for typed in ":/?#@&=%[],;.\\'\" \t\n+-_~1aé".chars() {
                    assert_edit_redacted(before, &[typed], after);
                    assert_edit_redacted(before, &[typed], after.get(1..).unwrap_or_default());
                }
            }
        }
    }

    const INVALID_URLS: &[&str] = &[
        "redis+sentinel://user:canary@a,b",
        "redis+sentinel://user:canary@a,canary:b/main",
        "redis+sentinel://user:canary@a,a/main",
        "redis+sentinel://user:canary@a/main/x",
        "redis+sentinel://canary@a/main",
        "redis+sentinel:canary@a/main",
        "redis+sentinel://a/main?sentinel_user=canary",
        "redis+sentinel://a/main?sentinel_password=canary&sentinel_password=canary",
        "redis+sentinel://a/main?sentinel_pasword=canary",
        "redis+sentinel://a/main?password=canary",
        "redis://a/0?sentinel_password=canary",
        "redis+cluster://user:canary@a,b/1",
        "redis+cluster://user:canary@a,b/x",
        "redis+cluster://user:canary@",
        "redis+cluster://user:canary,b",
        "redis+cluster://user:canary@a,canary@b",
        "redis+cluster://user:canary@a?restart_guard=1s",
        "redis+quorum://user:canary@a,b",
        "redis+quorum://user:canary@a,b,b",
        "redis+quorum://user:canary@a,b,c?layout=spring",
        "redis+quorum://user:canary@a,b,c?replicas=canary",
        "redis+unix://user:canary@h/run/redis.sock",
        "redis+unix://user:canary@/run/redis/",
        "redis+unix://user:canary@",
        "redis+unix:user:canary@/run/redis.sock",
        "redis+unix:///run/redis.sock?password=canary",
        "redis+unix:///run/redis.sock?db=canary",
        "rediss+unix://user:canary@/run/redis.sock",
        "rediss+sentinel://user:canary@a",
        "rediss+cluster://user:canary@a/1",
        "rediss+quorum://user:canary@a",
        "rediss://user:canary@a?key=canary",
        "rediss://user:canary@a?ca=-----canary",
        "rediss://user:canary@a?publish=canary",
        "redis://user:canary@a?ca=ca.pem&key=canary",
        "redis+quorum://user:canary@host:6379/0",
        "redis+quorum://:canary@host",
        "redis://user:can/ary-canary@host",
        "redis://user:x?canary@host",
        "redis://user:x#canary@host",
        "redis://user:x@canary@host",
        "redis://user:12/canary@host",
        "redis://user:canary",
        "redis://user:canary/0",
        "redis://h/0?password=canary",
        "redis://h/0?canary",
        "redis:user:canary@host",
        "redis:canary",
        "rediss//user:canary@host",
        "user:canary@host",
        "user:pass@host/canary",
        ":canary@host",
        "canary@host:6379",
        "canary",
        "canary:6379",
        "canary:",
        "postgress://user:canary@host/db",
        "sqlite://user:canary@host/db",
        "memory://user:canary@host",
        "pass-through://user:canary@host",
        "pass-through:canary",
        "postgres://user:%zzcanary@host",
        "postgres://user:canary\n@host",
        "zk://h1,h2:canary/chroot",
    ];
}
