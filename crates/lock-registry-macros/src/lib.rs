//! The attribute [`macro@locked`]. Applications use it as `lock_registry::locked`, with the feature
//! `macros` of `lock-registry`.

// Listed in the order in which they process an attribute.
mod options;
mod key;
mod expand;

use proc_macro::TokenStream;

/// Runs an async function under a lock. See `lock_registry::locked`.
#[proc_macro_attribute]
pub fn locked(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand::locked(attribute.into(), item.into()).into()
}
