//! The texts of errors. Collects all text that a program may display, for tests that search it for
//! a reason or a password. Checks the sentence of a failed acquisition.

use std::error::Error;

use registry_core::LockError;

/// Checks that `error` has the form `acquire on "KEY" at ADDRESS failed: CAUSE; HINT`, and that its
/// text names key and address once. Returns `CAUSE; HINT`.
///
/// # Panics
/// If the text has another form.
#[must_use]
pub fn assert_acquire_error(error: &LockError, key: &str, address: &str) -> String {
    let text = error.to_string();
    let cause = text.strip_prefix(&format!("acquire on {key:?} at {address} failed: "));
    let cause = cause.unwrap_or_else(|| panic!("not of the form at {address}: {text}"));
    assert!(cause.contains("; "), "a hint follows the cause: {text}");
    assert!(!cause.contains(address) && !cause.contains(key), "named twice: {text}");
    cause.to_owned()
}

/// Returns the `Debug` text of `error`, followed by the `Display` text and the pretty `Debug` text
/// of `error` and of its sources.
#[must_use]
pub fn error_text(error: &dyn Error) -> String {
    let mut text = format!("{error:?}");
    let mut next = Some(error);
    while let Some(error) = next {
        text = format!("{text}\n{error}\n{error:#?}");
        next = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::io;

    use super::*;

    #[derive(Debug)]
    struct Outer(io::Error);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the outer one")
        }
    }

    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn error_text_contains_every_form_of_an_error_and_its_sources() {
        let inner = io::Error::new(io::ErrorKind::NotFound, "the inner one");
        let text = error_text(&Outer(inner));
        for part in ["the outer one", "the inner one", "Outer(", "NotFound"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
}
