//! Finds what somebody probably meant.

/// The one of `known` that is most like `given`.
pub(crate) fn nearest<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> &'a str {
    let given = given.to_lowercase();
    known
        .map(|name| (name, likeness(&given, name)))
        .max_by(|(_, a), (_, b)| a.total_cmp(b))
        .map_or("", |(name, _)| name)
}

/// Typing errors count by letters; a name that starts like the known one comes before one that shares its letters.
fn likeness(given: &str, known: &str) -> f64 {
    let known = known.to_lowercase();
    strsim::normalized_damerau_levenshtein(given, &known)
        + strsim::jaro_winkler(given, &known) / 2.0
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn typing_errors_find_their_word() {
        let known =
            ["namespace", "lease", "renew", "poll", "handoff", "timeout", "label", "layout"];
        for (given, meant) in [
            ("leese", "lease"),
            ("lable", "label"),
            ("time-out", "timeout"),
            ("hand_off", "handoff"),
            ("ns", "namespace"),
            ("LEASE", "lease"),
            ("renewal", "renew"),
        ] {
            assert_eq!(nearest(given, known.into_iter()), meant, "{given}");
        }
    }
}
