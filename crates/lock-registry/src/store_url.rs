//! Finds the store of a URL by its scheme, and decodes the options of the query as text. The store
//! parses the rest of the URL itself.

use registry_core::ConfigError;
use registry_core::config::{BackendConfig, Secret, UrlParts};

use crate::scheme::{self, Scheme};

/// A store and the options that its URL sets.
#[derive(Debug)]
pub(crate) struct StoreUrl {
    pub(crate) store: Box<dyn BackendConfig>,
    /// The decoded names and values. A value may be a password.
    pub(crate) options: Vec<(String, Secret)>,
}

impl StoreUrl {
    /// Parses `url`. Errors show only the scheme and fixed text. In a malformed URL, any other part
    /// may contain a password.
    pub(crate) fn parse(url: &str) -> Result<Self, ConfigError> {
        if url.is_empty() {
            return Err(error_with_schemes(
                "the store URL is empty; write for example `sqlite:PATH`; known schemes:",
            ));
        }
        let Some(parts) = split(url) else {
            return Err(error_with_schemes(
                "the store URL does not start with a scheme; for an SQLite file write `sqlite:PATH`; known schemes:",
            ));
        };
        // Without `//`, the text before the colon may be a user or a password. The error must not
        // show such a text.
        if parts.authority.is_none() && !scheme::is_similar_to_known(&parts.scheme) {
            return Err(error_with_schemes(
                "the store URL does not start with a known scheme; for an SQLite file write `sqlite:PATH`; known schemes:",
            ));
        }
        let kind = Scheme::find_store(&parts.scheme)?;
        let parsed = parts
            .check()
            .and_then(|()| (kind.parse)(&parts))
            .and_then(|store| Ok(Self { store, options: parts.options()? }));
        parsed.map_err(|error| ConfigError::Invalid(error.to_string()))
    }
}

/// Splits a URL. Returns `None` if it does not start with a scheme.
pub(crate) fn split(url: &str) -> Option<UrlParts<'_>> {
    let (scheme, rest) = url.split_once(':')?;
    // The text may be `user:password@host`, without a scheme.
    let is_known = scheme::is_known(&scheme.to_ascii_lowercase());
    let is_login = !rest.starts_with("//") && rest.contains('@') && !is_known;
    if is_login { None } else { UrlParts::split(url) }
}

fn error_with_schemes(problem: &str) -> ConfigError {
    ConfigError::Invalid(format!("{problem} {}", scheme::list_of_schemes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_url_has_an_optional_name() {
        let store = |url| format!("{:?}", StoreUrl::parse(url).unwrap().store);
        assert!(store("memory:").contains("name: None"));
        assert!(store("memory:a%2Fb").contains("name: Some(\"a/b\")"));
        assert!(StoreUrl::parse("memory://a").is_err());
        assert!(store("pass-through:").contains("pass-through"));
        assert!(StoreUrl::parse("pass-through:x").is_err());
    }

    #[test]
    fn a_path_may_contain_an_at_sign_if_the_scheme_is_known_in_any_case() {
        assert!(split("sqlite:/srv/me@work/locks.db").is_some());
        assert!(split("SQLITE:/srv/me@work/locks.db").is_some());
        assert!(split("user:password@host").is_none());
    }

    #[test]
    fn options_are_percent_decoded_and_a_plus_sign_is_unchanged() {
        let url = StoreUrl::parse("memory:?label=a%20b+c&lease=5s&").unwrap();
        let pairs = [("label", "a b+c"), ("lease", "5s")];
        assert_eq!(url.options, pairs.map(|(name, value)| (name.to_owned(), Secret::new(value))));
    }
}
