//! Parses the options in `#[locked(..)]`. The module `key` checks the placeholders of a key.

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Error, Expr, ExprLit, Ident, Lit, LitStr, Path, Token};

const NAMES: &str = "`key`, `registry`, `wait`, `lease`, `max_hold`, `min_hold`, `mode`, `options`, `token` \
                     and `crate`";

/// The options of one `#[locked(..)]`.
pub(crate) struct Options {
    pub(crate) key: Value,
    pub(crate) registry: Expr,
    pub(crate) mode: Option<Value>,
    /// The `LockOptions` that the other options change.
    pub(crate) base_options: Option<Expr>,
    /// Methods of `LockOptions` that take a duration, each with its argument.
    pub(crate) durations: Vec<(Ident, TokenStream)>,
    pub(crate) token: Option<Ident>,
    /// The path of the crate `lock-registry`.
    pub(crate) crate_path: Option<Path>,
}

/// The value of an option: a string literal, or any other expression.
pub(crate) enum Value {
    Text(LitStr),
    Expression(Expr),
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut seen: Vec<Ident> = Vec::new();
        let (mut key, mut registry, mut mode, mut base_options) = (None, None, None, None);
        let (mut durations, mut token, mut crate_path) = (Vec::new(), None, None);
        for Assignment { name, value } in Punctuated::<_, Token![,]>::parse_terminated(input)? {
            if seen.contains(&name) {
                return Err(Error::new(name.span(), format!("`{name}` is set twice")));
            }
            match name.to_string().as_str() {
                "key" => key = Some(text_or_expression(value, "a string such as \"orders/{id}\"")?),
                "registry" => {
                    registry = Some(parse_expression(value, "an expression such as `self.locks`")?);
                }
                "mode" => mode = Some(text_or_expression(value, "\"shared\", or a `ClaimMode`")?),
                "options" => base_options = Some(parse_expression(value, "a `LockOptions`")?),
                "wait" | "lease" | "max_hold" | "min_hold" => {
                    durations.push((name.clone(), parse_duration(value)?));
                }
                "token" => token = Some(parse_identifier(value)?),
                "crate" => crate_path = Some(parse_path(value)?),
                _ => {
                    let problem = format!("unknown option `{name}`; the options are {NAMES}");
                    return Err(Error::new(name.span(), problem));
                }
            }
            seen.push(name);
        }
        let missing = |name: &str, example: &str| {
            let problem =
                format!("the option `{name}` is missing, for example `{name} = {example}`");
            Error::new(Span::call_site(), problem)
        };
        Ok(Self {
            key: key.ok_or_else(|| missing("key", "\"orders/{id}\""))?,
            registry: registry.ok_or_else(|| missing("registry", "self.locks"))?,
            mode,
            base_options,
            durations,
            token,
            crate_path,
        })
    }
}

/// `name = value`. The name may be a keyword, because one option is `crate`.
struct Assignment {
    name: Ident,
    value: Expr,
}

impl Parse for Assignment {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let name = input.call(Ident::parse_any)?;
        input.parse::<Token![=]>()?;
        Ok(Self { name, value: input.parse()? })
    }
}

fn text_or_expression(value: Expr, expected: &str) -> syn::Result<Value> {
    match value {
        // `macro_rules!` passes a captured fragment as a group.
        Expr::Group(group) => text_or_expression(*group.expr, expected),
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Ok(Value::Text(text)),
        Expr::Lit(other) => Err(Error::new(other.span(), format!("expected {expected}"))),
        expression => Ok(Value::Expression(expression)),
    }
}

/// Returns `value`. If `value` is a string literal, parses its text as an expression.
fn parse_expression(value: Expr, expected: &str) -> syn::Result<Expr> {
    match text_or_expression(value, expected)? {
        Value::Expression(expression) => Ok(expression),
        Value::Text(text) => text.parse().map_err(|error| {
            Error::new(text.span(), format!("expected {expected}, in quotes or not: {error}"))
        }),
    }
}

/// Returns an expression of type `Duration`. A time in quotes is parsed during macro expansion.
fn parse_duration(value: Expr) -> syn::Result<TokenStream> {
    let expected = "a time such as \"30s\", \"1500ms\" or \"1m 30s\"";
    match text_or_expression(value, &format!("{expected}, or a `Duration`"))? {
        Value::Expression(expression) => Ok(quote!(#expression)),
        Value::Text(text) => {
            let duration = humantime::parse_duration(text.value().trim()).map_err(|error| {
                let problem = format!("{:?} is not {expected}: {error}", text.value());
                Error::new(text.span(), problem)
            })?;
            let (seconds, nanos) = (duration.as_secs(), duration.subsec_nanos());
            Ok(quote_spanned!(text.span()=> ::core::time::Duration::new(#seconds, #nanos)))
        }
    }
}

fn parse_identifier(value: Expr) -> syn::Result<Ident> {
    let problem = "expected a name for the fencing token, such as `token = token`";
    match &value {
        Expr::Path(path) if path.path.get_ident().is_some_and(|name| name != "self") => {
            path.path.require_ident().cloned()
        }
        other => Err(Error::new(other.span(), problem)),
    }
}

fn parse_path(value: Expr) -> syn::Result<Path> {
    let expected = "a path in quotes, such as `crate = \"my_crate::lock_registry\"`";
    let error = |span| Error::new(span, format!("expected {expected}"));
    match text_or_expression(value, expected)? {
        Value::Text(text) => text.parse_with(Path::parse_mod_style).map_err(|_| error(text.span())),
        Value::Expression(expression) => Err(error(expression.span())),
    }
}
