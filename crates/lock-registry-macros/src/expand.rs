//! Checks the function and wraps its body: acquire, run under `protect`, release.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::{Attribute, Error, ReturnType, Signature, Token, Type, TypePath, Visibility};

use crate::key::{self, Arguments};
use crate::options::{Options, Value};

/// Expands one use of the attribute. After an error, the output still contains the function, so
/// that its callers compile.
pub(crate) fn locked(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let mut function = match syn::parse2::<Function>(item.clone()) {
        Ok(function) => function,
        Err(error) => {
            let error = error.into_compile_error();
            return quote!(#error #item);
        }
    };
    let checked = function.check().and_then(|()| syn::parse2(attribute));
    match checked.and_then(|options| function.locked_body(&options)) {
        Ok(body) => function.body = body,
        Err(error) => {
            // rustc would report a second error for `const async fn`.
            function.signature.constness = None;
            let error = error.into_compile_error();
            return quote!(#error #[allow(unused)] #function);
        }
    }
    function.into_token_stream()
}

/// A function or method with an unparsed body.
struct Function {
    attributes: Vec<Attribute>,
    visibility: Visibility,
    signature: Signature,
    body: TokenStream,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let attributes = input.call(Attribute::parse_outer)?;
        let visibility = input.parse()?;
        let is_function = {
            let ahead = input.fork();
            ahead.parse::<Signature>().is_ok()
        };
        if !is_function {
            return Err(Error::new(
                input.span(),
                "`#[locked]` is only for async functions and methods",
            ));
        }
        let signature: Signature = input.parse()?;
        if input.peek(Token![;]) {
            let problem = "`#[locked]` needs a body; write it on the implementation of the method";
            return Err(Error::new(signature.ident.span(), problem));
        }
        Ok(Self { attributes, visibility, signature, body: input.parse()? })
    }
}

impl ToTokens for Function {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        let Self { attributes, visibility, signature, body } = self;
        tokens.extend(quote!(#(#attributes)* #visibility #signature #body));
    }
}

impl Function {
    fn check(&self) -> syn::Result<()> {
        let signature = &self.signature;
        if let Some(constness) = signature.constness {
            return Err(Error::new(constness.span(), "a `const fn` cannot wait for a lock"));
        }
        if let Some(abi) = &signature.abi {
            return Err(Error::new(abi.span(), "an `extern fn` cannot wait for a lock"));
        }
        if signature.asyncness.is_none() {
            // `#[async_trait]` is expanded before the attributes of the methods inside it.
            let output = signature.output.to_token_stream().to_string();
            let is_boxed = output.contains("Pin") && output.contains("Future");
            let problem = if is_boxed {
                "`#[locked]` does not work inside `#[async_trait]`; write it on a method that this method calls"
            } else {
                "`#[locked]` needs an `async fn`, because it waits for the lock"
            };
            return Err(Error::new(signature.ident.span(), problem));
        }
        Ok(())
    }

    /// Returns the return type, or an error if it cannot be a `Result`. Accepts unknown types,
    /// which may be aliases of `Result`.
    fn result_type(&self) -> syn::Result<&Type> {
        let span = match &self.signature.output {
            ReturnType::Default => self.signature.ident.span(),
            ReturnType::Type(_, result) => match &**result {
                Type::Path(path) if !cannot_be_result(path) => return Ok(result),
                other => other.span(),
            },
        };
        let problem = "the function must return `Result<_, E>` with `E: From<LockError>`, because a lock can be \
                       busy or lost";
        Err(Error::new(span, problem))
    }

    fn locked_body(&self, options: &Options) -> syn::Result<TokenStream> {
        let arguments = Arguments::of(&self.signature);
        let crate_path = match &options.crate_path {
            Some(crate_path) => crate_path.to_token_stream(),
            None => quote!(::lock_registry),
        };
        let key = match &options.key {
            Value::Text(text) => key::from_text(text, &arguments)?,
            Value::Expression(key) => {
                quote_spanned!(key.span()=> ::core::convert::AsRef::<str>::as_ref(&(#key)))
            }
        };
        let mode = match &options.mode {
            Some(Value::Text(text)) => {
                let mode = match text.value().as_str() {
                    "exclusive" => quote!(Exclusive),
                    "shared" => quote!(Shared),
                    "upgradable" => quote!(Upgradable),
                    other => {
                        let problem = format!(
                            "{other:?} is not a mode; the modes are \"exclusive\", \"shared\" and \"upgradable\", or write \
                             `ClaimMode::Permits {{ take, of }}` for permits"
                        );
                        return Err(Error::new(text.span(), problem));
                    }
                };
                quote!(#crate_path::modes::ClaimMode::#mode)
            }
            Some(Value::Expression(mode)) => mode.to_token_stream(),
            None => quote!(#crate_path::modes::ClaimMode::Exclusive),
        };
        let base_options = match &options.base_options {
            Some(base_options) => quote!((#base_options)),
            None => quote!(#crate_path::LockOptions::new()),
        };
        let (names, durations): (Vec<_>, Vec<_>) = options.durations.iter().cloned().unzip();
        let token = options.token.as_ref();
        if let Some(token) = token.filter(|token| arguments.contains(&token.to_string())) {
            let problem =
                format!("`{token}` is the name of an argument; name the token differently");
            return Err(Error::new(token.span(), problem));
        }

        let (registry, body) = (&options.registry, &self.body);
        // With this span, the local variables of the expansion are not visible in the body.
        let hygienic = Span::mixed_site();
        let bind_token = token.map(|token| {
            quote_spanned!(hygienic=> let #token = #crate_path::LockGuard::fencing_token(&guard);)
        });
        let result = self.result_type()?;
        // The compiler shows type errors at the user's code that causes them.
        let at_result = hygienic.located_at(result.span());
        let convert_error = quote_spanned!(at_result=>
            ::core::result::Result::Err(::core::convert::From::from(error))
        );
        let fail = quote_spanned!(at_result=> fail(error));
        let at_registry = hygienic.located_at(registry.span());
        let obtain = quote_spanned!(at_registry=> (#registry).obtain(&#key));
        Ok(quote_spanned!(hygienic=> {
            let fail = |error: #crate_path::LockError| #convert_error;
            let lock = {
                #[allow(unused_imports)]
                use #crate_path::LockRegistry as _;
                #obtain
            };
            // In statements of their own, so that temporaries of these expressions, such as guards
            // of a mutex, are dropped before the wait.
            let mode = #mode;
            let options = #base_options #(.#names(#durations))*;
            let guard = match lock.acquire(mode, options).await {
                ::core::result::Result::Ok(guard) => guard,
                ::core::result::Result::Err(error) => return #fail,
            };
            #bind_token
            let protected = #crate_path::LockGuard::protect(&guard, async move {
                // Sets the type of the block to that of the function, for `?` and coercions.
                if let ::core::option::Option::Some(error) = ::core::option::Option::None {
                    return #fail;
                }
                #body
            });
            match protected.await {
                ::core::result::Result::Ok(result) => {
                    // The body completed under the lock, so its result is valid even if the release
                    // fails. The engine emits an event for a failed release and retries it.
                    let _ = #crate_path::LockGuard::unlock(guard).await;
                    result
                }
                ::core::result::Result::Err(error) => #fail,
            }
        }))
    }
}

fn cannot_be_result(path: &TypePath) -> bool {
    let name = path.path.segments.last().map(|last| last.ident.to_string()).unwrap_or_default();
    let is_primitive = name.starts_with(|first: char| first.is_ascii_lowercase());
    is_primitive || ["Option", "String", "Vec", "Box"].contains(&&*name)
}
