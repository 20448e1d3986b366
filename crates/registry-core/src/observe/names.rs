//! Derives low-cardinality names from keys.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError, RwLock};

/// How the label `name` of a metric is derived from a key: `orders/42` becomes `orders/*`.
///
/// A key that matches a [pattern](Self::pattern) has the pattern as its name. Any other key is
/// split into parts at punctuation such as `/`, `:` and `_`. The parts that look like identifiers
/// become `*`: numbers, dates, UUIDs, hashes, and long or alternating mixtures of letters and
/// digits. Three or more digits at the end of a part also become `*`. The number of different
/// derived names is [limited](Self::limit). A key that would need a further name has the name
/// `other`.
///
/// # Examples
/// ```
/// use registry_core::observe::{KeyNames, MetricsObserver};
///
/// let names = KeyNames::new().pattern("tenants/*/invoices").limit(50);
/// let observer = MetricsObserver::new("redis").names(names);
/// assert_eq!(&*observer.name_of("orders/42"), "orders/*");
/// assert_eq!(&*observer.name_of("tenants/acme/invoices"), "tenants/*/invoices");
/// ```
#[derive(Debug, Clone)]
#[must_use = "names do nothing until an observer uses them"]
pub struct KeyNames {
    patterns: Vec<Arc<str>>,
    limit: usize,
}

impl KeyNames {
    /// The default limit of the number of names.
    pub const LIMIT: usize = 100;

    /// The maximum length of a derived name, in bytes. A key with a longer derived name has the
    /// name `other`.
    pub const NAME_BYTES_MAX: usize = 128;

    /// Returns the default: no patterns, and at most [`LIMIT`](Self::LIMIT) names.
    pub const fn new() -> Self {
        Self { patterns: Vec::new(), limit: Self::LIMIT }
    }

    /// Adds a pattern, in which `*` matches any number of characters, including none. The name of a
    /// key is the first pattern that matches it.
    pub fn pattern(mut self, pattern: impl Into<Arc<str>>) -> Self {
        self.patterns.push(pattern.into());
        self
    }

    /// Sets the maximum number of different derived names. Names from patterns do not count. With
    /// 0, all keys that match no pattern have the name `other`.
    pub const fn limit(mut self, limit: usize) -> Self {
        self.limit = limit;
        self
    }
}

impl Default for KeyNames {
    fn default() -> Self {
        Self::new()
    }
}

/// The rules for names, and the names that one observer has derived so far.
#[derive(Debug)]
pub(super) struct SeenNames {
    config: KeyNames,
    other: Arc<str>,
    seen: RwLock<HashSet<Arc<str>>>,
}

impl SeenNames {
    pub(super) fn new(config: KeyNames) -> Self {
        Self { config, other: "other".into(), seen: RwLock::default() }
    }

    /// Returns the name of `key`.
    pub(super) fn name_of(&self, key: &str) -> Arc<str> {
        if let Some(pattern) = self.config.patterns.iter().find(|it| matches(it, key)) {
            return Arc::clone(pattern);
        }
        let name = derive_name(key);
        if name.len() > KeyNames::NAME_BYTES_MAX {
            return Arc::clone(&self.other);
        }
        if let Some(seen) = self.seen.read().unwrap_or_else(PoisonError::into_inner).get(&*name) {
            return Arc::clone(seen);
        }
        let mut seen = self.seen.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(seen) = seen.get(&*name) {
            return Arc::clone(seen);
        }
        if seen.len() >= self.config.limit {
            return Arc::clone(&self.other);
        }
        let name: Arc<str> = name.into();
        seen.insert(Arc::clone(&name));
        name
    }
}

/// Returns whether `text` matches `pattern`.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else {
        return false;
    };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        // The first occurrence leaves the longest remainder for the following parts.
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}

/// Returns `key` with `*` in place of each part that looks like an identifier.
fn derive_name(key: &str) -> String {
    let mut name = String::with_capacity(key.len());
    for segment in key.split_inclusive(['/', ':']) {
        let separator = segment.ends_with(['/', ':']);
        let (segment, separator) = segment.split_at(segment.len() - usize::from(separator));
        if is_date_or_number(segment) || is_hexadecimal(segment) {
            name.push('*');
        } else {
            push_parts(&mut name, segment);
        }
        name.push_str(separator);
    }
    name
}

