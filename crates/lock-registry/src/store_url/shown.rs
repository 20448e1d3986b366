//! Redacts store URLs. All messages, logs and `Debug` output use this module.

use std::fmt;

use percent_encoding::percent_decode_str;
use registry_core::ConfigError;

use super::StoreUrl;
use super::parts::{Parts, is_host, is_well_encoded};
use crate::layer::OptionRow;
use crate::scheme;
use crate::value::HIDDEN;

/// Returns a store URL without its secrets, for logs and messages.
///
/// Only parts that are known to be harmless are shown: a known scheme, hosts and ports, a path, and
/// known options with valid values. User and password become `***`, and so does the value of every
/// other option. Of a URL that cannot be parsed, only the scheme is shown. A password with an
/// unescaped `/`, `?`, `#` or `@` may be anywhere in it.
///
/// # Examples
/// ```
/// # use lock_registry::redact_url;
/// assert_eq!(redact_url("redis://app:hunter2@db:6379/0?lease=30s"), "redis://***@db:6379/0?lease=30s");
/// assert_eq!(redact_url("redis://app:hun/ter2@db"), "redis://***");
/// assert_eq!(redact_url("sqlite:locks.db"), "sqlite:locks.db");
/// ```
#[must_use]
pub fn redact_url(url: &str) -> String {
    let Some(parts) = Parts::cut(url).filter(|parts| scheme::is_known(&parts.scheme)) else {
        return HIDDEN.to_owned();
    };
    let scheme = &parts.scheme;
    let Some(place) = shown_place(&parts) else {
        let slashes = if parts.authority.is_some() { "//" } else { "" };
        return format!("{scheme}:{slashes}{HIDDEN}");
    };
    let Some(query) = parts.query else {
        return format!("{scheme}:{place}");
    };
    let options: Vec<String> = query.split('&').map(shown_option).collect();
    format!("{scheme}:{place}?{}", options.join("&"))
}

/// Returns the part between the scheme and the options, without the login. Returns `None` if the
/// parts cannot be told apart.
fn shown_place(parts: &Parts<'_>) -> Option<String> {
    if parts.fragment.is_some() {
        return None;
    }
    let path = parts.path;
    match (parts.scheme.as_str(), parts.authority) {
        ("memory", None) | ("sqlite", None) => is_plain_path(path).then(|| path.to_owned()),
        ("sqlite", Some("")) => is_plain_path(path).then(|| format!("//{path}")),
        ("pass-through", None) => path.is_empty().then(String::new),
        // These stores have no hosts, so the meaning of this part is unknown.
        ("memory" | "sqlite" | "pass-through", Some(_)) => None,
        // All other stores have an authority, so the URL is incomplete.
        (_, None) => path.is_empty().then(String::new),
        (_, Some(authority)) => {
            let (login, hosts) = match authority.rsplit_once('@') {
                Some((_, hosts)) => ("***@", hosts),
                None => ("", authority),
            };
            let strayed =
                path.contains('@') || parts.query.is_some_and(|query| query.contains('@'));
            let understood = !strayed && hosts.split(',').all(is_host) && is_plain_path(path);
            understood.then(|| format!("//{login}{hosts}{path}"))
        }
    }
}

/// Returns one `name=value` of a query, redacted if necessary.
fn shown_option(option: &str) -> String {
    let Some((name, value)) = option.split_once('=') else { return HIDDEN.to_owned() };
    let Some(row) = OptionRow::find(name) else { return HIDDEN.to_owned() };
    // Text that is not well encoded keeps its `%`, which is not harmless.
    let decoded = percent_decode_str(value).decode_utf8();
    if decoded.is_ok_and(|value| row.is_harmless(&value)) {
        option.to_owned()
    } else {
        format!("{name}={HIDDEN}")
    }
}

/// Returns whether `path` contains no misplaced login or options.
fn is_plain_path(path: &str) -> bool {
    let plain = |c: char| c.is_alphanumeric() || "-._~/+, ()%".contains(c);
    path.chars().all(plain) && is_well_encoded(path)
}

/// The original store URL. `Display` and `Debug` show it without secrets.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct UrlText(String);

impl UrlText {
    pub(crate) fn new(url: impl Into<String>) -> Self {
        Self(url.into())
    }

    /// Parses the URL.
    pub(crate) fn parse(&self) -> Result<StoreUrl, ConfigError> {
        StoreUrl::parse(&self.0)
    }
}

