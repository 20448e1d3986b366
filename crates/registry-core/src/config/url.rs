//! Splits a store URL into its parts, and parses logins, hosts, paths and options for all stores.
//!
//! A general URL parser cannot parse lists of hosts. It would also normalise `.` and `..` in a
//! path, which changes the meaning of a path with symbolic links.

use std::collections::BTreeSet;
use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;

use percent_encoding::percent_decode_str;

use super::value::Secret;
use crate::error::{BackendError, BackendErrorKind};

/// The parts of a URL: `scheme:[//authority]path[?query][#fragment]`. Nothing is decoded.
///
/// Errors show only the scheme and fixed text, because any other part may contain a password, above
/// all in a malformed URL.
#[derive(Clone)]
#[non_exhaustive]
pub struct UrlParts<'a> {
    /// The scheme in lower case.
    pub scheme: String,
    /// The text between `//` and the path.
    pub authority: Option<&'a str>,
    /// The path.
    pub path: &'a str,
    /// The text after `?`.
    pub query: Option<&'a str>,
    /// The text after `#`.
    pub fragment: Option<&'a str>,
}

/// A host name or an IP address, without brackets, and a port.
pub type Host = (String, u16);

/// The decoded user and password of a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Login {
    /// The user. May be empty.
    pub user: Secret,
    /// The password. `None` if the login contains no colon.
    pub password: Option<Secret>,
}

impl fmt::Debug for UrlParts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UrlParts").field("scheme", &self.scheme).finish_non_exhaustive()
    }
}

impl<'a> UrlParts<'a> {
    /// Splits `url`. Returns `None` if it does not start with a plausible scheme.
    #[must_use]
    pub fn split(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once(':')?;
        let is_plausible = scheme.len() <= SCHEME_BYTES_MAX
            && scheme.starts_with(|first: char| first.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        if !is_plausible {
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

    /// Refuses characters that no store URL may contain.
    ///
    /// # Errors
    /// `Misconfigured` for a fragment or a control character.
    pub fn check(&self) -> Result<(), BackendError> {
        let parts = [self.authority, Some(self.path), self.query, self.fragment];
        if parts.into_iter().flatten().any(|part| part.chars().any(char::is_control)) {
            return Err(self.invalid("contains a control character; percent-encode it"));
        }
        if self.fragment.is_some() {
            return Err(self.invalid(
                "contains a `#`, which has no meaning here; write `%23` for this character in a name",
            ));
        }
        Ok(())
    }

    /// Returns the options of the query, decoded. A value may be a password.
    ///
    /// # Errors
    /// `Misconfigured` for an option without `=`, and for one that [`text`](Self::text) cannot
    /// decode.
    pub fn options(&self) -> Result<Vec<(String, Secret)>, BackendError> {
        let pairs = self.query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        pairs
            .map(|pair| match pair.split_once('=') {
                Some((name, value)) => {
                    let value = Secret::new(self.text(value, "an option")?);
                    Ok((self.text(name, "an option")?, value))
                }
                // The error does not show the text. If a password contains a `?`, the text may be
                // the rest of that password.
                None => Err(self.invalid("contains an option without a value; write `name=value`")),
            })
            .collect()
    }

    /// Returns the login and the undecoded hosts.
    ///
    /// Refuses an `@` in the login, the path or the query, because it may be part of a password.
    ///
    /// # Errors
    /// `Misconfigured` for a URL without an authority, with `syntax` as the hint. `Misconfigured`
    /// for such an `@`, and for a login that [`text`](Self::text) cannot decode.
    pub fn login_and_hosts(&self, syntax: &str) -> Result<(Option<Login>, &'a str), BackendError> {
        let Some(authority) = self.authority else {
            return Err(self.invalid(&format!("contains no server; {syntax}")));
        };
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let has_at_sign = |part: &str| part.contains('@');
        if login.is_some_and(has_at_sign)
            || has_at_sign(self.path)
            || self.query.is_some_and(has_at_sign)
        {
            return Err(self.invalid(
                "contains an `@` that does not end the password; in user, password, path and options write `%40`; in a password write \
                 `%2F`, `%3F` and `%23` for `/`, `?` and `#`",
            ));
        }
        Ok((login.map(|login| self.login(login)).transpose()?, hosts))
    }

    fn login(&self, login: &str) -> Result<Login, BackendError> {
        let text = |part| self.text(part, "a user or a password").map(Secret::new);
        Ok(match login.split_once(':') {
            Some((user, password)) => Login { user: text(user)?, password: Some(text(password)?) },
            None => Login { user: text(login)?, password: None },
        })
    }

    /// Parses one server with an optional port.
    ///
    /// # Errors
    /// `Misconfigured` if `host` is not a server with an optional port.
    pub fn host(&self, host: &str, default_port: u16) -> Result<Host, BackendError> {
        parse_host(host, default_port).ok_or_else(|| self.invalid_host())
    }

    /// Returns the error for a URL without a valid host.
    #[must_use]
    pub fn invalid_host(&self) -> BackendError {
        self.invalid(
            "contains no valid host with an optional port from 1 to 65535; percent-encode special characters in a password, \
             `/` as `%2F`",
        )
    }

    /// Parses a list of distinct servers. `syntax` is the hint in the errors for an empty list and
    /// for an invalid server.
    ///
    /// # Errors
    /// `Misconfigured` for an empty list, an invalid server, or a server that is listed twice.
    pub fn hosts(
        &self,
        hosts: &str,
        default_port: u16,
        syntax: &str,
    ) -> Result<Vec<Host>, BackendError> {
        if hosts.is_empty() {
            return Err(self.invalid(&format!("contains no server; {syntax}")));
        }
        let servers: Option<Vec<Host>> =
            hosts.split(',').map(|host| parse_host(host, default_port)).collect();
        let Some(servers) = servers else {
            return Err(self.invalid(&format!(
                "lists an invalid server; each must be a host with an optional port from 1 to 65535; {syntax}; percent-encode \
                 special characters in a password, `/` as `%2F`"
            )));
        };
        let distinct: BTreeSet<_> =
            servers.iter().map(|(name, port)| (name.to_ascii_lowercase(), port)).collect();
        if distinct.len() < servers.len() {
            return Err(self.invalid(&format!(
                "contains a server twice (the default port is {default_port}); list each server once"
            )));
        }
        Ok(servers)
    }

    /// Decodes `part`. The error for text that is not UTF-8 calls the text `what`.
    ///
    /// # Errors
    /// `Misconfigured` for text that is not UTF-8 or has an invalid percent-encoding.
    pub fn text(&self, part: &str, what: &str) -> Result<String, BackendError> {
        String::from_utf8(self.decode(part)?)
            .map_err(|_| self.invalid(&format!("contains {what} that is not UTF-8")))
    }

    /// Decodes the path of a file. The error for an empty path ends with `hint`.
    ///
    /// # Errors
    /// `Misconfigured` for text that cannot be the path of a file.
    pub fn file_path(&self, part: &str, hint: &str) -> Result<PathBuf, BackendError> {
        let path = self.decode(part)?;
        if path.is_empty() {
            return Err(self.invalid(&format!("has no path; {hint}")));
        }
        if path.contains(&0) {
            return Err(self
                .invalid("contains a path with a NUL character, which is invalid in a file name"));
        }
        if path.ends_with(b"/") {
            return Err(self.invalid(
                "contains a path that ends in `/`; write the path of the file, not of its directory",
            ));
        }
        path_from_bytes(path).ok_or_else(|| self.invalid("contains a path that is not UTF-8"))
    }

    /// Decodes percent-encoding. Refuses a `%` without two hexadecimal digits, because it usually
    /// stands for the character itself.
    fn decode(&self, part: &str) -> Result<Vec<u8>, BackendError> {
        if !is_well_encoded(part) {
            return Err(self.invalid(
                "contains a `%` without two hexadecimal digits; write `%25` for the character itself",
            ));
        }
        Ok(percent_decode_str(part).collect())
    }

    /// Returns the error for this URL. `problem` continues the sentence that begins with "the
    /// `SCHEME:` store URL". It must contain no secret.
    #[must_use]
    pub fn invalid(&self, problem: &str) -> BackendError {
        let message = format!("the `{}:` store URL {problem}", self.scheme);
        BackendError::new(BackendErrorKind::Misconfigured, message).as_refused()
    }
}

const SCHEME_BYTES_MAX: usize = 32;

fn split_at_first(text: &str, separator: char) -> (&str, Option<&str>) {
    match text.split_once(separator) {
        Some((before, after)) => (before, Some(after)),
        None => (text, None),
    }
}

/// Returns whether each `%` in `part` is followed by two hexadecimal digits.
#[must_use]
pub fn is_well_encoded(part: &str) -> bool {
    let encoded = part.as_bytes();
    encoded.iter().enumerate().filter(|(_, byte)| **byte == b'%').all(|(at, _)| {
        encoded.get(at + 1..at + 3).is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))
    })
}

#[cfg(unix)]
fn path_from_bytes(bytes: Vec<u8>) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStringExt as _;

