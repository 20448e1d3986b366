//! Store URLs: taken apart and checked, without any I/O. What a URL says about options is kept as text; `layer` reads it.
//! How a URL is shown to people is decided here alone: see [`redact_url`].
//!
//! The parts are cut by hand: hosts may be lists, paths are opaque, and a general URL parser would normalise
//! `.` and `..`, which changes what a path with symbolic links means.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;

use percent_encoding::percent_decode_str;
use registry_core::ConfigError;

use crate::layer::OptionRow;
use crate::scheme::{self, Scheme};

mod redis;

pub(crate) use redis::RedisServer;

/// A store and the options that its URL sets.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoreUrl {
    pub(crate) store: Store,
    /// Name and value, decoded.
    pub(crate) options: Vec<(String, String)>,
}

/// A store that this build can open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Store {
    /// The in-process store; one of its own, or the one that the whole process knows by this name.
    Memory { name: Option<String> },
    /// The SQLite file at this path.
    Sqlite { path: PathBuf },
    /// This Redis server.
    Redis(RedisServer),
    /// No store: everybody is always granted.
    PassThrough,
}

impl Store {
    /// The scheme of its URLs, which is also how errors name it.
    pub(crate) fn scheme(&self) -> &'static str {
        match self {
            Self::Memory { .. } => "memory",
            Self::Sqlite { .. } => "sqlite",
            Self::Redis(server) => server.scheme(),
            Self::PassThrough => "pass-through",
        }
    }
}

impl StoreUrl {
    /// Takes `url` apart. No error repeats any of it but its scheme, the names of its options and the path of a file:
    /// a password may stand anywhere else, most of all in a URL that is malformed.
    pub(crate) fn parse(url: &str) -> Result<Self, ConfigError> {
        if url.is_empty() {
            return Err(invalid(
                "the store URL is empty; write `sqlite:PATH` or another of",
                &scheme::known(),
            ));
        }
        let Some(parts) = Parts::cut(url) else {
            return Err(invalid(
                "the store URL does not start with a scheme; for an SQLite file write `sqlite:PATH`; schemes are",
                &scheme::known(),
            ));
        };
        if !parts.names_a_scheme() {
            return Err(invalid(
                "the store URL starts with no scheme that there is; for an SQLite file write `sqlite:PATH`; schemes are",
                &scheme::known(),
            ));
        }
        let scheme = Scheme::find(&parts.scheme)?;
        if url.chars().any(char::is_control) {
            return Err(unusable(scheme, "holds a control character; percent-encode it"));
        }
        if parts.fragment.is_some() {
            return Err(unusable(
                scheme,
                "holds a `#`, which has no meaning here; as part of a name write `%23`",
            ));
        }
        let store = match scheme.name {
            "memory" => memory(&parts, scheme)?,
            "sqlite" => sqlite(&parts, scheme)?,
            "redis" | "rediss" => redis::redis(&parts, scheme)?,
            _ => pass_through(&parts, scheme)?,
        };
        let options = parts.query.map_or(Ok(Vec::new()), |query| options(query, scheme))?;
        Ok(Self { store, options })
    }
}

fn memory(parts: &Parts<'_>, scheme: &Scheme) -> Result<Store, ConfigError> {
    if parts.authority.is_some() {
        return Err(unusable(
            scheme,
            "has no `//`: write `memory:`, or `memory:NAME` to share one store by name",
        ));
    }
    let name = decoded(parts.path, scheme)?;
    let name =
        String::from_utf8(name).map_err(|_| unusable(scheme, "has a name that is not UTF-8"))?;
    Ok(Store::Memory { name: Some(name).filter(|name| !name.is_empty()) })
}

fn sqlite(parts: &Parts<'_>, scheme: &Scheme) -> Result<Store, ConfigError> {
    if parts.authority.is_some_and(|authority| !authority.is_empty()) {
        return Err(unusable(
            scheme,
            "names a host or a user after `//`, which a file does not have; write `sqlite:PATH` for a path from the working \
             directory, `sqlite:///PATH` for one from the root",
        ));
    }
    if parts.path == ":memory:" {
        return Err(unusable(
            scheme,
            "names no file; for a store within this process write `memory:`",
        ));
    }
    let path = decoded(parts.path, scheme)?;
    if path.is_empty() {
        return Err(unusable(scheme, "has no path; write `sqlite:PATH`"));
    }
    if path.contains(&0) {
        return Err(unusable(
            scheme,
            "has a path with a NUL character, which no file name can hold",
        ));
    }
    if path.ends_with(b"/") {
        return Err(unusable(scheme, "has a path that ends in `/`; name the file, not its folder"));
    }
    Ok(Store::Sqlite { path: path_of(path, scheme)? })
}

