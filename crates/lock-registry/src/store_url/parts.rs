//! Splits a store URL into its parts, and parses what all stores have in common. The meaning of the
//! parts is in the modules of the stores.

use std::collections::BTreeSet;
use std::net::Ipv6Addr;
use std::path::PathBuf;

use percent_encoding::percent_decode_str;
use registry_core::ConfigError;

use crate::scheme::{self, Scheme};

/// The parts of a URL: `scheme:[//authority]path[?query][#fragment]`. Nothing is decoded.
pub(super) struct UrlParts<'a> {
    pub(super) scheme: String,
    pub(super) authority: Option<&'a str>,
    pub(super) path: &'a str,
    pub(super) query: Option<&'a str>,
    pub(super) fragment: Option<&'a str>,
}

impl<'a> UrlParts<'a> {
    /// Splits `url`. Returns `None` if it does not start with a plausible scheme.
    pub(super) fn split(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once(':')?;
        let plausible = scheme.len() <= SCHEME_BYTES_MAX
            && scheme.starts_with(|first: char| first.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        // `user:password@host` without a scheme.
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

    /// Splits `authority` at its `@`. Refuses any other `@` in the URL, because it may be part of a
    /// password.
    pub(super) fn login_and_hosts(
        &self,
        authority: &'a str,
        scheme: &Scheme,
    ) -> Result<(Option<&'a str>, &'a str), ConfigError> {
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let has_at_sign = |part: &str| part.contains('@');
        if login.is_some_and(has_at_sign)
            || has_at_sign(self.path)
            || self.query.is_some_and(has_at_sign)
        {
            return Err(invalid_url(
                scheme,
                "contains an `@` that does not end the password; in user, password, path and options write `%40`; in a password write \
                 `%2F`, `%3F` and `%23` for `/`, `?` and `#`",
            ));
        }
        Ok((login, hosts))
    }

    /// Returns whether the text before the colon is probably a scheme. Otherwise it may be a user
    /// or a password.
    pub(super) fn has_scheme(&self) -> bool {
        self.authority.is_some() || scheme::is_similar_to_known(&self.scheme)
    }
}

const SCHEME_BYTES_MAX: usize = 32;

fn split_at_first(text: &str, separator: char) -> (&str, Option<&str>) {
    match text.split_once(separator) {
        Some((before, after)) => (before, Some(after)),
        None => (text, None),
    }
}

/// Decodes percent-encoding. Refuses a lone `%`, which is usually a forgotten `%25`.
pub(super) fn decode(part: &str, scheme: &Scheme) -> Result<Vec<u8>, ConfigError> {
    if !is_well_encoded(part) {
        return Err(invalid_url(
            scheme,
            "contains a `%` without two hexadecimal digits; write `%25` for the character itself",
        ));
    }
    Ok(percent_decode_str(part).collect())
}

/// Decodes text. `what` names it in the error if it is not UTF-8.
pub(super) fn decode_text(part: &str, scheme: &Scheme, what: &str) -> Result<String, ConfigError> {
    String::from_utf8(decode(part, scheme)?)
        .map_err(|_| invalid_url(scheme, &format!("contains {what} that is not UTF-8")))
}

pub(super) fn is_well_encoded(part: &str) -> bool {
    let encoded = part.as_bytes();
    encoded.iter().enumerate().filter(|(_, byte)| **byte == b'%').all(|(at, _)| {
        encoded.get(at + 1..at + 3).is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))
    })
}

/// Decodes the path of a file. `hint` is the hint in the error if the path is empty.
pub(super) fn parse_file_path(
    part: &str,
    scheme: &Scheme,
    hint: &str,
) -> Result<PathBuf, ConfigError> {
    let path = decode(part, scheme)?;
    if path.is_empty() {
        return Err(invalid_url(scheme, &format!("has no path; {hint}")));
    }
    if path.contains(&0) {
        return Err(invalid_url(
            scheme,
            "contains a path with a NUL character, which is invalid in a file name",
        ));
    }
    if path.ends_with(b"/") {
        return Err(invalid_url(
            scheme,
            "contains a path that ends in `/`; write the path of the file, not of its directory",
        ));
    }
    path_from_bytes(path, scheme)
}

#[cfg(unix)]
fn path_from_bytes(bytes: Vec<u8>, _scheme: &Scheme) -> Result<PathBuf, ConfigError> {
    use std::os::unix::ffi::OsStringExt as _;

    Ok(std::ffi::OsString::from_vec(bytes).into())
}

#[cfg(not(unix))]
fn path_from_bytes(bytes: Vec<u8>, scheme: &Scheme) -> Result<PathBuf, ConfigError> {
    let path = String::from_utf8(bytes)
        .map_err(|_| invalid_url(scheme, "contains a path that is not UTF-8"))?;
    Ok(path.into())
}

/// A name, or an address without brackets, and a port.
pub(crate) type Host = (String, u16);

/// Parses a host with an optional port.
pub(super) fn parse_host(host: &str, default_port: u16) -> Option<Host> {
    let (name, port) = match host.rsplit_once(':') {
        // The colons of an IPv6 address are inside brackets.
        Some((name, port)) if !port.ends_with(']') => (name, port.parse().ok()),
        _ => (host, Some(default_port)),
    };
    let port = port.filter(|port| is_host(host) && *port != 0 && !name.is_empty())?;
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    Some((name.to_owned(), port))
}

/// Parses a list of distinct servers.
pub(super) fn parse_hosts(
    hosts: &str,
    scheme: &Scheme,
    port: u16,
    syntax_hint: &str,
) -> Result<Vec<Host>, ConfigError> {
    if hosts.is_empty() {
        return Err(invalid_url(scheme, &format!("contains no server; {syntax_hint}")));
    }
    let servers: Option<Vec<Host>> = hosts.split(',').map(|host| parse_host(host, port)).collect();
    let Some(servers) = servers else {
        return Err(invalid_url(
            scheme,
            &format!(
                "contains an invalid server in its list, not a host with an optional port from 1 to 65535; {syntax_hint}; percent-encode \
                 special characters in a password, `/` as `%2F`"
            ),
        ));
    };
    let different: BTreeSet<_> =
        servers.iter().map(|(name, port)| (name.to_ascii_lowercase(), port)).collect();
    if different.len() < servers.len() {
        return Err(invalid_url(
            scheme,
            &format!("contains a server twice (the default port is {port}); list each server once"),
        ));
    }
    Ok(servers)
}

/// Returns whether `host` is a host with an optional port. `user:password` is not, unless the
/// password is a port number.
pub(super) fn is_host(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        // The colons of an IPv6 address are inside brackets.
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

pub(super) fn invalid_url(scheme: &Scheme, problem: &str) -> ConfigError {
    ConfigError::Invalid(format!("the `{}:` store URL {problem}", scheme.name))
}