    Some(std::ffi::OsString::from_vec(bytes).into())
}

#[cfg(not(unix))]
fn path_from_bytes(bytes: Vec<u8>) -> Option<PathBuf> {
    String::from_utf8(bytes).ok().map(Into::into)
}

/// Parses a host with an optional port.
fn parse_host(host: &str, default_port: u16) -> Option<Host> {
    let (name, port) = match host.rsplit_once(':') {
        // The colons of an IPv6 address are inside brackets.
        Some((name, port)) if !port.ends_with(']') => (name, port.parse().ok()),
        _ => (host, Some(default_port)),
    };
    let port = port.filter(|port| is_host(host) && *port != 0 && !name.is_empty())?;
    let Some(address) = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) else {
        return Some((name.to_owned(), port));
    };
    // One spelling for each address, so that a duplicate host is found.
    let address = match address.parse::<Ipv6Addr>() {
        Ok(address) => address.to_string(),
        Err(_) => address.to_owned(),
    };
    Some((address, port))
}

/// Returns whether `host` is a host with an optional port. This is false for `user:password`,
/// unless the user is a valid host name and the password is a number up to 65535. It is true for an
/// empty host, which [`UrlParts::host`] refuses.
#[must_use]
pub fn is_host(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        // The colons of an IPv6 address are inside brackets.
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (host, None),
    };
    let is_host_character = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let is_valid_name = match name.strip_prefix('[') {
        Some(address) => {
            address.strip_suffix(']').is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
        }
        None => name.chars().all(is_host_character),
    };
    let is_valid_port =
        |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok();
    is_valid_name && port.is_none_or(is_valid_port)
}

/// Formats a host as in a URL, with brackets around an IPv6 address that has none.
#[must_use]
pub fn display_host((name, port): &Host) -> String {
    if name.contains(':') && !name.starts_with('[') {
        format!("[{name}]:{port}")
    } else {
        format!("{name}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_address_is_shown_with_one_pair_of_brackets() {
        for (name, shown) in
            [("::1", "[::1]:5432"), ("[::1]", "[::1]:5432"), ("db.example", "db.example:5432")]
        {
            assert_eq!(display_host(&(name.to_owned(), 5432)), shown);
        }
    }
}
