//! Functions and structs of the crates that are hard to read where they are used.

use syn::visit::{self, Visit};
use syn::{Block, Expr, FnArg, ImplItemFn, ItemFn, ItemImpl, ItemMod, ItemStruct, Signature, Stmt, TraitItemFn, Type};

use crate::source::{Module, Modules, Place, for_tests};

/// Functions with a parameter of type `bool`.
pub(crate) fn booleans(modules: &Modules) -> Vec<Place> {
    each(modules, |seen| match seen {
        Seen::Function(signature, _) => signature.inputs.iter().any(is_boolean),
        Seen::Struct(_) => false,
    })
}

/// Functions that only call another one with the same arguments.
pub(crate) fn forwarders(modules: &Modules) -> Vec<Place> {
    each(modules, |seen| match seen {
        Seen::Function(signature, Some(block)) => is_forwarder(signature, block),
        _ => false,
    })
}

/// Structs of 14 fields and more.
pub(crate) fn fields(modules: &Modules) -> Vec<Place> {
    each(modules, |seen| matches!(seen, Seen::Struct(item) if item.fields.len() >= 14))
}

/// What is looked at. A function comes with its body, if it has one.
enum Seen<'a> {
    Function(&'a Signature, Option<&'a Block>),
    Struct(&'a ItemStruct),
}

struct Walk<'a, F> {
    module: &'a Module,
    wanted: F,
    places: Vec<Place>,
}

fn each(modules: &Modules, wanted: impl Fn(&Seen<'_>) -> bool + Copy) -> Vec<Place> {
    let mut all: Vec<&Module> = modules.0.values().filter(|module| module.path.starts_with("crates/")).collect();
    all.sort_by(|a, b| a.path.cmp(&b.path));
    let mut places = Vec::new();
    for module in all {
        let mut walk = Walk { module, wanted, places: Vec::new() };
        for item in &module.items {
            walk.visit_item(item);
        }
        places.append(&mut walk.places);
    }
    places
}

impl<F: Fn(&Seen<'_>) -> bool> Walk<'_, F> {
    fn look(&mut self, seen: &Seen<'_>) {
        if !(self.wanted)(seen) {
            return;
        }
        let ident = match seen {
            Seen::Function(signature, _) => &signature.ident,
            Seen::Struct(item) => &item.ident,
        };
        let (file, line) = (self.module.path.clone(), ident.span().start().line);
        self.places.push(Place { file, line, what: ident.to_string() });
    }
}

impl<'ast, F: Fn(&Seen<'_>) -> bool> Visit<'ast> for Walk<'_, F> {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if !for_tests(&item.attrs) {
            self.look(&Seen::Function(&item.sig, Some(&item.block)));
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if !for_tests(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if !for_tests(&item.attrs) {
            self.look(&Seen::Function(&item.sig, Some(&item.block)));
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        self.look(&Seen::Function(&item.sig, item.default.as_ref()));
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        if !for_tests(&item.attrs) {
            self.look(&Seen::Struct(item));
        }
    }
}

fn is_boolean(argument: &FnArg) -> bool {
    matches!(argument, FnArg::Typed(typed) if matches!(&*typed.ty, Type::Path(path) if path.path.is_ident("bool")))
}

/// Whether a body is one call on what is there already: parameters, fields of them, constants.
fn is_forwarder(signature: &Signature, block: &Block) -> bool {
    let [Stmt::Expr(expression, _)] = block.stmts.as_slice() else { return false };
    let arguments = match bare(expression) {
        Expr::MethodCall(call) if is_plain(&call.receiver) => &call.args,
        Expr::Call(call) if matches!(&*call.func, Expr::Path(path) if !is_constructor(path)) => &call.args,
        _ => return false,
    };
    !signature.inputs.is_empty() && arguments.iter().all(is_plain)
}

/// An expression without what is written around a call: `?`, `.await`, `&`, brackets.
fn bare(expression: &Expr) -> &Expr {
    match expression {
        Expr::Paren(inner) => bare(&inner.expr),
        Expr::Try(inner) => bare(&inner.expr),
        Expr::Reference(inner) => bare(&inner.expr),
        Expr::Unsafe(inner) => match inner.block.stmts.as_slice() {
            [Stmt::Expr(expression, _)] => bare(expression),
            _ => expression,
        },
        _ => expression,
    }
}

/// Whether an expression is a name, a literal, or a field of one.
fn is_plain(expression: &Expr) -> bool {
    match bare(expression) {
        Expr::Path(_) | Expr::Lit(_) => true,
        Expr::Field(field) => is_plain(&field.base),
        _ => false,
    }
}

/// Whether a call makes a value of a struct or an enum.
fn is_constructor(path: &syn::ExprPath) -> bool {
    let last = path.path.segments.last().map(|segment| segment.ident.to_string());
    last.is_some_and(|name| name.starts_with(char::is_uppercase))
}
