//! Store URLs: taken apart and checked, without any I/O. What a URL says about options is kept as text; `layer` reads it.
//! How a URL is shown to people is decided here alone: see [`redact_url`].
//!
//! The parts are cut by hand: hosts may be lists, paths are opaque, and a general URL parser would normalise
//! `.` and `..`, which changes what a path with symbolic links means.

use std::fmt;
use std::path::PathBuf;

use percent_encoding::percent_decode_str;
use registry_core::ConfigError;

use crate::layer::OptionRow;
use crate::scheme::{self, Scheme};

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
    /// No store: everybody is always granted.
    PassThrough,
}

impl Store {
    /// The scheme of its URLs, which is also how errors name it.
    pub(crate) fn scheme(&self) -> &'static str {
        match self {
            Self::Memory { .. } => "memory",
            Self::Sqlite { .. } => "sqlite",
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
    let encoded = part.as_bytes();
    let well_formed =
        encoded.iter().enumerate().filter(|(_, byte)| **byte == b'%').all(|(at, _)| {
            encoded.get(at + 1..at + 3).is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))
        });
    if !well_formed {
        return Err(unusable(
            scheme,
            "holds a `%` without two hexadecimal digits; for the character itself write `%25`",
        ));
    }
    Ok(percent_decode_str(part).collect())
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
/// User and password become `***`, and so does the value of every option that is not known to be harmless. A URL that cannot
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
    let Some(parts) = Parts::cut(url) else {
        return "***".to_owned();
    };
    let scheme = &parts.scheme;
    if parts.fragment.is_some() {
        return format!("{scheme}:***");
    }
    let place = match parts.authority {
        Some(authority) => {
            let (login, hosts) = match authority.rsplit_once('@') {
                Some((_, hosts)) => ("***@", hosts),
                None => ("", authority),
            };
            let strayed = [Some(parts.path), parts.query]
                .into_iter()
                .flatten()
                .any(|part| part.contains('@'));
            if strayed || !hosts.split(',').all(is_host) {
                return format!("{scheme}://***");
            }
            format!("//{login}{hosts}{}", parts.path)
        }
        // Only these have a path without `//`; in all others something is missing.
        None if ["memory", "sqlite"].contains(&scheme.as_str()) || parts.path.is_empty() => {
            parts.path.to_owned()
        }
        None => return format!("{scheme}:***"),
    };
    let Some(query) = parts.query else {
        return format!("{scheme}:{place}");
    };
    let shown: Vec<String> = query
        .split('&')
        .map(|pair| match pair.split_once('=') {
            Some((name, value)) if name != "url" && OptionRow::find(name).is_some() => {
                format!("{name}={value}")
            }
            _ => "***".to_owned(),
        })
        .collect();
    format!("{scheme}:{place}?{}", shown.join("&"))
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
        Some(address) => address
            .strip_suffix(']')
            .is_some_and(|a| a.chars().all(|c| c.is_ascii_hexdigit() || ":.".contains(c))),
        None => name.chars().all(plain),
    };
    named && port.is_none_or(|port| port.parse::<u16>().is_ok())
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
    fn no_error_repeats_a_password_however_the_url_is_malformed() {
        for url in CANARIES {
            let Err(error) = StoreUrl::parse(url) else { panic!("{url} was accepted") };
            for shown in [error.to_string(), format!("{error:?}")] {
                assert!(!shown.to_lowercase().contains("canary"), "{url}: {shown}");
            }
        }
    }

    #[test]
    fn no_shown_url_holds_a_password_however_it_is_malformed() {
        for url in CANARIES {
            let text = UrlText::new(*url);
            for shown in [text.to_string(), format!("{text:?}")] {
                assert!(!shown.to_lowercase().contains("canary"), "{url}: {shown}");
            }
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
            ("memory:shared?url=redis:x", "memory:shared?***"),
            ("pass-through:?lease=1s", "pass-through:?lease=1s"),
        ] {
            assert_eq!(redact_url(url), shown);
        }
    }

    const CANARIES: &[&str] = &[
        "redis://user:canary@host:6379/0",
        "redis://:canary@host",
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