/// Appends `segment` with `*` for each of its parts that looks like an identifier.
fn push_parts(name: &mut String, segment: &str) {
    const SEPARATORS: &[char] = &['-', '_', '.', ' ', '@', '#', '=', ',', '|', '{', '}', '(', ')'];
    for part in segment.split_inclusive(SEPARATORS) {
        let separator = part.chars().next_back().filter(|last| SEPARATORS.contains(last));
        let part = separator.map_or(part, |separator| &part[..part.len() - separator.len_utf8()]);
        // At least three trailing digits are an identifier, as in `order123`. Fewer digits, as in
        // `s3` and `host12`, may be part of a name.
        let trailing_digits =
            part.len() - part.trim_end_matches(|it: char| it.is_ascii_digit()).len();
        if is_identifier(part) {
            name.push('*');
        } else if trailing_digits >= 3 {
            name.push_str(&part[..part.len() - trailing_digits]);
            name.push('*');
        } else {
            name.push_str(part);
        }
        name.extend(separator);
    }
}

/// Returns whether `text` begins with a digit and contains only digits and the other characters of
/// dates and numbers.
fn is_date_or_number(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_digit())
        && text.bytes().all(|it| it.is_ascii_digit() || b"-_.,+TZ ".contains(&it))
}

/// Returns whether `text` is a UUID or a hexadecimal hash. Words such as `facade` have no digit.
fn is_hexadecimal(text: &str) -> bool {
    text.len() >= 8
        && text.bytes().any(|it| it.is_ascii_digit())
        && text.bytes().all(|it| it.is_ascii_hexdigit() || it == b'-')
}

/// Returns whether `text` is a number, or a mixture of letters and digits that is too long or too
/// mixed for a name.
fn is_identifier(text: &str) -> bool {
    let digits = text.bytes().filter(u8::is_ascii_digit).count();
    if digits == 0 || !text.bytes().all(|it| it.is_ascii_alphanumeric()) {
        return false;
    }
    let bytes = text.as_bytes();
    let changes = bytes.windows(2).filter(|it| it[0].is_ascii_digit() != it[1].is_ascii_digit());
    digits == text.len() || text.len() >= 16 || is_hexadecimal(text) || changes.count() >= 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_key_that_look_like_identifiers_become_one_star() {
        for (key, name) in [
            ("nightly-report", "nightly-report"),
            ("orders/42", "orders/*"),
            ("orders/42/lines/7", "orders/*/lines/*"),
            ("user:1234:cart", "user:*:cart"),
            ("order-42", "order-*"),
            ("order1234", "order*"),
            ("{orders}.7", "{orders}.*"),
            ("report/2026-11-25", "report/*"),
            ("report/2026-11-25T10:30:00Z", "report/*:*:*"),
            ("blob/550e8400-e29b-41d4-a716-446655440000", "blob/*"),
            ("commit/8c64113f", "commit/*"),
            ("ulid/01ARZ3NDEKTSV4RRFFQ69G5FAV", "ulid/*"),
            ("session/a1b2c3", "session/*"),
            // Names with few digits, and words of hexadecimal letters, do not change.
            ("s3/k8s-v2/host12", "s3/k8s-v2/host12"),
            ("facade/deadbeef", "facade/deadbeef"),
            ("größe/ünï-7", "größe/ünï-*"),
            ("/", "/"),
            ("42", "*"),
        ] {
            assert_eq!(derive_name(key), name, "{key}");
        }
    }

    #[test]
    fn the_first_pattern_that_matches_is_the_name() {
        let names = KeyNames::new().pattern("tenants/*/invoices").pattern("tenants/*").limit(0);
        let names = SeenNames::new(names);
        for (key, name) in [
            ("tenants/acme/invoices", "tenants/*/invoices"),
            ("tenants/a/b/invoices", "tenants/*/invoices"),
            ("tenants/acme", "tenants/*"),
            ("tenants/acme/invoices/7", "tenants/*"),
            ("tenant", "other"),
        ] {
            assert_eq!(&*names.name_of(key), name, "{key}");
        }
        for (pattern, text, does_match) in [
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("*b*", "abc", true),
            ("*bc*c", "abcbcc", true),
            ("abc", "abc", true),
            ("abc", "abcd", false),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern, text), does_match, "{pattern} {text}");
        }
    }

    #[test]
    fn the_number_and_the_length_of_names_are_limited() {
        let names = SeenNames::new(KeyNames::new().limit(3));
        let key = |n: u8| format!("job-{}", char::from(b'a' + n));
        let nth_name = |n| names.name_of(&key(n)).to_string();
        let all: Vec<_> = (0..5).map(nth_name).collect();
        assert_eq!(all, ["job-a", "job-b", "job-c", "other", "other"]);
        assert_eq!(nth_name(1), "job-b", "a name that was seen stays");
        let names = SeenNames::new(KeyNames::new());
        assert_eq!(&*names.name_of(&"x".repeat(KeyNames::NAME_BYTES_MAX + 1)), "other");
    }
}
