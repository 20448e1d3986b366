//! `lockreg show`, `list`, `value` and `break`: print holders, waiters and the value block of a
//! key, and release locks by force.

use lock_registry::modes::WaitingClaim;
use lock_registry::{Holder, Key};
use serde::Serialize;
use serde_json::json;

use crate::acquire::close;
use crate::args::{self, GlobalArgs};
use crate::exit::{self, CliError};
use crate::output::{
    HOLDER_HEADING, HolderView, Output, WAITER_HEADING, WaiterView, describe_holder, holder_row,
    json_to_stdout, printable, table, to_stdout, waiter_row,
};
use crate::store::StoreConfig;

/// `lockreg show`.
pub(crate) async fn show(
    global: &GlobalArgs,
    show: &args::ShowArgs,
    output: Output,
) -> Result<u8, CliError> {
    let key = args::parse_key(&show.key)?;
    let registry = StoreConfig::choose(global)?.open(output).await?;
    let lock = registry.obtain(key.as_str());
    let holders = lock.holders().await?;
    let waiters = if registry.capabilities().waiters { lock.waiters().await? } else { Vec::new() };
    close(&registry).await;
    let waiter_table = || match waiters.as_slice() {
        [] => String::new(),
        waiters => format!("\n{}", table(WAITER_HEADING, waiters.iter().map(waiter_row))),
    };
    output.result(&ShowView::new(&key, &holders, &waiters), || match holders.as_slice() {
        [] => format!("{} is not locked\n{}", printable(key.as_str()), waiter_table()),
        holders => table(HOLDER_HEADING, holders.iter().map(holder_row)) + &waiter_table(),
    })?;
    Ok(if holders.is_empty() { exit::NEGATIVE_RESULT } else { 0 })
}

/// A key as JSON: the fields of its first holder, the list of all holders, and the waiters.
#[derive(Debug, Serialize)]
pub(crate) struct ShowView<'a> {
    #[serde(flatten)]
    first: HolderView<'a>,
    holders: Vec<HolderView<'a>>,
    waiters: Vec<WaiterView<'a>>,
}

impl<'a> ShowView<'a> {
    pub(crate) fn new(
        key: &'a Key,
        holders: impl IntoIterator<Item = &'a Holder>,
        waiters: impl IntoIterator<Item = &'a WaitingClaim>,
    ) -> Self {
        let holders: Vec<_> = holders.into_iter().map(HolderView::from).collect();
        let unlocked = || HolderView::unlocked(key.as_str());
        Self {
            first: holders.first().cloned().unwrap_or_else(unlocked),
            holders,
            waiters: waiters.into_iter().map(WaiterView::from).collect(),
        }
    }
}

/// `lockreg list`.
pub(crate) async fn list(
    global: &GlobalArgs,
    args: &args::ListArgs,
    output: Output,
) -> Result<u8, CliError> {
    let registry = StoreConfig::choose(global)?.open(output).await?;
    if args.waiters {
        let waiters = registry.list_waiters().await?;
        close(&registry).await;
        let views: Vec<WaiterView<'_>> = waiters.iter().map(WaiterView::from).collect();
        output.result(&views, || {
            if waiters.is_empty() {
                return "no waiter is registered\n".to_owned();
            }
            table(WAITER_HEADING, waiters.iter().map(waiter_row))
        })?;
        return Ok(0);
    }
    let holders = registry.list().await?;
    close(&registry).await;
    let views: Vec<HolderView<'_>> = holders.iter().map(HolderView::from).collect();
    output.result(&views, || {
        if holders.is_empty() {
            return "no lock is held\n".to_owned();
        }
        table(HOLDER_HEADING, holders.iter().map(holder_row))
    })?;
    Ok(0)
}

/// `lockreg value`.
pub(crate) async fn value(
    global: &GlobalArgs,
    args: &args::ValueArgs,
    output: Output,
) -> Result<u8, CliError> {
    let key = args::parse_key(&args.key)?;
    let registry = StoreConfig::choose(global)?.open(output).await?;
    let value = registry.obtain(key.as_str()).value().await?;
    close(&registry).await;
    let Some(value) = value else {
        output.result(&json!({ "key": key.as_str(), "value": null, "token": null }), || {
            format!("{} has no value\n", printable(key.as_str()))
        })?;
        return Ok(exit::NEGATIVE_RESULT);
    };
    if !global.json {
        to_stdout(&value.bytes)?;
        return Ok(0);
    }
    let token = value.token.get();
    let view = match std::str::from_utf8(&value.bytes) {
        Ok(text) => json!({ "key": key.as_str(), "value": text, "token": token }),
        Err(_) => {
            let hex: String = value.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            json!({ "key": key.as_str(), "value_hex": hex, "token": token })
        }
    };
    json_to_stdout(&view)?;
    Ok(0)
}

/// `lockreg break`.
pub(crate) async fn break_lock(
    global: &GlobalArgs,
    args: &args::BreakArgs,
    output: Output,
) -> Result<u8, CliError> {
    let key = args::parse_key(&args.key)?;
    let registry = StoreConfig::choose(global)?.open(output).await?;
    let mut holders = registry.obtain(key.as_str()).holders().await?;
    let others = holders.len().saturating_sub(1);
    let and_others = match others {
        0 => String::new(),
        1 => " and one other holder".to_owned(),
        others => format!(" and {others} other holders"),
    };
    holders.truncate(1);
    let holder = holders.pop();
    if !args.yes
        && let Some(holder) = &holder
    {
        close(&registry).await;
        return Err(CliError::usage(format!(
            "{} is held by {}{and_others}; add --yes to release the lock by force",
            printable(key.as_str()),
            describe_holder(Some(holder))
        )));
    }
    let is_released = args.yes && registry.force_release(key.as_str()).await?;
    close(&registry).await;
    let view = holder.as_ref().filter(|_| is_released).map(HolderView::from);
    output.result(
        &json!({ "key": key.as_str(), "broken": is_released, "holder": view }),
        || match &holder {
            Some(holder) if is_released => {
                format!(
                    "{} was released; it was held by {}{and_others}\n",
                    printable(key.as_str()),
                    describe_holder(Some(holder))
                )
            }
            _ if is_released => format!("{} was released\n", printable(key.as_str())),
            _ => format!("{} is not locked\n", printable(key.as_str())),
        },
    )?;
    Ok(if is_released { 0 } else { exit::NEGATIVE_RESULT })
}