fn pass_through(parts: &Parts<'_>, scheme: &Scheme) -> Result<Store, ConfigError> {
    if parts.authority.is_some() || !parts.path.is_empty() {
        return Err(unusable(scheme, "is just `pass-through:`, with nothing before the options"));
    }
    Ok(Store::PassThrough)
}

fn options(query: &str, scheme: &Scheme) -> Result<Vec<(String, String)>, ConfigError> {
    let text = |part: &str| {
        let bytes = decoded(part, scheme)?;
        String::from_utf8(bytes).map_err(|_| unusable(scheme, "has an option that is not UTF-8"))
    };
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| match pair.split_once('=') {
            Some((name, value)) => Ok((text(name)?, text(value)?)),
            // Not repeated: it may be the rest of a password that holds a `?`.
            None => Err(unusable(scheme, "has an option without a value; write `name=value`")),
        })
        .collect()
}

/// Undoes percent-encoding, strictly: a lone `%` is more often a forgotten `%25` than meant.
fn decoded(part: &str, scheme: &Scheme) -> Result<Vec<u8>, ConfigError> {
    if !is_well_encoded(part) {
        return Err(unusable(
            scheme,
            "holds a `%` without two hexadecimal digits; for the character itself write `%25`",
        ));
    }
    Ok(percent_decode_str(part).collect())
}

fn is_well_encoded(part: &str) -> bool {
    let encoded = part.as_bytes();
    encoded.iter().enumerate().filter(|(_, byte)| **byte == b'%').all(|(at, _)| {
        encoded.get(at + 1..at + 3).is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))
    })
}

#[cfg(unix)]
fn path_of(bytes: Vec<u8>, _scheme: &Scheme) -> Result<PathBuf, ConfigError> {
    use std::os::unix::ffi::OsStringExt as _;

    Ok(std::ffi::OsString::from_vec(bytes).into())
}

#[cfg(not(unix))]
fn path_of(bytes: Vec<u8>, scheme: &Scheme) -> Result<PathBuf, ConfigError> {
    let path =
        String::from_utf8(bytes).map_err(|_| unusable(scheme, "has a path that is not UTF-8"))?;
    Ok(path.into())
}

fn invalid(problem: &str, list: &str) -> ConfigError {
    ConfigError::Invalid(format!("{problem} {list}"))
}

fn unusable(scheme: &Scheme, problem: &str) -> ConfigError {
    ConfigError::Invalid(format!("the `{}:` store URL {problem}", scheme.name))
}

/// A URL as it is cut up: `scheme:[//authority]path[?query][#fragment]`. Nothing is decoded.
struct Parts<'a> {
    scheme: String,
    authority: Option<&'a str>,
    path: &'a str,
    query: Option<&'a str>,
    fragment: Option<&'a str>,
}

