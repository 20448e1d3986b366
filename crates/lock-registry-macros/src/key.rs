//! Turns the text of a key, such as `orders/{order.id}`, into an expression. A placeholder is an
//! argument, or a field, a method or an index of one, with an optional format as in `format!`.

use proc_macro2::{Group, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote_spanned};
use syn::{Error, Expr, FnArg, LitStr, Signature};

/// Returns an expression of type `String` or `&str`.
///
/// # Errors
/// If the text is empty or malformed, or if a placeholder does not begin with an argument.
pub(crate) fn from_text(text: &LitStr, arguments: &Arguments) -> syn::Result<TokenStream> {
    let span = text.span();
    let value = text.value();
    if value.is_empty() {
        return Err(Error::new(span, "the key is empty, and no store accepts an empty key"));
    }
    let mut format = String::new();
    let mut values: Vec<Expr> = Vec::new();
    let mut rest = value.as_str();
    while let Some(at) = rest.find(['{', '}']) {
        let (before, brace) = rest.split_at(at);
        format.push_str(before);
        if brace.starts_with("{{") || brace.starts_with("}}") {
            format.push_str(&brace[..2]);
            rest = &brace[2..];
            continue;
        }
        let Some(inside) = brace.strip_prefix('{') else {
            return Err(Error::new(span, "`}` closes no `{`; write `}}` for a literal `}`"));
        };
        let end = inside.find(['{', '}']).filter(|end| inside[*end..].starts_with('}'));
        let Some(end) = end else {
            return Err(Error::new(span, "`{` is not closed; write `{{` for a literal `{`"));
        };
        let (name, format_spec) = split_format_spec(&inside[..end]);
        values.push(arguments.parse_value(name, span)?);
        format.push_str(&format!("{{{}{format_spec}}}", values.len() - 1));
        rest = &inside[end + 1..];
    }
    if values.is_empty() && !value.contains(['{', '}']) {
        return Ok(text.to_token_stream());
    }
    format.push_str(rest);
    let format = LitStr::new(&format, span);
    Ok(quote_spanned!(span=> ::std::format!(#format, #(#values),*)))
}

/// Splits `id:04` into the value and the format specification, which begins with the colon. The
/// double colon of a path such as `a::b` is part of the value.
fn split_format_spec(placeholder: &str) -> (&str, &str) {
    let bytes = placeholder.as_bytes();
    let is_single = |at: usize| {
        bytes[at] == b':' && bytes.get(at + 1) != Some(&b':') && (at == 0 || bytes[at - 1] != b':')
    };
    match (0..bytes.len()).find(|at| is_single(*at)) {
        Some(at) => placeholder.split_at(at),
        None => (placeholder, ""),
    }
}

/// The names that a key may use.
pub(crate) struct Arguments(Vec<String>);

impl Arguments {
    pub(crate) fn of(signature: &Signature) -> Self {
        let mut names = Vec::new();
        for argument in &signature.inputs {
            match argument {
                FnArg::Receiver(_) => names.push("self".to_owned()),
                FnArg::Typed(typed) => collect_names(typed.pat.to_token_stream(), &mut names),
            }
        }
        Self(names)
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.iter().any(|argument| argument == name)
    }

    /// Parses the value of a placeholder, without its format.
    fn parse_value(&self, text: &str, span: Span) -> syn::Result<Expr> {
        let fail = |problem: String| Err(Error::new(span, problem));
        let text = text.trim();
        if text.is_empty() || text.bytes().all(|byte| byte.is_ascii_digit()) {
            return fail(format!("`{{{text}}}` names no argument; {}", self.describe()));
        }
        let unsupported = format!(
            "`{{{text}}}` is not an argument, or a field, method or index of one; for other values, write `key = EXPRESSION`"
        );
        let tokens: syn::Result<TokenStream> = text.parse().map_err(Into::into);
        let Ok(value) = tokens.and_then(|tokens| syn::parse2(with_span(span, tokens))) else {
            return fail(unsupported);
        };
        match first_name(&value) {
            None => fail(unsupported),
            Some(name) if self.contains(&name) => Ok(value),
            Some(name) => fail(format!("`{name}` is not an argument; {}", self.describe())),
        }
    }

    fn describe(&self) -> String {
        if self.0.is_empty() {
            return "the function has no arguments".to_owned();
        }
        let names: Vec<_> = self.0.iter().map(|name| format!("`{name}`")).collect();
        format!("the arguments are {}", names.join(", "))
    }
}

/// Collects all identifiers of a pattern, including names of types and fields. A placeholder that
/// begins with such a name is accepted here, and fails only when the expanded code is compiled.
fn collect_names(pattern: TokenStream, names: &mut Vec<String>) {
    for token in pattern {
        match token {
            TokenTree::Ident(name) if name != "mut" && name != "ref" => {
                names.push(name.to_string());
            }
            TokenTree::Group(group) => collect_names(group.stream(), names),
            _ => {}
        }
    }
}

/// Returns the name at the beginning of a chain of fields and methods.
fn first_name(value: &Expr) -> Option<String> {
    match value {
        Expr::Path(path) => path.path.get_ident().map(ToString::to_string),
        Expr::Field(field) => first_name(&field.base),
        Expr::MethodCall(call) => first_name(&call.receiver),
        Expr::Index(index) => first_name(&index.expr),
        _ => None,
    }
}

/// Sets the span of all tokens to `span`, so that the compiler shows their errors at the string
/// literal that contains them.
fn with_span(span: Span, tokens: TokenStream) -> TokenStream {
    let moved = |mut token: TokenTree| {
        if let TokenTree::Group(group) = token {
            token =
                TokenTree::Group(Group::new(group.delimiter(), with_span(span, group.stream())));
        }
        token.set_span(span);
        token
    };
    tokens.into_iter().map(moved).collect()
}
