//! `lockreg show`, `list` and `break`: print the holders of locks, and release locks by force.

use lock_registry::LockRegistry;
use serde_json::json;

use crate::args::{self, Global};
use crate::exit::{self, Failure};
use crate::say::{HOLDER_HEADING, HolderView, Say, holder_phrase, holder_row, printable, table};
use crate::store::Store;
use crate::take::close;

/// `lockreg show`.
pub(crate) async fn show(global: &Global, show: &args::Show, say: Say) -> Result<u8, Failure> {
    let key = args::key(&show.key)?;
    let registry = Store::choose(global)?.open(say).await?;
    let holder = registry.obtain(key.as_str()).holder().await?;
    close(&registry).await;
    match &holder {
        Some(holder) => {
            say.result(&HolderView::from(holder), || table(HOLDER_HEADING, [holder_row(holder)]))?;
            Ok(0)
        }
        None => {
            say.result(&HolderView::nobody(key.as_str()), || {
                format!("{} is not locked\n", printable(key.as_str()))
            })?;
            Ok(exit::NEGATIVE)
        }
    }
}

/// `lockreg list`.
pub(crate) async fn list(global: &Global, say: Say) -> Result<u8, Failure> {
    let registry = Store::choose(global)?.open(say).await?;
    let holders = registry.list().await?;
    close(&registry).await;
    let views: Vec<HolderView<'_>> = holders.iter().map(HolderView::from).collect();
    say.result(&views, || {
        if holders.is_empty() {
            return "no lock is held\n".to_owned();
        }
        table(HOLDER_HEADING, holders.iter().map(holder_row))
    })?;
    Ok(0)
}

/// `lockreg break`.
pub(crate) async fn break_lock(
    global: &Global,
    broken: &args::Break,
    say: Say,
) -> Result<u8, Failure> {
    let key = args::key(&broken.key)?;
    let registry = Store::choose(global)?.open(say).await?;
    let holder = registry.obtain(key.as_str()).holder().await?;
    if !broken.yes
        && let Some(holder) = &holder
    {
        close(&registry).await;
        return Err(Failure::usage(format!(
            "{} is held by {}; add --yes to break the lock",
            printable(key.as_str()),
            holder_phrase(Some(holder))
        )));
    }
    let freed = broken.yes && registry.force_release(key.as_str()).await?;
    close(&registry).await;
    let view = holder.as_ref().filter(|_| freed).map(HolderView::from);
    say.result(
        &json!({ "key": key.as_str(), "broken": freed, "holder": view }),
        || match &holder {
            Some(holder) if freed => {
                format!(
                    "{} was taken from {}\n",
                    printable(key.as_str()),
                    holder_phrase(Some(holder))
                )
            }
            _ if freed => format!("{} was taken from its holder\n", printable(key.as_str())),
            _ => format!("{} is not locked\n", printable(key.as_str())),
        },
    )?;
    Ok(if freed { 0 } else { exit::NEGATIVE })
}