impl<'a> Parts<'a> {
    /// `None` when `url` does not start with what could be a scheme.
    fn cut(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once(':')?;
        let plausible = scheme.len() <= SCHEME_BYTES_MAX
            && scheme.starts_with(|first: char| first.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        // `user:password@host`, with the scheme forgotten.
        let login = !rest.starts_with("//") && rest.contains('@') && Scheme::find(scheme).is_err();
        if !plausible || login {
            return None;
        }
        let (rest, fragment) = split_at_first(rest, '#');
        let (rest, query) = split_at_first(rest, '?');
        let (authority, path) = match rest.strip_prefix("//") {
            Some(rest) => {
                let end = rest.find('/').unwrap_or(rest.len());
                (Some(&rest[..end]), &rest[end..])
            }
            None => (None, rest),
        };
        Some(Self { scheme: scheme.to_ascii_lowercase(), authority, path, query, fragment })
    }

    /// Whether what stands before the colon is meant as a scheme. Otherwise it may be a user, or a password.
    fn names_a_scheme(&self) -> bool {
        self.authority.is_some() || scheme::is_like_known(&self.scheme)
    }
}

const SCHEME_BYTES_MAX: usize = 32;

fn split_at_first(text: &str, mark: char) -> (&str, Option<&str>) {
    match text.split_once(mark) {
        Some((before, after)) => (before, Some(after)),
        None => (text, None),
    }
}

/// Shows a store URL without its secrets, for logs and messages.
///
/// Shown is only what is known to be harmless: the scheme, if it is one of ours; hosts and ports; a path; options of ours with
/// values that they can have. User and password become `***`, and so does the value of every other option. A URL that cannot
/// be understood is not shown at all, but for its scheme: a password with an unescaped `/`, `?`, `#` or `@` may stand anywhere in it.
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

const HIDDEN: &str = "***";

/// What stands between the scheme and the options, without the login. `None` if it cannot be told what is what.
fn shown_place(parts: &Parts<'_>) -> Option<String> {
    if parts.fragment.is_some() {
        return None;
    }
    let path = parts.path;
    match (parts.scheme.as_str(), parts.authority) {
        ("memory", None) | ("sqlite", None) => is_plain_path(path).then(|| path.to_owned()),
        ("sqlite", Some("")) => is_plain_path(path).then(|| format!("//{path}")),
        ("pass-through", None) => path.is_empty().then(String::new),
        // They have no hosts, so it is anybody's guess what this was to be.
        ("memory" | "sqlite" | "pass-through", Some(_)) => None,
        // In all others something is missing.
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

/// One `name=value` of a query.
fn shown_option(option: &str) -> String {
    let Some((name, value)) = option.split_once('=') else { return HIDDEN.to_owned() };
    let Some(row) = OptionRow::find(name) else { return HIDDEN.to_owned() };
    // What is not well encoded keeps its `%`, which is not harmless.
    let decoded = percent_decode_str(value).decode_utf8();
    if decoded.is_ok_and(|value| row.is_harmless(&value)) {
        option.to_owned()
    } else {
        format!("{name}={HIDDEN}")
    }
}

/// Whether `path` holds nothing of a login or of options that went astray.
fn is_plain_path(path: &str) -> bool {
    let plain = |c: char| c.is_alphanumeric() || "-._~/+, ()%".contains(c);
    path.chars().all(plain) && is_well_encoded(path)
}

/// A host with an optional port. `user:password` is none, unless the password is a port number.
fn is_host(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        // The colons of an IPv6 address stand in brackets.
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (host, None),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let named = match name.strip_prefix('[') {
        Some(address) => {
            address.strip_suffix(']').is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
        }
        None => name.chars().all(plain),
    };
    let numbered =
        |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok();
    named && port.is_none_or(numbered)
}

/// A store URL as it was given: kept in full, shown without its secrets.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct UrlText(String);

impl UrlText {
    pub(crate) fn new(url: impl Into<String>) -> Self {
        Self(url.into())
    }

    /// Takes it apart.
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

    fn store(url: &str) -> Store {
        StoreUrl::parse(url).unwrap().store
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn sqlite_paths_are_taken_as_they_are_written() {
        for (url, path) in [
            ("sqlite:locks.db", "locks.db"),
            ("sqlite:./a/../locks.db", "./a/../locks.db"),
            ("sqlite:/var/lib/locks.db", "/var/lib/locks.db"),
            ("sqlite:///var/lib/locks.db", "/var/lib/locks.db"),
            ("SQLite:locks.db", "locks.db"),
            ("sqlite:with%20space%3F%23%25.db?lease=5s", "with space?#%.db"),
            ("sqlite:me@home:1.db", "me@home:1.db"),
            ("sqlite:a+b c.db", "a+b c.db"),
        ] {
            assert_eq!(store(url), Store::Sqlite { path: path.into() }, "{url}");
        }
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn a_sqlite_url_that_names_no_file_says_what_to_write() {
        for (url, hint) in [
            ("sqlite:", "has no path"),
            ("sqlite:///", "ends in `/`"),
            ("sqlite:folder/", "ends in `/`"),
            ("sqlite://relative/locks.db", "sqlite:PATH"),
            ("sqlite::memory:", "write `memory:`"),
            ("sqlite:a%00b", "NUL"),
            ("sqlite:100%.db", "`%25`"),
            ("sqlite:a#b", "`%23`"),
            ("sqlite:a\nb", "control character"),
            ("sqlite:a?lease", "name=value"),
        ] {
            let error = StoreUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(hint), "{url:?}: {error}");
        }
    }

    #[test]
    fn memory_stores_have_a_name_or_none() {
        assert_eq!(store("memory:"), Store::Memory { name: None });
        assert_eq!(store("memory:a%2Fb"), Store::Memory { name: Some("a/b".to_owned()) });
        assert!(StoreUrl::parse("memory://a").is_err());
        assert_eq!(store("pass-through:"), Store::PassThrough);
        assert!(StoreUrl::parse("pass-through:x").is_err());
    }

    #[test]
    fn options_are_decoded_and_plus_is_no_space() {
        let url = StoreUrl::parse("memory:?label=a%20b+c&lease=5s&").unwrap();
        let pairs = [("label", "a b+c"), ("lease", "5s")];
        assert_eq!(url.options, pairs.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }

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
        for url in ["redis://user:canary@host:6379/0", "redis://:canary@host?lease=30s"] {
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
            ("redis+unix://u:p@/run/redis.sock", "***"),
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

    /// Everything that is shown of `url`, or told of what is wrong with it.
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
        // One of each kind.
        let schemes = ["memory", "SQLite", "pass-through", "redis+sentinel", "postgress", "bogus"];
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
        // Long enough that half of it is left when the slip is in the middle of it.
        for url in [
            "redis://user:canarycanary@host:6379/0?lease=30s",
            "rediss://:canarycanary@host",
            "redis+sentinel://user:canarycanary@a:1,b:2/main?poll=1s",
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