impl fmt::Display for UrlText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&redact_url(&self.0))
    }
}

impl fmt::Debug for UrlText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&redact_url(&self.0), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RegistryConfig;

    #[test]
    fn a_malformed_url_is_refused_and_its_password_is_not_told() {
        for url in CANARIES {
            assert!(RegistryConfig::from_url(url).is_err(), "{url} was accepted");
            assert_silent(url);
        }
    }

    #[cfg(feature = "redis")]
    #[test]
    fn a_password_in_its_place_is_not_told_either() {
        for url in [
            "redis://user:canary@host:6379/0",
            "redis://:canary@host?lease=30s",
            "redis+sentinel://user:canary@a,b/main?sentinel_user=canary&sentinel_password=canary",
            "redis+cluster://user:canary@a,b",
            "redis+quorum://user:canary@a,b,c/1",
            "redis+unix://user:canary@/run/redis.sock?db=1",
        ] {
            let config = RegistryConfig::from_url(url).unwrap();
            let url = StoreUrl::parse(url).unwrap();
            let shown = format!("{config:?} {:?} {url:?} {url:#?}", config.settings().unwrap());
            assert!(!shown.contains("canary"), "{shown}");
        }
    }

    #[test]
    fn what_is_no_secret_is_shown() {
        for (url, shown) in [
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
            assert_eq!(redact_url(url), shown);
        }
    }

    #[test]
    fn what_is_not_known_to_be_harmless_is_hidden() {
        for (url, shown) in [
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
                "redis+unix://u:p@h/run/redis.sock?fsync=p",
                "redis+unix://***@h/run/redis.sock?fsync=***",
            ),
            ("redis+unix://u:p/run/redis.sock", "redis+unix://***"),
            ("redis+quorum://u:p@a,b:p,c", "redis+quorum://***"),
            ("rediss://h?ca=-----p&key=", "rediss://h?ca=***&key=***"),
            ("redis:///u:p", "redis://***"),
            ("redis://u:1?label=s3cret&x@h", "redis://***"),
            ("redis://h/0;password=x", "redis://***"),
            ("redis://[facade]", "redis://***"),
            ("redis://h:+1", "redis://***"),
            ("s3cret:6379", "***"),
            ("s3cret://h", "***"),
            ("", "***"),
        ] {
            assert_eq!(redact_url(url), shown, "{url}");
        }
    }

    /// Returns all output for `url`: its redacted form, and the error if it is invalid.
    fn told(url: &str) -> String {
        let config = RegistryConfig::new().url(url);
        let mut told = redact_url(url);
        if let Err(error) = config.check() {
            told = format!("{told} {error} {error:?}");
        }
        told
    }

    #[track_caller]
    fn assert_silent(url: &str) {
        let told = told(url);
        assert!(!told.to_lowercase().contains("canary"), "{url:?}: {told}");
    }

    #[test]
    fn no_mixture_of_parts_shows_a_secret() {
        // One scheme of each kind.
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
        let seams = ["://", ":///", ":/", ":", "//", ""];
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
        let tails = [
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
        for (scheme, seam) in schemes.iter().flat_map(|s| seams.map(|seam| (s, seam))) {
            for (login, host) in logins.iter().flat_map(|l| hosts.map(|host| (l, host))) {
                for tail in tails {
                    assert_silent(&format!("{scheme}{seam}{login}{host}{tail}"));
                }
            }
        }
    }

    #[test]
    fn no_slip_of_the_pen_shows_a_secret() {
        // The passwords are doubled, so that one half remains recognisable when the other half is
        // damaged.
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
            assert_silent(url);
            let letters: Vec<char> = url.chars().collect();
            for at in 0..=letters.len() {
                let (before, after) = letters.split_at(at);
                let slip = |before: &[char], inserted: &[char], after: &[char]| {
                    assert_silent(&[before, inserted, after].concat().iter().collect::<String>());
                };
                slip(before, &[], &[]);
                slip(&[], &[], after);
                slip(before, &[], after.get(1..).unwrap_or_default());
                if let [first, second, rest @ ..] = after {
                    slip(before, &[*second, *first], rest);
                }
                for typed in ":/?#@&=%[],;.\\'\" \t\n+-_~1aé".chars() {
                    slip(before, &[typed], after);
                    slip(before, &[typed], after.get(1..).unwrap_or_default());
                }
            }
        }
    }

    const CANARIES: &[&str] = &[
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
