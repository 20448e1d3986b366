//! Suggests a known name for a misspelt one.

/// Returns the most similar of the names in `known` that are similar enough to `given`.
pub(crate) fn suggest<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let given = given.to_lowercase();
    known
        .filter(|name| is_similar(&given, name))
        .map(|name| (name, similarity(&given, name)))
        .max_by(|(_, a), (_, b)| a.total_cmp(b))
        .map(|(name, _)| name)
}

/// Returns the similarity of two names. The edit distance has the weight 1. The Jaro-Winkler
/// similarity, which prefers a common prefix, has the weight 1/2.
fn similarity(given: &str, known: &str) -> f64 {
    let known = known.to_lowercase();
    strsim::normalized_damerau_levenshtein(given, &known)
        + strsim::jaro_winkler(given, &known) / 2.0
}

/// Returns whether the edit distance is at most half the length of the longer name, or `given`
/// abbreviates `known` (`ns` for `namespace`).
fn is_similar(given: &str, known: &str) -> bool {
    let known = known.to_lowercase();
    strsim::normalized_damerau_levenshtein(given, &known) >= 0.5
        || (given.len() >= 2 && is_abbreviation(given, &known))
}

fn is_abbreviation(given: &str, known: &str) -> bool {
    let mut letters = known.chars();
    given.chars().next() == known.chars().next()
        && given.chars().all(|letter| letters.any(|other| other == letter))
}

#[cfg(test)]
mod tests {
    use super::suggest;

    #[test]
    fn a_misspelt_name_gets_the_intended_suggestion() {
        let known =
            ["namespace", "lease", "renew", "poll", "handoff", "timeout", "label", "layout"];
        for (given, expected) in [
            ("leese", "lease"),
            ("lable", "label"),
            ("time-out", "timeout"),
            ("hand_off", "handoff"),
            ("ns", "namespace"),
            ("LEASE", "lease"),
            ("renewal", "renew"),
        ] {
            assert_eq!(suggest(given, known.into_iter()), Some(expected), "{given}");
        }
    }

    #[test]
    fn a_name_without_a_similar_name_gets_no_suggestion() {
        let schemes = ["memory", "sqlite", "postgres", "mysql", "mariadb", "redis", "zk", "etcd"];
        for given in ["kafka", "mongodb", "oracle", "memcached", "x", ""] {
            assert_eq!(suggest(given, schemes.into_iter()), None, "{given}");
        }
    }
}
