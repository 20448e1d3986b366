//! Stores in this process: `memory:` and `pass-through:`.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use async_trait::async_trait;
use registry_core::config::{
    BackendConfig, InvalidValue, OpenBackend, OptionError, OptionRow, StoreKind, UrlParts,
};
use registry_core::{BackendError, Capabilities, LockBackend, MemoryBackend, PassThroughBackend};

pub(crate) static MEMORY: StoreKind = StoreKind::new("memory", &[OPTIONS], |url| {
    if url.authority.is_some() {
        return Err(url.invalid(
            "contains `//`; write `memory:`, or `memory:NAME` to share one store by name",
        ));
    }
    let name = Some(url.text(url.path, "a name")?).filter(|name| !name.is_empty());
    Ok(Box::new(LocalConfig { kind: &MEMORY, name, namespace: None }))
});

pub(crate) static PASS_THROUGH: StoreKind =
    StoreKind::new("pass-through", &[OPTIONS], |url: &UrlParts<'_>| {
        if url.authority.is_some() || !url.path.is_empty() {
            return Err(
                url.invalid("contains more than the scheme and options; write `pass-through:`")
            );
        }
        Ok(Box::new(LocalConfig { kind: &PASS_THROUGH, name: None, namespace: None }))
    });

const OPTIONS: &[OptionRow] = &[OptionRow::namespace("none"), OptionRow::layout(&["native"])];

#[derive(Debug)]
struct LocalConfig {
    kind: &'static StoreKind,
    /// All registries with this name and namespace share one store. `None` for a separate store.
    name: Option<String>,
    namespace: Option<String>,
}

impl BackendConfig for LocalConfig {
    fn kind(&self) -> &'static StoreKind {
        self.kind
    }

    fn scheme(&self) -> &'static str {
        self.kind.name
    }

    fn assign(&mut self, name: &str, value: &str) -> Result<(), InvalidValue> {
        match name {
            "namespace" => self.namespace = Some(value.to_owned()),
            "layout" => {}
            _ => return Err(InvalidValue::unknown_option()),
        }
        Ok(())
    }

    fn validate(&self) -> Result<(), OptionError> {
        match &self.namespace {
            Some(namespace) => OptionError::check_not_empty("namespace", namespace),
            None => Ok(()),
        }
    }

    fn capabilities(&self) -> Capabilities {
        if self.kind.name == PASS_THROUGH.name {
            PassThroughBackend::new().capabilities()
        } else {
            MemoryBackend::new().capabilities()
        }
    }
}

#[async_trait]
impl OpenBackend for LocalConfig {
    async fn open(&self) -> Result<Arc<dyn LockBackend>, BackendError> {
        Ok(match &self.name {
            _ if self.kind.name == PASS_THROUGH.name => Arc::new(PassThroughBackend::new()),
            None => Arc::new(MemoryBackend::new()),
            Some(name) => Arc::new(shared_store(name.clone(), self.namespace.clone())),
        })
    }
}

type NamedStores = HashMap<(String, Option<String>), MemoryBackend>;

/// Returns the store of this name and namespace. Creates the store on first use, and never drops
/// it, so that its tokens only grow.
fn shared_store(name: String, namespace: Option<String>) -> MemoryBackend {
    static STORES: LazyLock<Mutex<NamedStores>> = LazyLock::new(Mutex::default);

    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    stores.entry((name, namespace)).or_default().clone()
}
